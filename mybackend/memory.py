"""Memory of the device: statistics, limits, and the kind of memory that new tensors get.

The statistics have the names and meaning of `torch.cuda.memory_stats`. All sizes are bytes.
`device` is a torch.device, a string, an index, or None for the current device.
"""

from __future__ import annotations

import itertools
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import PathLike, fspath
from os.path import isdir
from typing import Any

import torch

from mybackend import _C
from mybackend.plan import MemoryPlan, record_plan

__all__ = [
    "MemPool",
    "MemoryPlan",
    "attach_out_of_memory_observer",
    "check_invariants",
    "copied_output_count",
    "empty_cache",
    "empty_host_cache",
    "get_per_process_memory_fraction",
    "host_memory_stats",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_snapshot",
    "memory_stats",
    "memory_stats_as_nested_dict",
    "memory_summary",
    "record_plan",
    "reset_accumulated_host_memory_stats",
    "reset_accumulated_memory_stats",
    "reset_peak_host_memory_stats",
    "reset_peak_memory_stats",
    "set_per_process_memory_fraction",
    "tracker_stats",
    "use",
    "use_mem_pool",
]  # fmt: skip

Device = torch.device | str | int | None


def _index(device: Device) -> int:
    from mybackend.torch_module import _index

    return _index(device)


def memory_stats_as_nested_dict(device: Device = None) -> dict[str, Any]:
    """All counters of the caching allocator, nested: stats["allocated_bytes"]["all"]["peak"].
    Empty before the devices are started."""
    return _C._memory_stats(_index(device)) if _C._is_initialized() else {}


def memory_stats(device: Device = None) -> dict[str, Any]:
    """All counters of the caching allocator, flat: stats["allocated_bytes.all.peak"].
    Empty before the devices are started."""
    flat: dict[str, Any] = {}

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                add(f"{prefix}.{key}" if prefix else str(key), inner)
        else:
            flat[prefix] = value

    add("", memory_stats_as_nested_dict(device))
    return dict(sorted(flat.items()))


def memory_allocated(device: Device = None) -> int:
    """Bytes of blocks that are handed out."""
    return memory_stats(device).get("allocated_bytes.all.current", 0)


def max_memory_allocated(device: Device = None) -> int:
    """The peak of `memory_allocated` since the last `reset_peak_memory_stats`."""
    return memory_stats(device).get("allocated_bytes.all.peak", 0)


def memory_reserved(device: Device = None) -> int:
    """Bytes that the caching allocator holds, handed out or cached."""
    return memory_stats(device).get("reserved_bytes.all.current", 0)


def max_memory_reserved(device: Device = None) -> int:
    """The peak of `memory_reserved` since the last `reset_peak_memory_stats`."""
    return memory_stats(device).get("reserved_bytes.all.peak", 0)


def reset_peak_memory_stats(device: Device = None) -> None:
    """Sets every peak to the current value."""
    _C._reset_peak_memory_stats(_index(device))


def reset_accumulated_memory_stats(device: Device = None) -> None:
    """Sets the counts of what was allocated and freed to 0; current values and peaks stay."""
    _C._reset_accumulated_memory_stats(_index(device))


def tracker_stats(device: Device = None) -> dict[str, int]:
    """Requested bytes over all memory kinds: current_bytes, peak_bytes, total_allocated_bytes,
    total_freed_bytes, allocation_count, free_count. Exact under threads."""
    return _C._tracker_stats(_index(device))


def empty_cache() -> None:
    """Gives cached memory that no tensor uses back, on all devices."""
    if _C._is_initialized():
        _C._empty_cache()


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """(free, total) bytes of a device, as its driver sees them."""
    return _C._memory_info(_index(device))


def set_per_process_memory_fraction(fraction: float, device: Device = None) -> None:
    """Limits what this process reserves to `fraction` of the device's memory; 1.0 is no limit.
    Raises ValueError outside [0, 1]."""
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)):
        raise TypeError(f"Invalid type for fraction argument, must be `float`, not {type(fraction).__name__}")
    _C._set_memory_fraction(float(fraction), _index(device))


