"""The CUDA driver and the allocator functions over it, on a stand-in for the driver library
(tests/cuda_standin): no GPU and no CUDA build of torch is needed."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import mybackend

ROOT = Path(__file__).resolve().parent.parent
FLAGS = ["-std=c++20", "-O1", f"-I{ROOT / 'csrc'}"]


@pytest.fixture(scope="module")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cuda") / "libcuda.so.1"
    source = ROOT / "tests/cuda_standin/libcuda.cpp"
    subprocess.run(
        ["c++", *FLAGS, "-fPIC", "-shared", str(source), "-o", str(path), "-Wl,-soname,libcuda.so.1"], check=True
    )
    return path


@pytest.fixture(scope="module")
def driver_test(standin: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("cpp") / "cuda_driver_test"
    library = Path(mybackend.library_path())
    subprocess.run(
        ["c++", *FLAGS, str(ROOT / "tests/cpp/cuda_driver_test.cpp"), "-o", str(program), str(standin),
         f"-L{library.parent}", "-lmybackend_core", f"-Wl,-rpath,{library.parent}", f"-Wl,-rpath,{standin.parent}", "-pthread"],
        check=True,
    )  # fmt: skip
    return program


@pytest.mark.parametrize(
    "part", ["calls", "each_call_fails_once", "captures", "reuse_in_captures", "gone", "pinned", "sharing", "random"]
)
def test_driver(driver_test: Path, standin: Path, part: str) -> None:
    env = {"MYBACKEND_CUDA_LIBRARY": str(standin), "MYBACKEND_STANDIN_LAZY": "1"}
    done = subprocess.run([str(driver_test), part], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout.strip() == "ok", done.stderr


@pytest.fixture
def run_cuda(standin: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[..., str]:
    """Runs Python with the stand-in as the CUDA driver; `lib` is the core library, `st` the stand-in."""
    prelude = """
import ctypes, mybackend
from mybackend import cuda
lib = cuda._library()
lib.mybackend_cuda_try_malloc.restype = ctypes.c_void_p
lib.mybackend_cuda_try_malloc.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
lib.mybackend_cuda_try_free.argtypes = [ctypes.c_void_p]
lib.mybackend_free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
lib.mybackend_free.restype = None
lib.mybackend_base_allocation.restype = ctypes.c_void_p
lib.mybackend_base_allocation.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t)]
lib.mybackend_record_stream.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
def malloc(size, device=0, stream=0):
    return lib.mybackend_cuda_try_malloc(size, device, stream)
def error():
    return lib.mybackend_cuda_last_error().decode()
