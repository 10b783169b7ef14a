"""Storages over files and shared memory: checkpoints that are mapped instead of read, and device
tensors that go to other processes without a copy.

What is here works by itself once the package is imported: `torch.load(mmap=True,
map_location="mybackend")`, `torch.from_file(..., device="mybackend")`, `torch.multiprocessing`,
`share_memory_()`. The functions are for what PyTorch has no name for."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import math
import os
import re
import stat
import struct
import threading
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from os import PathLike
from typing import Any, NamedTuple

import torch
from torch.multiprocessing import reductions

from mybackend import _C

__all__ = ["advise", "from_file", "load_safetensors", "mapping", "sync"]

_NAME = "mybackend"
Device = torch.device | str | int | None


def _index(device: Device) -> int:
    if device is None:
        return _C._current_device()
    if isinstance(device, int):
        return device
    resolved = torch.device(device)
    if resolved.type != _NAME:
        raise ValueError(f"device: expected {_NAME}, not {str(device)!r}")
    return _C._current_device() if resolved.index is None else resolved.index


# --- Files as tensors ---------------------------------------------------------------------------


def from_file(
    path: str | PathLike[str],
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    *,
    access: str = "private",
    offset: int = 0,
    device: Device = None,
) -> torch.Tensor:
    """A tensor over a part of a file, without reading it.

    `shape` and `dtype` say how many bytes from `offset` (any number of bytes) on. `access`:
    "private" (what is written stays in this process), "shared" (it is in the file; a missing or
    short file is made or grown, its space reserved), "readonly" (writing is a fault). Raises
    ValueError when it is not a regular file, missing, or too short, and torch.OutOfMemoryError when
    the disk is full; then nothing was changed."""
    count = math.prod(shape)
    if any(extent < 0 for extent in shape) or offset < 0:
        raise ValueError(f"shape and offset must not be negative: {tuple(shape)}, {offset}")
    result = torch.empty(0, dtype=dtype, device=torch.device(_NAME, _index(device)))
    if count == 0:
        return result.reshape(tuple(shape))
    if count * dtype.itemsize > 2**63 - 1 or offset > 2**63 - 1:
        raise ValueError(f"{os.fspath(path)!r}: {count} elements at offset {offset} overflow")
    storage = _C._map_file(os.fspath(path), access, offset, count * dtype.itemsize, _index(device))
    return result.set_(storage, 0, tuple(shape))


def mapping(tensor: torch.Tensor) -> dict[str, Any] | None:
    """Of a tensor over a file, also of one that was loaded from a mapped checkpoint: the file's
    `path`, the `bytes` of its storage, `resident_bytes` (of their pages, in memory now), and whether
    the mapping `is_shared`. None for other tensors of the device; ValueError for those of another."""
    storage = tensor.untyped_storage()
    if storage.device.type != _NAME:
        raise ValueError(f"expected a {_NAME} tensor, not one on {storage.device}")
    found = _C._storage_region(storage)
    if found is None:
        cpu = _C._storage_backing(storage)
        known = None if cpu is None else _mapping_below(cpu)
        if known is None:
            return None
        found = {"path": known.path, "is_shared": known.is_shared}
    return {**found, "bytes": storage.nbytes(), "resident_bytes": _C._storage_resident_bytes(storage)}


def advise(tensor: torch.Tensor, advice: str) -> None:
    """How a mapped tensor will be read: "normal", "random", "sequential", "willneed" (prefetch it
    now) or "hugepages". Raises ValueError for a tensor that is not over a file."""
    if mapping(tensor) is None:
        raise ValueError("the tensor is not over a mapping of a file")
    _C._storage_advise(tensor.untyped_storage(), advice)


def sync(tensor: torch.Tensor) -> None:
    """Writes a shared mapping's changes to the file before it returns."""
    _C._storage_sync(tensor.untyped_storage())


_SAFETENSORS_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


def load_safetensors(path: str | PathLike[str], device: Device = None) -> dict[str, torch.Tensor]:
    """The tensors of a .safetensors file, on its mapping: nothing is read until it is used, and
    what is written to them stays in this process. Raises OSError when the file cannot be opened,
    ValueError when it is not such a file."""
    name = os.fspath(path)
    with open(_regular(name), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > size - 8:
            raise ValueError(f"{name!r}: not a safetensors file: its header does not lie in its {size} bytes")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name!r}: not a safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise ValueError(f"{name!r}: not a safetensors file: its header is no object")
    base = 8 + length
    index = _index(device)
    whole = torch.UntypedStorage.from_file(name, False, size) if size > base else None
    result: dict[str, torch.Tensor] = {}
    for key, entry in header.items():
        if key == "__metadata__":
            continue
        try:
            dtype = _SAFETENSORS_DTYPES[entry["dtype"]]
            shape = [int(extent) for extent in entry["shape"]]
            begin, end = (int(offset) for offset in entry["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{name!r}: tensor {key!r}: bad entry: {error!r}") from error
        if min(shape, default=0) < 0 or begin < 0 or end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name!r}: tensor {key!r}: its {end - begin} bytes do not hold {dtype} of shape {shape}")
        if base + end > size:
            raise ValueError(f"{name!r}: tensor {key!r}: it ends at byte {base + end} of {size}")
        empty = torch.empty(0, dtype=dtype, device=torch.device(_NAME, index))
        if end == begin or whole is None:
            result[key] = empty.reshape(shape)
        else:
            result[key] = empty.set_(_C._storage_over(whole[base + begin : base + end], index), 0, shape)
    return result