def get_per_process_memory_fraction(device: Device = None) -> float:
    """The memory fraction in force."""
    return _C._get_memory_fraction(_index(device))


def memory_snapshot(device: Device = None) -> list[dict[str, Any]]:
    """The segments of the caching allocator with their blocks, by address, in the schema of
    `torch.cuda.memory_snapshot`."""
    index = _index(device)
    return [segment for segment in _C._snapshot(False)["segments"] if segment["device"] == index]


def check_invariants(device: Device = None) -> None:
    """Checks the allocator's whole state against itself; raises RuntimeError with what is wrong.
    For tests and bug reports: it takes time in proportion to the number of blocks."""
    wrong = _C._check_invariants(_index(device))
    if wrong:
        raise RuntimeError(f"the caching allocator's state is inconsistent:\n{wrong}")


def host_memory_stats() -> dict[str, Any]:
    """Pinned host memory, with the keys of `torch.cuda.host_memory_stats` and exact peaks.

    `active_requests`, `active_bytes`: handed out, or freed while a stream still uses it;
    `allocations`, `allocated_bytes`: what is pinned, cached blocks included; each as
    `.{current,peak,allocated,freed}`. `host_alloc_time`, `host_free_time`: microseconds in the
    system, as `.{total,max,min,count,avg}`. `num_host_alloc`, `num_host_free`. And beyond CUDA's:
    `requested_bytes` (active, as asked), `num_hits`, `num_misses`, `num_evictions`,
    `cached_bytes`, and `unlocked_bytes`: what the system did not let us lock."""
    return _C._pinned_stats()


def reset_peak_host_memory_stats() -> None:
    """The peaks of `host_memory_stats` start again from what is there now."""
    _C._pinned_reset_peak()


def reset_accumulated_host_memory_stats() -> None:
    """The `allocated`, `freed`, `num_` and time entries of `host_memory_stats` start again at 0."""
    _C._pinned_reset_accumulated()


def empty_host_cache() -> None:
    """Gives cached pinned blocks back to the system."""
    _C._pinned_empty_cache()


def copied_output_count() -> int:
    """How many outputs of borrowed kernels had to be copied, because their bytes were not the
    device's. Zero is the normal case."""
    return _C._copied_output_count()


@contextmanager
def use(kind: str, dir: str | PathLike[str] | None = None) -> Iterator[None]:
    """`with use("pool"):` gives new tensors of this thread memory of that kind: caching, pool or
    mmap. Tensors made before and inside can be freed anywhere.

    `dir`, for mmap: the folder of the (unnamed) files that hold the tensors' bytes; without it, what
    `mmap_dir` of the configuration says, else anonymous shared memory."""
    if dir is not None and kind != "mmap":
        raise ValueError(f"dir: only for the kind mmap, not for {kind}")
    folder = None if dir is None else fspath(dir)
    if folder is not None and not isdir(folder):
        raise NotADirectoryError(f"dir: {folder!r} is not a folder")
    scope = _C._enter_memory_kind(kind, folder)
    try:
        yield
    finally:
        scope.leave()


# --- History and snapshots ----------------------------------------------------------------------