st = ctypes.CDLL(LIBRARY)
st.standin_used_bytes.restype = ctypes.c_size_t
st.standin_calls.restype = ctypes.c_int64
st.standin_fail.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int]
st.standin_advance.argtypes = [ctypes.c_void_p]
""".replace("LIBRARY", repr(str(standin)))

    def run(code: str, **environment: str) -> str:
        import textwrap

        return run_python(
            prelude + textwrap.dedent(code), MYBACKEND_CUDA_LIBRARY=str(standin), **environment
        ).stdout.strip()

    return run


def test_malloc_and_free(run_cuda) -> None:
    run_cuda(
        """
        a, b = malloc(1000), malloc(5 << 20, device=1)
        assert a == 0x700000000000 and a % 512 == 0 and b % 512 == 0
        ctypes.memset(a, 7, 1000); ctypes.memset(b, 8, 5 << 20)          # real bytes
        assert ctypes.string_at(a, 1000) == b"\\7" * 1000
        stats = cuda.memory_stats(0)
        assert stats["allocated_bytes.all.current"] == 1024 and stats["requested_bytes.all.current"] == 1000
        assert cuda.memory_stats(1)["reserved_bytes.all.current"] == 20 << 20
        assert st.standin_used_bytes(0) == 2 << 20
        size = ctypes.c_size_t()
        assert lib.mybackend_base_allocation(a + 10, size) == a and size.value == 2 << 20
        (segment,) = cuda.memory_snapshot(0)
        assert [block["state"] for block in segment["blocks"]] == ["active_allocated", "inactive"]
        lib.mybackend_free(a, 1000, 0, None); lib.mybackend_free(b, 0, 0, None)   # the wrong device: corrected
        assert cuda.memory_stats(0)["allocated_bytes.all.current"] == cuda.memory_stats(1)["allocated_bytes.all.current"] == 0
        assert malloc(0) is None and error() == ""
        cuda.empty_cache()
        assert st.standin_used_bytes(0) == st.standin_used_bytes(1) == 0
        """
    )


def test_what_is_wrong_is_reported(run_cuda) -> None:
    run_cuda(
        """
        a = malloc(1000)
        assert malloc(10, device=7) is None and "device 7 does not exist; there are 2" in error()
        assert malloc(10, device=-1) is None and "device -1 does not exist" in error()
        assert lib.mybackend_cuda_try_free(a) == 1 and error() == ""
        assert lib.mybackend_cuda_try_free(a) == 0 and "not allocated" in error()
        assert lib.mybackend_cuda_try_free(a + 512) == 0 and lib.mybackend_cuda_try_free(12345) == 0
        lib.mybackend_free(a, 0, 0, None)       # reported on standard error
        lib.mybackend_free(12345, 0, 5, None)
        lib.mybackend_record_stream(12345, None)
        assert lib.mybackend_cuda_configure(b"max_split_size:1") == 1 and "max_split_size_mb" in error()
        try:
            cuda.set_per_process_memory_fraction(2.0, 0)
            raise SystemExit("no error")
        except RuntimeError as e:
            assert "within [0, 1]" in str(e)
        try:
            cuda.memory_stats(9)
            raise SystemExit("no error")
        except RuntimeError as e:
            assert "device 9 does not exist" in str(e)
        assert cuda.memory_stats(0)["allocated_bytes.all.current"] == 0
        """
    )


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_out_of_memory_explains_itself(run_cuda, conf: str) -> None:
    run_cuda(
        """
        a = malloc(30 << 20)
        assert malloc(60 << 20) is None
        text = error()
        assert text.startswith("CUDA out of memory. Tried to allocate 60.00 MiB"), text
        assert "64.00 MiB" in text and "OUT_OF_MEMORY" in text, text
        assert lib.mybackend_cuda_try_free(a)
        assert malloc(60 << 20)
        assert cuda.memory_stats(0)["num_ooms"] == 1
        """,
        MYBACKEND_STANDIN_CAPACITY=str(64 << 20),
        MYBACKEND_ALLOC_CONF=conf,
    )


def test_a_use_on_another_stream_delays_the_reuse(run_cuda) -> None:
    run_cuda(
        """
        side = 0x5000
        a = malloc(1000)
        lib.mybackend_record_stream(a, side)
        lib.mybackend_cuda_try_free(a)
        assert cuda.memory_stats(0)["active_bytes.all.current"] == 1024
        assert malloc(1000) != a
        st.standin_advance(side)
        assert malloc(1000) == a
        """,
        MYBACKEND_STANDIN_LAZY="1",
    )


def test_the_context_goes_away(run_cuda) -> None:
    run_cuda(
        """
        a, b = malloc(1000), malloc(30 << 20)
        lib.mybackend_record_stream(a, 0x5000)
        st.standin_set_gone(1)
        assert malloc(100 << 20) is None
        assert "CUDA_ERROR_DEINITIALIZED" in error() and "context is gone" in error(), error()
        assert lib.mybackend_cuda_try_free(a) and lib.mybackend_cuda_try_free(b)
        cuda.empty_cache()
        assert cuda.memory_stats(0)["allocated_bytes.all.current"] == 0
        assert cuda.memory_stats(0)["reserved_bytes.all.current"] > 0     # not given back: nobody would take it
        """
    )


def test_a_child_process_is_told(run_cuda) -> None:
    run_cuda(
        """
        import os, torch
        a = malloc(1000)
        x = torch.ones(10, device="mybackend"); assert (x + x).sum().item() == 20
        pid = os.fork()
        if pid == 0:
            ok = malloc(10) is None and "forked subprocess" in error()
            ok = ok and (x + x).sum().item() == 20             # host memory goes on
            os._exit(0 if ok else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert malloc(1000)
        """
    )


@pytest.mark.parametrize("device", [None, "mybackend"])
def test_without_a_driver(run_python, device: str | None) -> None:
    run_python(
        f"""
        import torch, mybackend
        torch.ones(2)
        for attempt in range(2):
            try:
                if {device!r}:
                    torch.ones(2, device="mybackend")
                else:
                    mybackend.cuda._check(mybackend.cuda._library().mybackend_cuda_start())
                raise SystemExit("no error")
            except RuntimeError as error:
                assert "no CUDA driver: libcuda-not-here.so (named by MYBACKEND_CUDA_LIBRARY) cannot be loaded" in str(error), error
        """,
        MYBACKEND_CUDA_LIBRARY="libcuda-not-here.so",
        MYBACKEND_ALLOC_CONF="driver:cuda",
    )


def test_tensors_in_gpu_memory_need_a_cuda_build_of_torch(run_cuda) -> None:
    run_cuda(
        """
        import torch
        assert malloc(100)
        if torch.version.cuda is None:
            for attempt in range(2):
                try:
                    torch.ones(2, device="mybackend")
                    raise SystemExit("no error")
                except RuntimeError as e:
                    assert "driver:cuda: mybackend.cuda.install: torch" in str(e) and "is not a CUDA build" in str(e), e
            assert not torch.mybackend.is_initialized()
        assert cuda.memory_stats(0)["allocation.all.current"] == 1
        """,
        MYBACKEND_ALLOC_CONF="driver:cuda",
    )


def test_tensors_in_an_amd_gpus_memory_are_refused_by_name(run_python) -> None:
    run_python(
        """
        import torch, mybackend
        try:
            torch.ones(2, device="mybackend")
            raise SystemExit("no error")
        except NotImplementedError as e:
            assert "AMD" in str(e), e
        """,
        MYBACKEND_ALLOC_CONF="driver:hip",
    )


def test_swapping_in_needs_a_cuda_build_of_torch(run_python) -> None:
    run_python(
        """
        import torch, mybackend
        if torch.version.cuda is None:
            try:
                mybackend.cuda.install()
                raise SystemExit("no error")
            except RuntimeError as error:
                assert "is not a CUDA build" in str(error)
            assert not mybackend.cuda.installed()
        """
    )