def _regular(path: str) -> str:
    """Refuses what is not a regular file before it is opened: a FIFO would wait for a writer."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path!r} is not a regular file")
    return path


# --- torch.load -----------------------------------------------------------------------------------


class _Mapping(NamedTuple):
    """A mapping of torch.UntypedStorage.from_file, which torch.load(mmap=True) cuts its storages from."""

    begin: int
    end: int
    storage: reductions.StorageWeakRef
    path: str
    is_shared: bool


_mappings: list[_Mapping] = []
_mappings_lock = threading.Lock()


def _note_mappings() -> None:
    original = torch.UntypedStorage.from_file
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    @functools.wraps(original)
    def noted(filename: Any, shared: bool = False, nbytes: int = 0) -> torch.UntypedStorage:
        if not shared and nbytes > memory_bytes and os.path.exists(filename) and os.path.getsize(filename) >= nbytes:
            # PyTorch's mapping asks that all of it could be written to, and is refused (and leaves
            # its descriptor open).
            storage = _C._map_file(os.fspath(filename), "private", 0, nbytes, None)
        else:
            storage = original(filename, shared, nbytes)
        if storage.nbytes() > 0:
            with _mappings_lock:
                _mappings[:] = [known for known in _mappings if not known.storage.expired()]
                begin, weak = storage.data_ptr(), reductions.StorageWeakRef(storage)
                _mappings.append(_Mapping(begin, begin + storage.nbytes(), weak, os.fspath(filename), bool(shared)))
        return storage

    torch.UntypedStorage.from_file = staticmethod(noted)  # type: ignore[method-assign, assignment]


def _mapping_below(storage: torch.UntypedStorage) -> _Mapping | None:
    begin = storage.data_ptr()
    with _mappings_lock:
        return next(
            (known for known in _mappings if known.begin <= begin < known.end and not known.storage.expired()), None
        )


def _deserialize(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    """A storage of a mapped checkpoint becomes a device storage over the same bytes. None: whoever
    is asked next copies it."""
    match = re.fullmatch(rf"{_NAME}(?::?(\d+))?", location)
    if match is None or storage.device.type != "cpu" or storage.nbytes() == 0 or _mapping_below(storage) is None:
        return None
    index = int(match[1]) if match[1] is not None else _C._current_device()
    return _C._storage_over(storage, index)


# --- Other processes ------------------------------------------------------------------------------


class _Shared(NamedTuple):
    """What is known of a CPU storage in shared memory."""

    cpu: reductions.StorageWeakRef
    device: reductions.StorageWeakRef  # the device storage over it
    strategy: str
    name: str  # in /dev/shm, for the strategy file_system


_shared: dict[int, _Shared] = {}  # by the CPU storage's address
_shared_lock = threading.RLock()


def _note_shared(cpu: torch.UntypedStorage, storage: torch.UntypedStorage, strategy: str, name: str) -> None:
    for key in [key for key, known in _shared.items() if known.cpu.expired()]:
        del _shared[key]
    weak = reductions.StorageWeakRef
    _shared[cpu._cdata] = _Shared(weak(cpu), weak(storage), strategy, name)
    _note_name(name)


def _rebuild(cpu: torch.UntypedStorage, device: int, strategy: str, name: str) -> torch.UntypedStorage:
    if cpu.nbytes() == 0:
        return torch.UntypedStorage(0, device=torch.device(_NAME, device))
    with _shared_lock:
        # Several views of one storage arrive one after the other, over one CPU storage.
        known = _shared.get(cpu._cdata)
        if known is not None and not known.cpu.expired() and not known.device.expired():
            storage = torch.UntypedStorage._new_with_weak_ptr(known.device.cdata)
            if storage is not None:
                return storage
        storage = _C._storage_over(cpu, device)
        _note_shared(cpu, storage, strategy, name)
        return storage


_SHM = "/dev/shm"


def _new_shared(nbytes: int) -> torch.UntypedStorage:
    """Raises torch.OutOfMemoryError when the shared memory is full."""
    try:
        return torch.UntypedStorage._new_shared(nbytes)
    except RuntimeError as error:
        # PyTorch leaves behind what it had made: the name, and a descriptor of it.
        match = re.search(r"</(torch_\w+)>", str(error))
        if match is None:
            raise
        name = f"{_SHM}/{match[1]}"
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{descriptor}") in (name, f"{name} (deleted)"):
                    os.close(int(descriptor))
        with contextlib.suppress(OSError):
            os.unlink(name)
        space = os.statvfs(_SHM)
        raise torch.OutOfMemoryError(
            f"cannot move {nbytes} bytes to shared memory, {_SHM} has {space.f_bavail * space.f_frsize} bytes free: {error}"
        ) from error


def _share(storage: torch.UntypedStorage) -> tuple[torch.UntypedStorage, str, str]:
    """Moves a device storage into shared memory, once. Returns the CPU storage below it, the
    sharing strategy, and its name."""
    strategy = torch.multiprocessing.get_sharing_strategy()
    with _shared_lock:
        cpu = _C._storage_backing(storage)
        known = None if cpu is None else _shared.get(cpu._cdata)
        if cpu is not None and known is not None and not known.cpu.expired() and known.strategy == strategy:
            return cpu, strategy, known.name
        # PyTorch would move a CPU storage of the other strategy from under the device's.
        cpu = _new_shared(storage.nbytes())
        _C._storage_move(storage, cpu)
        name = os.fsdecode(cpu._share_filename_cpu_()[1]) if strategy == "file_system" else ""
        _note_shared(cpu, storage, strategy, name)
        return cpu, strategy, name


# Names in /dev/shm that were seen here. torch's manager process removes a name with its last user, but
# not when a user was killed: at exit, those go that this process made, or whose maker is gone.
_names: set[str] = set()


def _note_name(name: str) -> None:
    if name and not _names:
        atexit.register(_remove_names)
    if name:
        _names.add(name)


def _remove_names() -> None:
    for name in _names:
        match = re.fullmatch(r"/?(torch_(\d+)_\w+)", name)
        if match is None:
            continue
        if int(match[2]) != os.getpid():
            try:
                os.kill(int(match[2]), 0)
                continue  # alive: it may send the storage again
            except ProcessLookupError:
                pass
            except OSError:
                continue
        with contextlib.suppress(OSError):
            os.unlink(f"{_SHM}/{match[1]}")
    _names.clear()


def _after_fork() -> None:
    """In the child: what the parent made and knows is the parent's."""
    _names.clear()