def _record_memory_history(
    enabled: str | None = "all",
    context: str | None = "all",
    stacks: str = "all",
    max_entries: int = sys.maxsize,
    device: Device = None,
    clear_history: bool = False,
    compile_context: bool = False,
    global_record_annotations: bool = False,
    skip_actions: list[str] | None = None,
) -> None:
    """Records what the allocator does, for `_snapshot`; the arguments are those of
    `torch.cuda.memory._record_memory_history`.

    `enabled`: None stops; "state" keeps stacks of what is alive; "all" keeps a history of up to
    `max_entries` events too. `context`: for which events a stack is kept: None, "state",
    "alloc" or "all". `stacks`: "python", or "all" for C++ frames too. `clear_history` drops
    what was recorded. `skip_actions`: names of actions that are not recorded. All devices are
    recorded, whatever `device` says; there are no compile contexts and annotations here."""
    if enabled not in (None, "state", "all"):
        raise ValueError(f"enabled: expected None, 'state' or 'all', not {enabled!r}")
    if context not in (None, "state", "alloc", "all"):
        raise ValueError(f"context: expected None, 'state', 'alloc' or 'all', not {context!r}")
    if stacks not in ("python", "all"):
        raise ValueError(f"stacks: expected 'python' or 'all', not {stacks!r}")
    if isinstance(max_entries, bool) or not isinstance(max_entries, int) or max_entries < 0:
        raise ValueError(f"max_entries: expected a number from 0, not {max_entries!r}")
    if compile_context or global_record_annotations:
        raise NotImplementedError("mybackend: compile_context and global_record_annotations are not supported")
    if enabled is None:
        _C._stop_history()
        return
    if enabled == "state":
        max_entries = 1
    _C._start_history(max_entries, context or "never", stacks == "all", clear_history, skip_actions or [])


def _snapshot(device: Device = None, augment_with_fx_traces: bool = False) -> dict[str, Any]:
    """The state and the recorded history of all devices, in the schema of
    `torch.cuda.memory._snapshot`, which `torch.cuda._memory_viz` reads."""
    if augment_with_fx_traces:
        raise NotImplementedError("mybackend: augment_with_fx_traces is not supported")
    return _C._snapshot(True)


def _dump_snapshot(filename: str = "dump_snapshot.pickle") -> None:
    """Writes `_snapshot()` to a file, as `torch.cuda.memory._dump_snapshot` does."""
    snapshot = _snapshot()
    with open(filename, "wb") as file:
        pickle.dump(snapshot, file)


def attach_out_of_memory_observer(observer: Callable[[int, int, int, int], None]) -> None:
    """Calls `observer(device, requested_bytes, total_bytes, free_bytes)` at every out of memory,
    before the error is raised. It stays attached; an exception in it is reported, not raised."""
    _C._attach_oom_observer(observer)


# --- Private pools ------------------------------------------------------------------------------

_pool_numbers = itertools.count(1)


class MemPool:
    """Memory set apart: what is allocated inside `use_mem_pool(pool)` comes from segments of its
    own. `use_on_oom`: other requests may use its free blocks before they fail. `no_split`: its
    blocks are never split. The pool's memory can be given back once the object is gone and its
    tensors are freed."""

    def __init__(self, use_on_oom: bool = False, no_split: bool = False, device: Device = None) -> None:
        self._id = (0, next(_pool_numbers))
        self._device = _index(device)
        _C._pool_create(self._device, self._id, use_on_oom, no_split)

    @property
    def id(self) -> tuple[int, int]:
        """(0, n), as in `segment_pool_id` of a snapshot."""
        return self._id

    @property
    def device(self) -> torch.device:
        """The device whose memory it is."""
        return torch.device("mybackend", self._device)

    def use_count(self) -> int:
        """1 for the object, and one for each `use_mem_pool` that is open."""
        return _C._pool_use_count(self._device, self._id)

    def snapshot(self) -> list[dict[str, Any]]:
        """The pool's segments."""
        return [segment for segment in memory_snapshot(self._device) if segment["segment_pool_id"] == self._id]

    def __del__(self) -> None:
        if hasattr(self, "_device"):
            _C._pool_release(self._device, self._id)
            _C._pool_empty_cache(self._device, self._id)


@contextmanager
def use_mem_pool(pool: MemPool, device: Device = None) -> Iterator[None]:
    """Allocations of this thread on the pool's device come from `pool` inside the block."""
    if device is not None and _index(device) != pool.device.index:
        raise ValueError(f"the pool is on {pool.device}, not on device {_index(device)}")
    _C._pool_begin(pool.device.index, pool.id)
    try:
        yield
    finally:
        _C._pool_end(pool.device.index, pool.id)
        _C._pool_release(pool.device.index, pool.id)


