"""Mapped storage: files as tensors, checkpoints without a copy, the memory kind mmap."""

from __future__ import annotations

import gc
import json
import os
import pickle
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mybackend import config, memory, storage

MIB = 1 << 20


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings_of(path: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(path))


@pytest.fixture(autouse=True)
def nothing_open(tmp_path: Path) -> Iterator[None]:
    torch.ones(1, device="mybackend")
    before = descriptors()
    yield
    gc.collect()
    assert descriptors() == before, "a file descriptor stayed open"
    assert mappings_of(tmp_path) == 0, "a mapping stayed"


# --- from_file --------------------------------------------------------------------------------------


def test_torch_from_file_shared(tmp_path: Path) -> None:
    path = tmp_path / "shared.bin"
    x = torch.from_file(str(path), shared=True, size=1000, dtype=torch.float32, device="mybackend")
    assert x.device.type == "mybackend" and x.is_shared() and path.stat().st_size == 4000
    assert x.untyped_storage().filename == str(path) and path.stat().st_mode & 0o777 == 0o600
    x.copy_(torch.arange(1000.0))
    y = torch.from_file(str(path), shared=True, size=1000, dtype=torch.float32, device="mybackend")
    assert torch.equal(x, y)
    y[7] = -1
    assert x[7].item() == -1  # the same pages
    storage.sync(x)
    assert struct.unpack_from("<f", path.read_bytes(), 28)[0] == -1
    grown = torch.from_file(str(path), shared=True, size=2000, dtype=torch.float32, device="mybackend")
    assert path.stat().st_size == 8000 and torch.equal(grown[:1000], x)


def test_torch_from_file_private(tmp_path: Path) -> None:
    path = tmp_path / "private.bin"
    path.write_bytes(bytes(range(200)))
    x = torch.from_file(str(path), shared=False, size=100, dtype=torch.uint8, device="mybackend")
    assert not x.is_shared() and x.sum().item() == sum(range(100))
    x.zero_()
    assert path.read_bytes() == bytes(range(200))
    path.unlink()
    assert (x + 1).sum().item() == 100  # the mapping outlives the name
    assert torch.from_file(str(path), size=0, device="mybackend").numel() == 0


def test_from_file_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "data.bin"
    path.write_bytes(bytes(range(256)) * 64)
    for offset in (0, 1, 4095, 4096, 5000):  # not page aligned
        x = storage.from_file(path, (2, 50), torch.uint8, offset=offset)
        assert x.flatten().tolist() == [(offset + i) % 256 for i in range(100)]
        x.zero_()
    assert path.read_bytes() == bytes(range(256)) * 64
    x = storage.from_file(path, (100,), torch.uint8, access="readonly", offset=300)
    storage.advise(x, "sequential")
    storage.advise(x, "willneed")
    assert x.sum().item() == sum((300 + i) % 256 for i in range(100))
    info = storage.mapping(x)
    assert info is not None and info["path"] == str(path) and info["bytes"] == 100 and info["resident_bytes"] > 0
    assert storage.mapping(torch.ones(1, device="mybackend")) is None
    with pytest.raises(ValueError, match="not over a mapping"):
        storage.advise(torch.ones(1, device="mybackend"), "random")
    with pytest.raises(ValueError, match="expected normal, random"):
        storage.advise(x, "sometimes")
    view = storage.from_file(path, (4, 4), torch.int32, offset=16)[1:]
    assert view.is_contiguous() and (view + 0).shape == (3, 4)


