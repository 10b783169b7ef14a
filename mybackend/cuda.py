"""The caching allocator under `torch.cuda`.

`pluggable_allocator()` works with any CUDA build of PyTorch from 2.1 on, through
`torch.cuda.memory.CUDAPluggableAllocator`; `torch.cuda`'s own statistics and snapshots then raise,
and the functions here give them. `install()` replaces the allocator of `torch.cuda` completely, so
that its statistics, snapshots, pools and graphs keep working; it needs mybackend to be built
against a CUDA build of torch.

Both must come before the process's first CUDA allocation. All sizes are bytes. The plain functions
need nothing but libmybackend_core.so.
"""

from __future__ import annotations

import ctypes
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

__all__ = [
    "empty_cache",
    "install",
    "installed",
    "library_path",
    "memory_snapshot",
    "memory_stats",
    "pluggable_allocator",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
    "set_per_process_memory_fraction",
]


def library_path() -> str:
    """The path of libmybackend_core.so, which exports `mybackend_malloc` and `mybackend_free`."""
    return str(Path(__file__).resolve().parent / "libmybackend_core.so")


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(library_path())
    library.mybackend_cuda_last_error.restype = ctypes.c_char_p
    for name in ("mybackend_cuda_stats_json", "mybackend_cuda_segments_json"):
        getattr(library, name).restype = ctypes.c_void_p
        getattr(library, name).argtypes = [ctypes.c_int]
    library.mybackend_string_free.argtypes = [ctypes.c_void_p]
    library.mybackend_cuda_set_memory_fraction.argtypes = [ctypes.c_double, ctypes.c_int]
    library.mybackend_cuda_configure.argtypes = [ctypes.c_char_p]
    for name in ("mybackend_cuda_reset_peak_stats", "mybackend_cuda_reset_accumulated_stats"):
        getattr(library, name).argtypes = [ctypes.c_int]
        getattr(library, name).restype = None
    return library


def _check(failed: int) -> None:
    if failed:
        raise RuntimeError(_library().mybackend_cuda_last_error().decode())


def _json(function: str, device: int) -> Any:
    library = _library()
    text = getattr(library, function)(device)
    _check(text is None)
    try:
        return json.loads(ctypes.string_at(text))
    finally:
        library.mybackend_string_free(text)


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    import torch

    if device is None:
        return torch.cuda.current_device()
    device = torch.device(device)
    if device.type != "cuda":
        raise ValueError(f"expected a CUDA device, got {device}")
    return torch.cuda.current_device() if device.index is None else device.index


def _check_autograd(function: str) -> None:
    """Raises where torch.cuda's tensors could not be trained: PyTorch's engine looks for the streams of
    one kind of accelerator only, and a named PrivateUse1 device goes before CUDA."""
    import torch

    accelerator = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    if accelerator is not None and accelerator.type != "cuda":
        raise RuntimeError(
            f"mybackend.cuda.{function}: the device `{accelerator.type}` is registered in this process, and torch "
            f"{torch.__version__} cannot run the backward of CUDA tensors beside it; set MYBACKEND_DEVICE=0, so that "
            "importing mybackend does not register it (or use tensors of `mybackend` over the GPU: driver:cuda)"
        )


def pluggable_allocator(conf: str = "") -> Any:
    """A `torch.cuda.memory.CUDAPluggableAllocator` over this allocator, with all of its optional
    functions wired: give it to `torch.cuda.memory.change_current_allocator`, or to
    `torch.cuda.MemPool` as `pluggable_allocator().allocator()`.

    `conf`: settings, as in MYBACKEND_ALLOC_CONF. Raises RuntimeError when there is no GPU driver
    (its message says what was looked for) and ValueError for a bad `conf`.
    """
    import torch

    library = _library()
    if conf and library.mybackend_cuda_configure(conf.encode()):
        raise ValueError(library.mybackend_cuda_last_error().decode())
    _check(library.mybackend_cuda_start())
    _check_autograd("pluggable_allocator")
    plugged = torch.cuda.memory.CUDAPluggableAllocator(library_path(), "mybackend_malloc", "mybackend_free")

    def address(name: str) -> int:
        value = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        assert value is not None
        return value

    # Their setters came to torch one after another: an older torch lacks some.
    for setter, function in (
        ("set_init_fn", "mybackend_init"),
        ("set_reset_fn", "mybackend_reset"),
        ("set_memory_fraction_fn", "mybackend_memory_fraction"),
        ("set_base_alloc_fn", "mybackend_base_allocation"),
        ("set_record_stream_fn", "mybackend_record_stream"),
        ("set_begin_allocate_to_pool", "mybackend_begin_allocate_to_pool"),
        ("set_begin_allocate_to_pool_fn", "mybackend_begin_allocate_to_pool"),
        ("set_end_allocate_to_pool_fn", "mybackend_end_allocate_to_pool"),
        ("set_release_pool", "mybackend_release_pool"),
        ("set_release_pool_fn", "mybackend_release_pool"),
    ):
        if hasattr(plugged.allocator(), setter):
            getattr(plugged.allocator(), setter)(address(function))
    return plugged


