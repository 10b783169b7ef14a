"""Memory of the CPU: an allocator for ordinary CPU tensors, and aligned buffers.

`install()` replaces PyTorch's CPU allocator. Blocks up to 4 MiB then come from a thread-local
pool, larger ones from a process-wide cache: glibc gives each of those back to the system at
every free, and the next tensor pays a page fault for each 4 KB of it.

    import mybackend
    mybackend.cpu.install()                  # or MYBACKEND_CPU_ALLOCATOR=1 in the environment

What was allocated before stays as it was, and everything is freed by whoever made it, so
`install` and `uninstall` can be called at any time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mybackend import _C

__all__ = [
    "aligned_bytes_stats",
    "allocate_aligned_bytes",
    "install",
    "installed",
    "is_installed",
    "memory_stats",
    "pool_stats",
    "reset_peak_memory_stats",
    "trim",
    "uninstall",
]

_installs = 0  # by install(), not by installed()


def install() -> None:
    """Serves CPU tensors of the whole process from the pool and the cache, from now on. Calling
    it again changes nothing. Raises RuntimeError when another CPU allocator of a higher priority
    is in place."""
    global _installs
    if _installs == 0:
        _C._cpu_install()
        _installs = 1


def uninstall() -> None:
    """New CPU tensors come from PyTorch's own allocator again. Living ones stay valid. Does
    nothing when `install()` was not called; an enclosing `installed()` stays in force."""
    global _installs
    if _installs == 1:
        _installs = 0
        _C._cpu_uninstall()


def is_installed() -> bool:
    """Whether new CPU tensors come from here."""
    return _C._cpu_is_installed()


@contextmanager
def installed() -> Iterator[None]:
    """`install()` for a `with` block, on all threads. Nests."""
    _C._cpu_install()
    try:
        yield
    finally:
        _C._cpu_uninstall()


def memory_stats() -> dict[str, Any]:
    """What the CPU allocator does, in bytes and counts:

    `live_bytes`, `peak_bytes`: of blocks handed out (whole size classes), exact;
    `cached_bytes`: kept for reuse, small and large; `max_cached_bytes`: the bound on the large
    ones; `hits`, `misses`: requests served from the cache, and from the system; `evictions`:
    large blocks given back for the bound or for their age; `allocation_count`, `free_count`;
    `small`, `large`: the same per kind, with a list of `classes`, each with its `block_bytes`."""
    tracker, small, large = _C._cpu_tracker_stats(), _C._cpu_pool_stats(), _C._cpu_cache_stats()
    return {
        "live_bytes": tracker["current_bytes"],
        "peak_bytes": tracker["peak_bytes"],
        "allocation_count": tracker["allocation_count"],
        "free_count": tracker["free_count"],
        "cached_bytes": small["cached_bytes"] + large["cached_bytes"],
        "max_cached_bytes": large["max_cached_bytes"],
        "hits": small["hits"] + large["hits"],
        "misses": small["misses"] + large["misses"],
        "evictions": large["evictions"],
        "small": small,
        "large": large,
    }


def reset_peak_memory_stats() -> None:
    """`peak_bytes` starts again from what is live now."""
    _C._cpu_reset_peak()


def allocate_aligned_bytes(nbytes: int, device: str = "cpu") -> _C.AlignedBytes:
    """An aligned block of `nbytes` bytes with the buffer protocol (uint8, one dimension).

    `device` is "cpu" (up to 4 MiB from the calling thread's pool) or "gpu" (not pooled, counted
    apart). 0 bytes give an empty, false object and touch no counter. Raises ValueError for a
    negative size, OverflowError for one beyond 64 bits, torch.OutOfMemoryError when the system
    refuses."""
    return _C.allocate_aligned_bytes(nbytes, device)


def aligned_bytes_stats(device: str = "cpu") -> dict[str, int]:
    """Live, peak and total bytes and the counts of `allocate_aligned_bytes`, per device."""
    if device not in ("cpu", "gpu"):
        raise ValueError(f"device: expected 'cpu' or 'gpu', not {device!r}")
    return _C._aligned_bytes_stats(device)


def pool_stats() -> dict[str, Any]:
    """Hits, misses and cached bytes of the pools of all threads, in total and per class."""
    return _C._cpu_pool_stats()


def trim() -> int:
    """Gives cached blocks back: the large ones and the calling thread's small ones now, the other
    threads' small ones at their next allocation or free. Returns the bytes given back now."""
    return _C._cpu_trim()