# --- The summary ------------------------------------------------------------------------------

_UNITS = ("B  ", "KiB", "MiB", "GiB", "TiB")


def _size_text(size: int) -> str:
    value, unit = float(size), 0
    while abs(value) >= 10 * 1024 and unit + 1 < len(_UNITS):
        value /= 1024
        unit += 1
    return f"{value:.0f} {_UNITS[unit]}"


def _count_text(count: int) -> str:
    return f"{count}    "


def _fragmentation_line(stats: dict[str, Any], device: int) -> str:
    reserved = stats["reserved_bytes"]["all"]["current"]
    allocated = stats["allocated_bytes"]["all"]["current"]
    free = [b["size"] for s in memory_snapshot(device) for b in s["blocks"] if b["state"] == "inactive"]
    largest, total = max(free, default=0), sum(free)
    share = 1 - largest / total if total else 0.0
    return (
        f"free inside segments: {_size_text(total).strip()} in {len(free)} blocks, largest "
        f"{_size_text(largest).strip()} (fragmentation {share:.0%}); utilization {allocated / reserved if reserved else 1:.0%}"
    )


def memory_summary(device: Device = None, abbreviated: bool = False) -> str:
    """The counters as a table for people. `abbreviated` leaves the small and large pool out."""
    index = _index(device)
    stats = memory_stats_as_nested_dict(index)
    if not stats:
        return "mybackend: no device memory was used yet"
    width = 78
    rows: list[str] = ["=" * width]
    title = f"mybackend memory summary, device {index}"
    rows.append(title.center(width))
    counts = f"out of memory: {stats['num_ooms']}   retries after releasing the cache: {stats['num_alloc_retries']}"
    rows.append(counts.center(width))
    rows.append("=" * width)
    header = ("Metric", "Current", "Peak", "Total allocated", "Total freed")
    rows.append(f"{header[0]:<24} {header[1]:>11} {header[2]:>11} {header[3]:>15} {header[4]:>13}")
    metrics = [
        ("allocated_bytes", "Allocated memory", _size_text), ("active_bytes", "Active memory", _size_text),
        ("requested_bytes", "Requested memory", _size_text), ("reserved_bytes", "Reserved memory", _size_text),
        ("inactive_split_bytes", "Non-releasable memory", _size_text), ("allocation", "Allocations", _count_text),
        ("active", "Active allocations", _count_text), ("segment", "Segments", _count_text),
        ("inactive_split", "Non-releasable blocks", _count_text),
    ]  # fmt: skip
    pools = (
        [("all", "")]
        if abbreviated
        else [("all", ""), ("large_pool", "  from large pool"), ("small_pool", "  from small pool")]
    )
    for key, name, text in metrics:
        rows.append("-" * width)
        for pool, label in pools:
            s = stats[key][pool]
            rows.append(
                f"{label or name:<24} {text(s['current']):>11} {text(s['peak']):>11} "
                f"{text(s['allocated']):>15} {text(s['freed']):>13}"
            )
    rows.append("-" * width)
    for key, name in (("oversize_allocations", "Oversize allocations"), ("oversize_segments", "Oversize segments")):
        s = stats[key]
        rows.append(
            f"{name:<24} {_count_text(s['current']):>11} {_count_text(s['peak']):>11} "
            f"{_count_text(s['allocated']):>15} {_count_text(s['freed']):>13}"
        )
    rows.append("=" * width)
    rows.append(_fragmentation_line(stats, index))
    allocations = stats["allocation"]["all"]["allocated"]
    driver_calls = stats["num_device_alloc"]
    if allocations:
        rows.append(
            f"cache hit rate {1 - driver_calls / allocations:.2%} ({allocations} allocations, {driver_calls} driver calls)"
        )
    tracker = tracker_stats(index)
    rows.append(
        f"tracker: {tracker['current_bytes']} bytes live, {tracker['peak_bytes']} at the peak, all memory kinds"
    )
    return "\n".join(rows)
