"""The thread-local pool of host memory, and aligned buffers from it."""

from __future__ import annotations

from typing import Any

from mybackend import _C

__all__ = ["aligned_bytes_stats", "allocate_aligned_bytes", "pool_stats", "trim"]


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
    """Gives the calling thread's cached blocks back and returns their bytes; other threads
    follow at their next allocation or free."""
    return _C._cpu_pool_trim()