def _reduce_storage(storage: torch.UntypedStorage) -> tuple:
    if storage.device.type != _NAME:
        return reductions.reduce_storage(storage)
    if storage.nbytes() == 0:
        return (_rebuild, (torch.UntypedStorage(0), storage.device.index, "", ""))
    cpu, strategy, name = _share(storage)
    return (_rebuild, (cpu, storage.device.index, strategy, name))


def _patch_sharing() -> None:
    share, is_shared = torch.UntypedStorage.share_memory_, torch.UntypedStorage.is_shared
    filename = torch.UntypedStorage.filename

    @functools.wraps(share)
    def share_memory_(self: torch.UntypedStorage, *args: Any, **kwargs: Any) -> torch.UntypedStorage:
        if self.device.type != _NAME:
            return share(self, *args, **kwargs)
        if self.nbytes() > 0 and not self.is_shared():
            _share(self)
        return self

    @functools.wraps(is_shared)
    def shared(self: torch.UntypedStorage) -> bool:
        if self.device.type != _NAME:
            return is_shared(self)
        region = _C._storage_region(self)
        if region is not None:
            return region["is_shared"]
        cpu = _C._storage_backing(self)
        return cpu is not None and cpu.is_shared()

    def file_of(self: torch.UntypedStorage) -> str | None:
        region = _C._storage_region(self)
        if region is not None:
            return region["path"] or None
        if self.device.type != _NAME:
            return filename.fget(self)  # type: ignore[attr-defined]
        cpu = _C._storage_backing(self)
        return None if cpu is None else cpu.filename

    torch.UntypedStorage.share_memory_ = share_memory_  # type: ignore[method-assign]
    torch.UntypedStorage.is_shared = shared  # type: ignore[method-assign]
    torch.UntypedStorage.filename = property(file_of, doc=filename.__doc__)  # type: ignore[assignment]


def _register() -> None:
    """Called once, when the device is registered."""
    _note_mappings()
    # Asked before PyTorch's own deserializers, and only about mapped storages.
    torch.serialization.register_package(5, lambda storage: None, _deserialize)
    os.register_at_fork(after_in_child=_after_fork)
    ForkingPickler.register(torch.UntypedStorage, _reduce_storage)
    _patch_sharing()