@pytest.mark.parametrize("kind", ["missing", "empty", "short", "folder", "fifo", "offset", "overflow", "unreadable"])
@pytest.mark.parametrize("load", ["from_file", "torch", "safetensors", "checkpoint"])
def test_bad_files(tmp_path: Path, kind: str, load: str) -> None:
    path = tmp_path / "bad"
    if kind == "empty":
        path.touch()
    elif kind in ("short", "offset", "overflow"):
        path.write_bytes(b"x" * 100)
    elif kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "unreadable":
        path.write_bytes(b"x" * 1000)
        path.chmod(0)
        if os.access(path, os.R_OK):
            pytest.skip("this user may read everything")
    size, offset = (2**62, 0) if kind == "overflow" else (1000, 0)
    if kind == "offset":
        size, offset = 10, 95
    before = torch.mybackend.tracker_stats()
    calls: dict[str, Callable[[], object]] = {
        "from_file": lambda: storage.from_file(path, (size,), torch.float32, offset=offset),
        "torch": lambda: torch.from_file(str(path), shared=False, size=size, dtype=torch.float32, device="mybackend"),
        "safetensors": lambda: storage.load_safetensors(path),
        "checkpoint": lambda: torch.load(str(path), mmap=True, map_location="mybackend"),
    }
    if load == "torch" and kind == "offset":
        pytest.skip("torch.from_file has no offset")
    if load == "checkpoint" and kind in ("fifo", "folder", "empty"):
        pytest.skip("torch.load opens it before the device is asked")
    with pytest.raises((ValueError, OSError, RuntimeError, EOFError)) as error:
        calls[load]()
    assert str(error.value)
    gc.collect()
    after = torch.mybackend.tracker_stats()
    assert after["current_bytes"] == before["current_bytes"]
    assert mappings_of(path) == 0


@pytest.mark.parametrize("load", ["from_file", "torch", "safetensors", "checkpoint"])
def test_a_growing_file(tmp_path: Path, load: str) -> None:
    """Bytes that come later, also while it is mapped, are not in the way."""
    path = tmp_path / "growing"
    data = torch.arange(2000.0)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "from_file": lambda: storage.from_file(path, (2000,)),
        "torch": lambda: torch.from_file(str(path), shared=True, size=2000, dtype=torch.float32, device="mybackend"),
        "safetensors": lambda: storage.load_safetensors(path)["x"],
        "checkpoint": lambda: torch.load(path, mmap=True, map_location="mybackend"),
    }
    if load == "safetensors":
        write_safetensors(
            path, {"x": {"dtype": "F32", "shape": [2000], "data_offsets": [0, 8000]}}, data.numpy().tobytes()
        )
    elif load == "checkpoint":
        torch.save(data, path)
    else:
        path.write_bytes(data.numpy().tobytes())
    x = calls[load]()
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"more" * 5000)
    assert path.stat().st_size == size + 20_000 and torch.equal(x.cpu(), data)
    assert torch.equal(calls[load]().cpu(), data) and path.stat().st_size == size + 20_000
    del x
    gc.collect()
    assert mappings_of(path) == 0