def memory_stats(device: Any = None) -> dict[str, Any]:
    """The counters of `torch.cuda.memory_stats`, flat: stats["allocated_bytes.all.peak"]. Bytes."""
    flat: dict[str, Any] = {}

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                add(f"{prefix}.{key}" if prefix else key, inner)
        else:
            flat[prefix] = value

    add("", _json("mybackend_cuda_stats_json", _index(device)))
    return dict(sorted(flat.items()))


def memory_snapshot(device: Any = None) -> list[dict[str, Any]]:
    """The segments and blocks of a device, as `torch.cuda.memory_snapshot`, without stacks."""
    return _json("mybackend_cuda_segments_json", _index(device))


def empty_cache() -> None:
    """Gives cached memory that no tensor uses back to the driver, on all devices."""
    _library().mybackend_cuda_empty_cache()


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    """Limits what this process reserves to `fraction` of the device's memory; 1.0 is no limit."""
    _check(_library().mybackend_cuda_set_memory_fraction(fraction, _index(device)))


def reset_peak_memory_stats(device: Any = None) -> None:
    """Sets every peak to the current value."""
    _library().mybackend_cuda_reset_peak_stats(_index(device))


def reset_accumulated_memory_stats(device: Any = None) -> None:
    """Sets the counts of what was allocated and freed to 0; current values and peaks stay."""
    _library().mybackend_cuda_reset_accumulated_stats(_index(device))


def install(conf: str = "") -> None:
    """Makes this allocator the one of `torch.cuda`, completely: `torch.cuda.memory_stats`,
    `memory_summary`, `memory_snapshot`, `_record_memory_history`, `empty_cache`, memory fractions,
    `MemPool`, CUDA graphs, `record_stream` and IPC keep working, over this allocator.

    `conf`: settings, as in MYBACKEND_ALLOC_CONF. Raises RuntimeError, before anything is changed,
    when torch or mybackend is not built for CUDA, when there is no GPU driver, after the process's
    first CUDA allocation, and where the device `mybackend` is registered (PyTorch could not run the
    backward of CUDA tensors).
    """
    _install(conf, for_device=False)


def _install(conf: str, for_device: bool) -> None:
    import torch

    library = _library()
    if torch.version.cuda is None:
        raise RuntimeError(f"mybackend.cuda.install: torch {torch.__version__} is not a CUDA build")
    try:
        from mybackend import _cuda
    except ImportError as error:
        raise RuntimeError(
            f"mybackend.cuda.install: mybackend was built without its CUDA part ({error}); build it again against "
            f"torch {torch.__version__}, with the CUDA headers installed"
        ) from error
    if conf and library.mybackend_cuda_configure(conf.encode()):
        raise ValueError(library.mybackend_cuda_last_error().decode())
    _check(library.mybackend_cuda_start())
    if not for_device and not _cuda.installed():
        _check_autograd("install")
    _cuda.install()


def installed() -> bool:
    """Whether `install` has been done in this process."""
    try:
        from mybackend import _cuda
    except ImportError:
        return False
    return _cuda.installed()


# --- For the device `mybackend` over a GPU (driver:cuda) ------------------------------------------


def _is_free() -> bool:
    """Whether `driver:auto` may take the GPU: torch.cuda has one, this build can use it, and the
    program has not used it yet."""
    import torch

    if torch.version.cuda is None or torch.cuda.is_initialized():
        return False
    try:
        from mybackend import _cuda
    except ImportError:
        return False
    if not _cuda.installed() and torch.cuda.memory.get_allocator_backend() != "native":
        return False  # another allocator was put there
    return torch.cuda.is_available()


def _lend() -> int:
    """Prepares torch.cuda for lending its kernels to `mybackend` tensors: puts this allocator under
    it, starts it, and returns the allocator's address."""
    import torch

    try:
        _install("", for_device=True)
    except (RuntimeError, ValueError) as error:
        raise type(error)(f"driver:cuda: {error}") from error
    torch.cuda.init()
    from mybackend import _cuda

    return _cuda._allocator_address()
