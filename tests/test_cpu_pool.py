"""allocate_aligned_bytes and the thread-local pool behind it."""

from __future__ import annotations

import ctypes
import gc
import threading

import pytest
import torch

import mybackend
from mybackend import cpu

CLASSES = [1 << shift for shift in range(6, 23)]


def stats() -> dict:
    return cpu.pool_stats()


def test_zero_bytes_touch_nothing() -> None:
    before, pool = cpu.aligned_bytes_stats(), stats()
    block = mybackend.allocate_aligned_bytes(0)
    assert not block and len(block) == 0 and bytes(block) == b"" and block.capacity == 0
    assert cpu.aligned_bytes_stats() == before and stats() == pool


@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000, 4096, (1 << 22) - 1, 1 << 22, (1 << 22) + 1, 10 << 20])
def test_alignment_capacity_and_counters(size: int) -> None:
    before = cpu.aligned_bytes_stats()
    block = cpu.allocate_aligned_bytes(size)
    assert block.address % 64 == 0 and len(block) == size
    wanted = next((c for c in CLASSES if c >= size), None) or (size + 63) // 64 * 64
    assert block.capacity == wanted
    now = cpu.aligned_bytes_stats()
    assert now["current_bytes"] == before["current_bytes"] + size
    assert now["peak_bytes"] >= now["current_bytes"] and now["allocation_count"] == before["allocation_count"] + 1
    view = memoryview(block)
    view[-1] = 9
    view[0] = 7
    assert bytes(view[:1]) == b"\x07" and view.format == "B" and view.nbytes == size
    ctypes.memset(block.address, 1, block.capacity)
    del view, block
    after = cpu.aligned_bytes_stats()
    assert after["current_bytes"] == before["current_bytes"] and after["free_count"] == before["free_count"] + 1


def test_a_view_keeps_the_block() -> None:
    before = cpu.aligned_bytes_stats()["current_bytes"]
    view = memoryview(cpu.allocate_aligned_bytes(100))
    gc.collect()
    view[:] = b"x" * 100
    assert cpu.aligned_bytes_stats()["current_bytes"] == before + 100
    del view
    assert cpu.aligned_bytes_stats()["current_bytes"] == before


def test_blocks_are_used_again_by_class() -> None:
    cpu.trim()
    first = cpu.allocate_aligned_bytes(1000)
    address = first.address
    del first
    hits = stats()["hits"]
    second = cpu.allocate_aligned_bytes(600)  # the same class, 1024
    assert second.address == address and stats()["hits"] == hits + 1
    third = cpu.allocate_aligned_bytes(400)
    assert third.address != address


def test_at_most_32_blocks_a_class() -> None:
    cpu.trim()
    blocks = [cpu.allocate_aligned_bytes(5000) for _ in range(50)]
    del blocks
    (entry,) = (c for c in stats()["classes"] if c["block_bytes"] == 8192)
    assert entry["cached_blocks"] == 32
    assert cpu.trim() == 32 * 8192
    assert all(c["cached_blocks"] == 0 for c in stats()["classes"]) and stats()["cached_bytes"] == 0


def test_the_bytes_of_a_thread_are_bounded() -> None:
    cpu.trim()
    mybackend.config.set("cpu_pool_max_cached_mb:6")
    try:
        blocks = [cpu.allocate_aligned_bytes(4 << 20) for _ in range(10)]
        del blocks
        assert stats()["cached_bytes"] == 4 << 20
    finally:
        mybackend.config.reset()
        cpu.trim()


def test_large_blocks_bypass_the_pool() -> None:
    before = stats()
    block = cpu.allocate_aligned_bytes((4 << 20) + 1)
    del block
    after = stats()
    assert after["large"] == before["large"] + 1 and after["cached_bytes"] == before["cached_bytes"]


def test_other_devices_are_counted_apart() -> None:
    cpu_before, gpu_before = cpu.aligned_bytes_stats(), cpu.aligned_bytes_stats("gpu")
    block = cpu.allocate_aligned_bytes(100, "gpu")
    assert cpu.aligned_bytes_stats("gpu")["current_bytes"] == gpu_before["current_bytes"] + 100
    assert cpu.aligned_bytes_stats() == cpu_before
    del block
    assert cpu.aligned_bytes_stats("gpu")["current_bytes"] == gpu_before["current_bytes"]