@pytest.mark.parametrize("load", ["from_file", "torch", "safetensors", "checkpoint"])
def test_a_file_larger_than_memory(tmp_path: Path, load: str) -> None:
    """A sparse file: it is mapped whole, and a part of it is read and written to."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    count = 2 * memory_bytes // 4
    path = tmp_path / "huge"
    if load == "checkpoint":
        with FakeTensorMode():
            x = torch.empty(count)
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(x, path)
    else:
        write_safetensors(path, {"x": {"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]}}, b"")
        with path.open("r+b") as file:
            file.truncate((path.stat().st_size if load == "safetensors" else 0) + 4 * count)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "from_file": lambda: storage.from_file(path, (count,)),
        "torch": lambda: torch.from_file(str(path), shared=False, size=count, dtype=torch.float32, device="mybackend"),
        "safetensors": lambda: storage.load_safetensors(path)["x"],
        "checkpoint": lambda: torch.load(path, mmap=True, map_location="mybackend"),
    }
    x = calls[load]()
    assert x.device.type == "mybackend" and x.shape == (count,)
    assert x[-1].item() == 0 and x[count // 2 : count // 2 + 1000].sum().item() == 0
    x[count // 2] = 3
    assert x[count // 2].item() == 3
    del x
    gc.collect()
    assert mappings_of(path) == 0
    assert calls[load]()[count // 2].item() == 0  # it was a change of this process


def test_a_full_disk_loses_nothing(run_python, tmp_path: Path) -> None:
    """RLIMIT_FSIZE stands for a disk that is full."""
    path = tmp_path / "grow.bin"
    path.write_bytes(b"x" * 5000)
    run_python(
        f"""
        import os, resource, signal, torch, mybackend
        from mybackend import memory, storage
        torch.ones(1, device="mybackend")
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        fds = len(os.listdir("/proc/self/fd"))
        for path, size in (({str(path)!r}, 5000), ({str(tmp_path / "new.bin")!r}, None)):
            try:
                torch.from_file(path, shared=True, size=4 << 20, dtype=torch.uint8, device="mybackend")
                raise SystemExit("no error")
            except torch.OutOfMemoryError as error:
                assert path in str(error), error
            assert (os.path.getsize(path) == size) if size else not os.path.exists(path)
        live = torch.mybackend.tracker_stats()
        with memory.use("mmap", dir={str(tmp_path)!r}):
            try:
                torch.empty(8 << 20, dtype=torch.uint8, device="mybackend")
                raise SystemExit("no error")
            except torch.OutOfMemoryError as error:
                assert {str(tmp_path)!r} in str(error), error
        assert torch.mybackend.tracker_stats() == live
        assert len(os.listdir("/proc/self/fd")) == fds
        memory.check_invariants()
        """
    )
    assert path.read_bytes() == b"x" * 5000


# --- Checkpoints ------------------------------------------------------------------------------------


def checkpoint() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {f"layer.{i}": torch.randn(50 + i, 20) for i in range(6)}
    tensors["half"] = torch.randn(30).half()
    tensors["view"] = tensors["layer.0"][5:]
    tensors["strided"] = tensors["layer.1"].t()
    tensors["empty"] = torch.empty(0, 3)
    tensors["flags"] = torch.tensor([True, False])
    return tensors


@pytest.mark.parametrize(
    "location",
    ["mybackend", "mybackend:0", torch.device("mybackend"), {"cpu": "mybackend"},
     lambda storage, location: torch.serialization.default_restore_location(storage, "mybackend")],
)  # fmt: skip
@pytest.mark.parametrize("weights_only", [True, False])
def test_load_a_mapped_checkpoint(tmp_path: Path, location: object, weights_only: bool) -> None:
    path = tmp_path / "checkpoint.pt"
    expected = checkpoint()
    torch.save(expected, path)
    before, bytes_of_file = torch.mybackend.memory_allocated(), path.read_bytes()
    loaded = torch.load(path, mmap=True, map_location=location, weights_only=weights_only)
    assert torch.mybackend.memory_allocated() == before, "something was copied"
    for name, tensor in expected.items():
        assert loaded[name].device.type == "mybackend" and loaded[name].stride() == tensor.stride()
        assert torch.equal(loaded[name].cpu(), tensor), name
    assert loaded["view"].untyped_storage().data_ptr() == loaded["layer.0"].untyped_storage().data_ptr()
    loaded["layer.0"].zero_()
    assert loaded["view"].sum().item() == 0
    assert path.read_bytes() == bytes_of_file
    kept = loaded.pop("layer.3")
    del loaded
    gc.collect()
    assert mappings_of(path) > 0 and torch.equal(kept.cpu(), expected["layer.3"])  # it keeps the mapping
    del kept
    gc.collect()
    assert mappings_of(path) == 0


def test_a_checkpoint_of_the_device(tmp_path: Path) -> None:
    path = tmp_path / "device.pt"
    torch.save({"x": torch.arange(100.0, device="mybackend")}, path)
    before = torch.mybackend.memory_allocated()
    loaded = torch.load(path, mmap=True)
    assert loaded["x"].device == torch.device("mybackend", 0) and torch.mybackend.memory_allocated() == before
    assert loaded["x"].sum().item() == 4950
    read = torch.load(path)  # without mmap the bytes are the device's own
    assert torch.mybackend.memory_allocated() > before and torch.equal(read["x"], loaded["x"])


def test_a_loaded_tensor_is_mapped(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save(torch.arange(100_000.0), path)
    x = torch.load(path, mmap=True, map_location="mybackend")
    info = storage.mapping(x[5:])
    assert info is not None and info["path"] == str(path) and info["bytes"] == 400_000 and not info["is_shared"]
    storage.advise(x, "random")
    storage.advise(x, "willneed")
    assert x.sum().item() > 0
    assert storage.mapping(x)["resident_bytes"] >= 400_000  # type: ignore[index]
    with pytest.raises(ValueError, match="expected a mybackend tensor"):
        storage.mapping(torch.ones(1))


def test_load_state_dict_assign(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    reference = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 5))
    torch.save(reference.state_dict(), path)
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 5))
    model.load_state_dict(torch.load(path, mmap=True, map_location="mybackend"), assign=True)
    x = torch.randn(4, 20)
    assert torch.equal(model(x.to("mybackend")).cpu(), reference(x))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x.to("mybackend")).sum().backward()
    optimizer.step()  # copy on write
    assert all(
        torch.equal(a, b) for a, b in zip(torch.load(path).values(), reference.state_dict().values(), strict=True)
    )


def write_safetensors(path: Path, header: object, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_load_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    a, b, c = torch.randn(3, 4), torch.arange(5, dtype=torch.int64), torch.tensor([True, False, True])
    data = b"".join(x.numpy().tobytes() for x in (c, a, b))  # after 3 bytes nothing is aligned
    write_safetensors(
        path,
        {
            "__metadata__": {"format": "pt"},
            "c": {"dtype": "BOOL", "shape": [3], "data_offsets": [0, 3]},
            "a": {"dtype": "F32", "shape": [3, 4], "data_offsets": [3, 51]},
            "b": {"dtype": "I64", "shape": [5], "data_offsets": [51, 91]},
            "none": {"dtype": "F16", "shape": [0, 7], "data_offsets": [91, 91]},
        },
        data,
    )
    before, file_bytes = torch.mybackend.memory_allocated(), path.read_bytes()
    loaded = storage.load_safetensors(path)
    assert list(loaded) == ["c", "a", "b", "none"] and torch.mybackend.memory_allocated() == before
    assert torch.equal(loaded["a"].cpu(), a) and torch.equal(loaded["b"].cpu(), b) and torch.equal(loaded["c"].cpu(), c)
    assert loaded["none"].shape == (0, 7) and loaded["none"].dtype == torch.float16
    loaded["a"].zero_()
    assert path.read_bytes() == file_bytes


@pytest.mark.parametrize(
    "header",
    [b"{", b"[1]", b"nonsense", {"x": 5}, {"x": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}},
     {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, {"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}},
     {"x": {"dtype": "F32", "shape": [100], "data_offsets": [0, 400]}}, {"x": {"dtype": "F32", "shape": [1]}},
     {"x": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}, b"[" * 100_000],
)  # fmt: skip
def test_bad_safetensors(tmp_path: Path, header: object) -> None:
    path = tmp_path / "bad.safetensors"
    write_safetensors(path, header, b"\0" * 8)
    with pytest.raises(ValueError, match=r"bad\.safetensors"):
        storage.load_safetensors(path)


def test_corrupt_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "good.pt"
    torch.save(checkpoint(), path)
    good = path.read_bytes()
    middle = bytearray(good)
    middle[len(good) - 200 : len(good) - 100] = b"\xff" * 100  # the zip's directory
    for number, bad in enumerate(
        (
            good[: len(good) // 2],
            good[:100],
            middle,
            b"PK\3\4" + b"\0" * 500,
            b"no checkpoint" * 50,
            pickle.dumps([1, "two"]),
        )
    ):
        path = tmp_path / f"bad{number}.pt"
        path.write_bytes(bad)
        for weights_only in (True, False):
            with pytest.raises((RuntimeError, ValueError, EOFError, OSError, pickle.UnpicklingError)) as error:
                torch.load(path, mmap=True, map_location="mybackend", weights_only=weights_only)
            assert str(error.value)


# --- The memory kind --------------------------------------------------------------------------------


@pytest.mark.parametrize("in_files", [True, False])
def test_kind_mmap(tmp_path: Path, in_files: bool) -> None:
    folder = tmp_path if in_files else None
    start = torch.mybackend.memory_stats()
    with memory.use("mmap", dir=folder):
        x = torch.randn(500, 500, device="mybackend")
        y = torch.randn(500, 500, device="mybackend")
        z = x @ y
    assert os.listdir(tmp_path) == []  # its files have no names
    assert (mappings_of(tmp_path) > 0) == in_files
    assert torch.equal(z.cpu(), x.cpu() @ y.cpu())
    now = torch.mybackend.memory_stats()
    assert now["allocated_bytes.all.current"] - start["allocated_bytes.all.current"] >= 3_000_000
    assert now["reserved_bytes.all.current"] > start["reserved_bytes.all.current"]
    segments = torch.mybackend.memory_snapshot()
    assert any(s["address"] <= x.data_ptr() < s["address"] + s["total_size"] for s in segments)
    pointer = z.data_ptr()
    del z
    with memory.use("mmap", dir=folder):  # pooled
        again = torch.empty(500, 500, device="mybackend")
    assert again.data_ptr() == pointer
    memory.check_invariants()
    del x, y, again
    torch.mybackend.empty_cache()
    assert mappings_of(tmp_path) == 0
    assert torch.mybackend.memory_stats()["allocated_bytes.all.current"] == start["allocated_bytes.all.current"]


def test_history_sees_mapped_memory(tmp_path: Path) -> None:
    memory._record_memory_history(clear_history=True, context=None)  # symbols would open libraries
    try:
        with memory.use("mmap", dir=tmp_path):
            x = torch.empty(3 * MIB, dtype=torch.uint8, device="mybackend")
        trace = memory._snapshot()["device_traces"][0]
        assert any(e["action"] == "alloc" and e["addr"] == x.data_ptr() and e["size"] == 3 * MIB for e in trace)
        del x
    finally:
        memory._record_memory_history(None)
        torch.mybackend.empty_cache()


def test_one_history_for_all_memory_of_a_device(tmp_path: Path) -> None:
    """Mapped memory has an allocator of its own: the bound holds for both together, and what
    concerns the device is told once."""
    with memory.use("mmap", dir=tmp_path):
        x = torch.empty(MIB, dtype=torch.uint8, device="mybackend")
    memory._record_memory_history(clear_history=True, context=None, max_entries=20)
    try:
        config.set("roundup_power2_divisions:4")
        config.reset()
        memory._snapshot()
        snapshot = memory._snapshot()
        notes = [e["note"] for e in snapshot["mybackend_events"][0]]
        assert notes == ["roundup_power2_divisions:4", "roundup_power2_divisions:"]
        assert [e["action"] for e in snapshot["device_traces"][0]] == ["snapshot"]
        for _ in range(20):
            torch.empty(700, dtype=torch.uint8, device="mybackend")
            with memory.use("mmap", dir=tmp_path):
                torch.empty(700, dtype=torch.uint8, device="mybackend")
        y = torch.empty(700, dtype=torch.uint8, device="mybackend")
        trace = memory._snapshot()["device_traces"][0]
        assert len(trace) == 20
        assert trace[-1]["action"] == "alloc" and trace[-1]["addr"] == y.data_ptr()
        del x, y
    finally:
        memory._record_memory_history(None)
        torch.mybackend.empty_cache()


def test_streams_and_mapped_memory(tmp_path: Path) -> None:
    side = torch.mybackend.Stream()
    source = torch.full((MIB,), 7, dtype=torch.uint8).pin_memory()
    with memory.use("mmap", dir=tmp_path):
        x = torch.zeros(MIB, dtype=torch.uint8, device="mybackend")
        with torch.mybackend.stream(side):
            x.copy_(source, non_blocking=True)
        x.record_stream(side)
        del x
        y = torch.zeros(MIB, dtype=torch.uint8, device="mybackend")
    side.synchronize()
    assert y.sum().item() == 0
    del y
    torch.mybackend.synchronize()
    torch.mybackend.empty_cache()


def test_a_training_run_in_files_below_the_memory_limit(run_python, tmp_path: Path) -> None:
    """RLIMIT_DATA bounds private memory; parameters, gradients and AdamW's state together exceed
    what it leaves."""
    code = """
        import resource, sys, torch, mybackend
        torch.set_num_threads(1)
        torch.manual_seed(0)
        x = torch.randn(8, 1024, device="mybackend")
        with torch.no_grad(): (x @ x.t()).sum().item()     # threads and libraries are there
        if {limit}:
            used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) * 1024
            resource.setrlimit(resource.RLIMIT_DATA, (used + (150 << 20), resource.RLIM_INFINITY))
        model = torch.nn.Sequential(torch.nn.Linear(1024, 4096, device="mybackend"), torch.nn.ReLU(),
                                    torch.nn.Linear(4096, 4096, device="mybackend"), torch.nn.Linear(4096, 10, device="mybackend"))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(x).square().mean(); loss.backward(); optimizer.step()
            print(loss.item())
        print("allocated", torch.mybackend.max_memory_allocated() > 300 << 20)
    """
    in_memory = run_python(code.format(limit=False)).stdout
    in_files = run_python(code.format(limit=True), MYBACKEND_ALLOC_CONF=f"backend:mmap,mmap_dir:{tmp_path}").stdout
    assert in_files == in_memory and "allocated True" in in_files
    run_python(code.format(limit=True), expect=1)  # the limit is real
    assert os.listdir(tmp_path) == []


def test_a_killed_process_leaves_no_file(run_python, tmp_path: Path) -> None:
    run_python(
        f"""
        import os, signal, torch, mybackend
        with mybackend.memory.use("mmap", dir={str(tmp_path)!r}):
            x = torch.ones(1 << 20, device="mybackend")
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        expect=-9,
    )
    assert os.listdir(tmp_path) == []


