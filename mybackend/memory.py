"""Memory of the device: statistics, limits, and the kind of memory that new tensors get.

The statistics have the names and meaning of `torch.cuda.memory_stats`. All sizes are bytes.
`device` is a torch.device, a string, an index, or None for the current device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mybackend import _C

__all__ = [
    "check_invariants", "copied_output_count", "empty_cache", "get_per_process_memory_fraction", "max_memory_allocated",
    "max_memory_reserved", "mem_get_info", "memory_allocated", "memory_reserved", "memory_snapshot", "memory_stats",
    "memory_stats_as_nested_dict", "memory_summary", "reset_accumulated_memory_stats", "reset_peak_memory_stats",
    "set_per_process_memory_fraction", "tracker_stats", "use",
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
    return _C._segments(_index(device))


def check_invariants(device: Device = None) -> None:
    """Checks the allocator's whole state against itself; raises RuntimeError with what is wrong.
    For tests and bug reports: it takes time in proportion to the number of blocks."""
    wrong = _C._check_invariants(_index(device))
    if wrong:
        raise RuntimeError(f"the caching allocator's state is inconsistent:\n{wrong}")


def copied_output_count() -> int:
    """How many outputs of borrowed kernels had to be copied, because their bytes were not the
    device's. Zero is the normal case."""
    return _C._copied_output_count()


@contextmanager
def use(kind: str) -> Iterator[None]:
    """`with use("pool"):` gives new tensors of this thread memory of that kind: caching, pool or
    mmap. Tensors made before and inside can be freed anywhere."""
    scope = _C._enter_memory_kind(kind)
    try:
        yield
    finally:
        scope.leave()


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
    free = [b["size"] for s in _C._segments(device) for b in s["blocks"] if b["state"] == "inactive"]
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