def test_bad_input() -> None:
    before = cpu.aligned_bytes_stats()
    with pytest.raises(ValueError, match="expected a number from 0"):
        cpu.allocate_aligned_bytes(-1)
    with pytest.raises(OverflowError):
        cpu.allocate_aligned_bytes(1 << 80)
    with pytest.raises(TypeError):
        cpu.allocate_aligned_bytes("many")
    with pytest.raises(ValueError, match="expected 'cpu' or 'gpu'"):
        cpu.allocate_aligned_bytes(1, "tpu")
    with pytest.raises(
        torch.OutOfMemoryError,
        match=rf"{1 << 62} bytes requested, {before['current_bytes']} bytes live, {before['peak_bytes']} bytes at the peak",
    ):
        cpu.allocate_aligned_bytes(1 << 62)
    assert cpu.aligned_bytes_stats() == before


def test_out_of_memory_flushes_the_pool_and_tries_again() -> None:
    blocks = [cpu.allocate_aligned_bytes(1 << 20) for _ in range(4)]
    del blocks
    assert stats()["cached_bytes"] >= 4 << 20
    with pytest.raises(torch.OutOfMemoryError):
        cpu.allocate_aligned_bytes(1 << 62)
    assert stats()["cached_bytes"] == 0


def test_blocks_cross_threads_and_go_with_them() -> None:
    before, threads_before = cpu.aligned_bytes_stats()["current_bytes"], stats()["threads"]
    for _ in range(50):
        made: list = []
        thread = threading.Thread(
            target=lambda made=made: made.extend(cpu.allocate_aligned_bytes(3000) for _ in range(40))
        )
        thread.start()
        thread.join()
        made.clear()  # here, into this thread's pool, within its bounds
    (entry,) = (c for c in stats()["classes"] if c["block_bytes"] == 4096)
    assert entry["cached_blocks"] <= 32
    assert stats()["threads"] == threads_before or stats()["threads"] == threads_before + 1
    assert cpu.aligned_bytes_stats()["current_bytes"] == before


def test_counters_are_exact_under_threads() -> None:
    before = cpu.aligned_bytes_stats()
    barrier = threading.Barrier(6)

    def work(size: int) -> None:
        barrier.wait()
        for _ in range(500):
            a, b = cpu.allocate_aligned_bytes(size), cpu.allocate_aligned_bytes(size * 100)
            del a, b

    threads = [threading.Thread(target=work, args=(100 + i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after = cpu.aligned_bytes_stats()
    assert after["current_bytes"] == before["current_bytes"]
    assert after["allocation_count"] - before["allocation_count"] == 6 * 1000
    assert after["free_count"] - before["free_count"] == 6 * 1000
    assert after["total_allocated_bytes"] - before["total_allocated_bytes"] == sum(
        500 * 101 * (100 + i) for i in range(6)
    )
    assert (
        after["total_freed_bytes"] - before["total_freed_bytes"]
        == after["total_allocated_bytes"] - before["total_allocated_bytes"]
    )


def test_c_abi() -> None:
    library = ctypes.CDLL(mybackend.library_path())
    library.mybackend_version.restype = ctypes.c_char_p
    library.mybackend_cpu_allocate.restype = ctypes.c_void_p
    library.mybackend_cpu_live_bytes.restype = ctypes.c_int64
    assert library.mybackend_version().decode() == mybackend.__version__
    before = library.mybackend_cpu_live_bytes()
    assert before == cpu.aligned_bytes_stats()["current_bytes"]  # one library, one set of counters
    ptr = library.mybackend_cpu_allocate(ctypes.c_size_t(500))
    assert ptr % 64 == 0 and library.mybackend_cpu_live_bytes() == before + 500
    library.mybackend_cpu_free(ctypes.c_void_p(ptr), ctypes.c_size_t(500))
    assert library.mybackend_cpu_live_bytes() == before and library.mybackend_cpu_allocate(ctypes.c_size_t(0)) is None