def test_a_forked_child_does_not_reuse_the_parents_blocks(run_python, tmp_path: Path) -> None:
    run_python(
        f"""
        import os, torch, mybackend
        from mybackend import memory
        torch.set_num_threads(1)  # OpenMP does not survive a fork
        with memory.use("mmap", dir={str(tmp_path)!r}):
            x = torch.ones(100_000, device="mybackend")
            free = torch.ones(100_000, device="mybackend"); pointer = free.data_ptr(); del free
            pid = os.fork()
            if pid == 0:
                y = torch.full((100_000,), 2.0, device="mybackend")
                ok = y.data_ptr() != pointer and x.sum().item() == 100_000
                del x, y; torch.mybackend.empty_cache(); memory.check_invariants()
                os._exit(0 if ok else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            z = torch.full((100_000,), 3.0, device="mybackend")
            assert z.data_ptr() == pointer and x.sum().item() == 100_000
        """
    )


def test_configuration(tmp_path: Path) -> None:
    config.set(f"backend:mmap,mmap_dir:{tmp_path}")
    try:
        x = torch.ones(MIB, device="mybackend")
        assert mappings_of(tmp_path) > 0
        config.set("backend:mmap,mmap_dir:/no/such/folder")
        with pytest.raises(RuntimeError, match="/no/such/folder"):
            torch.ones(3 * MIB, device="mybackend")
    finally:
        config.reset()
    assert x.sum().item() == MIB
    del x
    torch.mybackend.empty_cache()


# --- Lifetime ---------------------------------------------------------------------------------------


def test_storage_lifetime(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(bytes(range(240)))
    x = storage.from_file(path, (60,), torch.int32)
    views = [x[10:20], x.view(torch.uint8), x.view(torch.int16)[::2]]
    data = x.untyped_storage()
    del x
    gc.collect()
    assert all(view.untyped_storage().data_ptr() == data.data_ptr() for view in views)
    with pytest.raises(RuntimeError, match="not resizable"):
        data.resize_(1000)
    other = torch.empty(0, dtype=torch.uint8, device="mybackend").set_(data, 4, (10,))
    assert other.tolist() == list(range(4, 14))
    del views, data
    gc.collect()
    assert mappings_of(path) > 0
    del other
    gc.collect()
    assert mappings_of(path) == 0
