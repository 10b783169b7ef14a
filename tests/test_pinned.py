"""Pinned host memory: a cache with tight size classes, and asynchronous copies from and to it."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from mybackend import _C, config, memory

MIB = 1 << 20


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    gc.collect()
    memory.empty_host_cache()
    before = stats()["active_bytes.current"]
    yield
    gc.collect()
    torch.mybackend.synchronize()
    memory.empty_host_cache()
    config.reset()
    memory.empty_host_cache()
    assert stats()["active_bytes.current"] == before, "pinned memory stayed allocated"
    assert stats()["allocated_bytes.current"] == before, "pinned memory stayed cached"


def stats() -> dict:
    return memory.host_memory_stats()


def pinned(bytes: int) -> torch.Tensor:
    return torch.empty(bytes, dtype=torch.uint8, pin_memory=True)


def test_pin_memory() -> None:
    x = torch.arange(10000.0).pin_memory()
    assert x.is_pinned() and x[5:].is_pinned() and x[1:3].view(torch.int32).is_pinned()
    assert not torch.arange(3.0).is_pinned() and not torch.ones(3, device="mybackend").is_pinned()
    assert torch.empty(100, pin_memory=True).is_pinned()
    y = x.to("mybackend", non_blocking=True)
    torch.mybackend.synchronize()
    assert torch.equal(y.cpu(), x)
    assert torch.empty(0, pin_memory=True).numel() == 0


def test_blocks_are_cached_and_given_back() -> None:
    x = pinned(MIB)
    pointer = x.data_ptr()
    assert pointer % 4096 == 0 and stats()["active_bytes.current"] == MIB
    del x
    now = stats()
    assert now["active_bytes.current"] == 0 and now["cached_bytes"] == MIB == now["allocated_bytes.current"]
    x = pinned(MIB - 5)
    assert x.data_ptr() == pointer and stats()["num_hits"] == now["num_hits"] + 1
    assert stats()["requested_bytes.current"] == MIB - 5
    del x
    torch.accelerator.empty_host_cache()
    assert stats()["allocated_bytes.current"] == 0


def test_peaks_are_exact() -> None:
    memory.reset_peak_host_memory_stats()
    x, y = pinned(3 * MIB), pinned(5 * MIB)
    del x, y
    z = pinned(MIB)
    now = stats()
    assert now["active_bytes.peak"] == 8 * MIB and now["active_bytes.current"] == MIB
    assert now["allocated_bytes.peak"] == 9 * MIB and now["active_requests.peak"] == 2
    memory.reset_peak_host_memory_stats()
    assert stats()["active_bytes.peak"] == MIB
    memory.reset_accumulated_host_memory_stats()
    assert stats()["num_host_alloc"] == 0 and stats()["active_bytes.allocated"] == 0
    del z


def test_little_is_wasted() -> None:
    generator = random.Random(0)
    sizes = [generator.randint(MIB, 300 * MIB) for _ in range(1000)]
    got = [_C._pinned_block_bytes(size) for size in sizes]
    assert all(size <= block <= 1.125 * size + 4096 for size, block in zip(sizes, got, strict=True))
    assert sum(got) <= 1.13 * sum(sizes)
    sizes = [generator.randint(MIB, 12 * MIB) for _ in range(60)]  # and the real thing, as much as fits
    blocks = [pinned(size) for size in sizes]
    assert stats()["allocated_bytes.current"] == sum(_C._pinned_block_bytes(size) for size in sizes)
    del blocks


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 6 * MIB), min_size=1, max_size=12),
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(0, 16),
    st.booleans(),
    st.sampled_from([1, 2, 8]),
    st.booleans(),
    st.sampled_from([0, 1, 7]),
)
def test_no_block_is_too_small(sizes, round_mb, cached_mb, total_mb, register, threads, background, segment_mb) -> None:
    """Under any setting of the keys; blocks are written to their ends, and never overlap."""
    conf = (
        f"pinned_max_round_threshold_mb:{round_mb},pinned_max_cached_size_mb:{cached_mb},"
        f"pinned_max_cached_mb:{total_mb},pinned_use_cuda_host_register:{register},"
        f"pinned_num_register_threads:{threads},pinned_use_background_threads:{background}"
    )
    if segment_mb:
        conf += f",pinned_reserve_segment_size_mb:{segment_mb}"
    with pytest.warns() if round_mb > cached_mb else _nothing():
        config.set(conf)
    try:
        alive: dict[int, torch.Tensor] = {}
        for number, size in enumerate(sizes + sizes[::-1]):
            x = pinned(size).fill_(number % 251)
            assert x.is_pinned() and x[-1:].is_pinned()
            alive[number] = x
            if number % 3 == 2:
                alive.pop(next(iter(alive)))
            assert stats()["cached_bytes"] <= total_mb * MIB
        for number, x in alive.items():
            assert bool((x == number % 251).all())
        alive.clear()
        del x
        assert stats()["active_bytes.current"] == 0
    finally:
        config.reset()
        memory.empty_host_cache()
    assert stats()["allocated_bytes.current"] == 0


class _nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *args: object) -> None: ...


def test_the_reserved_segment() -> None:
    config.set("pinned_reserve_segment_size_mb:16")
    memory.reset_accumulated_host_memory_stats()
    blocks = [pinned(MIB) for _ in range(16)]
    assert stats()["num_host_alloc"] == 1 and stats()["allocated_bytes.current"] == 16 * MIB
    more = pinned(MIB)  # it is full
    assert stats()["num_host_alloc"] == 2
    del blocks[3:5]
    pair = pinned(2 * MIB)  # two neighbours, merged
    assert stats()["num_host_alloc"] == 2
    del blocks, more, pair


def test_a_block_waits_for_the_streams_that_use_it() -> None:
    stream = torch.mybackend.Stream()
    hold = _C._hold_stream(stream)
    x = pinned(MIB).fill_(7)
    pointer = x.data_ptr()
    with torch.mybackend.stream(stream):
        y = x.to("mybackend", non_blocking=True)
    del x
    other = pinned(MIB)
    assert other.data_ptr() != pointer and stats()["active_requests.current"] == 2
    other.fill_(9)
    hold.release()
    stream.synchronize()
    assert bool((y == 7).all())
    again = pinned(MIB)
    assert again.data_ptr() == pointer
    del other, again


def test_the_background_thread_completes_frees() -> None:
    def thread_count() -> int:
        return len(os.listdir("/proc/self/task"))

    before = thread_count()
    config.set("pinned_use_background_threads:True")
    assert thread_count() == before + 1
    x = pinned(MIB).fill_(1)
    y = x.to("mybackend", non_blocking=True)
    del x
    torch.mybackend.synchronize()
    for _ in range(10000):
        if stats()["cached_bytes"] == MIB:
            break
        os.sched_yield()
    assert stats()["cached_bytes"] == MIB and bool((y == 1).all())
    config.set("pinned_use_background_threads:False")
    assert thread_count() <= before + 1  # the stream's worker may have started


def test_copies_are_asynchronous_both_ways() -> None:
    stream = torch.mybackend.current_stream()
    hold = _C._hold_stream(stream)
    x = torch.arange(1000.0).pin_memory()
    y = torch.empty(1000, device="mybackend")
    hold.release()
    torch.mybackend.synchronize()
    hold = _C._hold_stream(stream)
    y.copy_(x, non_blocking=True)  # returns although the stream is held
    back = torch.zeros(1000, pin_memory=True)
    back.copy_(y, non_blocking=True)
    assert not stream.query() and back.sum().item() == 0
    hold.release()
    stream.synchronize()
    assert torch.equal(back, x)


def test_pageable_memory_is_copied_before_returning() -> None:
    x = torch.arange(1000.0)
    y = x.to("mybackend", non_blocking=True)
    assert torch.mybackend.current_stream().query()
    x.zero_()
    assert y.sum().item() == 499500


def test_copies_that_are_not_plain_are_right() -> None:
    x = torch.arange(12.0).reshape(3, 4).pin_memory()
    for make in (
        lambda: x.t().to("mybackend", non_blocking=True),
        lambda: x[:, 1:3].to("mybackend", non_blocking=True),
        lambda: x.to("mybackend", torch.float64, non_blocking=True),
        lambda: torch.empty(4, 3, device="mybackend").copy_(x.t(), non_blocking=True),
    ):
        y = make()
        expected = {(4, 3): x.t(), (3, 2): x[:, 1:3], (3, 4): x}[tuple(y.shape)]
        torch.mybackend.synchronize()
        assert torch.equal(y.cpu().to(x.dtype), expected)


def test_asynchronous_copies_between_devices(run_python) -> None:
    run_python(
        """
        import torch, mybackend
        a = torch.arange(1000., device="mybackend:0")
        b = torch.zeros(1000, device="mybackend:1")
        hold = mybackend._C._hold_stream(torch.mybackend.current_stream(1))
        b.copy_(a, non_blocking=True)      # after what device 1 has queued
        assert not torch.mybackend.current_stream(0).query()
        hold.release()
        assert b.sum().item() == 499500    # and device 1 goes on after it
        c = a.to("mybackend:1", non_blocking=True)
        assert (c + b).sum().item() == 999000
        """,
        MYBACKEND_DEVICE_COUNT="2",
    )


def test_reuse_while_another_stream_writes() -> None:
    """Without record_stream a block that another stream still copies into is reused, and
    corrupted; with it, it is not."""
    source = torch.full((MIB,), 7, dtype=torch.uint8).pin_memory()
    for record in (False, True):
        side = torch.mybackend.Stream()
        x = torch.zeros(MIB, dtype=torch.uint8, device="mybackend")
        pointer = x.data_ptr()
        hold = _C._hold_stream(side)
        with torch.mybackend.stream(side):
            x.copy_(source, non_blocking=True)
        if record:
            x.record_stream(side)
        del x
        y = torch.zeros(MIB, dtype=torch.uint8, device="mybackend")
        assert (y.data_ptr() == pointer) == (not record)
        hold.release()
        side.synchronize()
        assert y.sum().item() == (0 if record else 7 * MIB)
        del y


def test_errors_of_queued_work_surface_at_the_next_synchronization() -> None:
    stream = torch.mybackend.Stream()
    _C._throw_on_stream(stream, "the queued task failed")
    with pytest.raises(RuntimeError, match="the queued task failed"):
        stream.synchronize()
    stream.synchronize()
    x = torch.ones(10).pin_memory()
    with torch.mybackend.stream(stream):
        y = x.to("mybackend", non_blocking=True)
        assert y.sum().item() == 10


class Batch(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class CustomBatch:
    def __init__(self, samples: list) -> None:
        self.x = torch.stack([sample[0] for sample in samples])

    def pin_memory(self) -> CustomBatch:
        self.x = self.x.pin_memory()
        return self


@pytest.mark.parametrize("workers", [0, 2])
def test_data_loader(workers: int) -> None:
    data = TensorDataset(torch.arange(32.0))
    batches = [batch for (batch,) in DataLoader(data, batch_size=8, pin_memory=True, num_workers=workers)]
    assert all(batch.is_pinned() for batch in batches)
    assert sum(batch.to("mybackend", non_blocking=True).sum().item() for batch in batches) == 496


@pytest.mark.parametrize("workers", [0, 2])
def test_data_loader_with_custom_batches(workers: int) -> None:
    data = TensorDataset(torch.arange(32.0), torch.arange(32))
    named = DataLoader(
        data, batch_size=8, pin_memory=True, num_workers=workers,
        collate_fn=lambda samples: Batch(torch.stack([s[0] for s in samples]), torch.stack([s[1] for s in samples])),
    )  # fmt: skip
    assert all(isinstance(batch, Batch) and batch.x.is_pinned() and batch.y.is_pinned() for batch in named)
    custom = DataLoader(data, batch_size=8, pin_memory=True, num_workers=workers, collate_fn=CustomBatch)
    assert all(batch.x.is_pinned() for batch in custom)


def test_not_being_locked_is_reported(run_python) -> None:
    run_python(
        """
        import ctypes, os, resource, sys, torch, mybackend
        if os.geteuid() == 0:  # root may lock what it likes: become nobody, if that is possible
            try:
                os.setresuid(65534, 65534, 65534)
            except OSError:
                sys.exit(0)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
        x = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True).fill_(1)
        stats = mybackend.memory.host_memory_stats()
        assert x.is_pinned() and stats["unlocked_bytes"] == 1 << 20, stats
        del x
        mybackend.memory.empty_host_cache()
        assert mybackend.memory.host_memory_stats()["unlocked_bytes"] == 0
        """
    )


def test_forks_with_copies_queued(run_python) -> None:
    run_python(
        """
        import os, threading, torch, mybackend
        mybackend.config.set("pinned_use_background_threads:True")
        stop = False
        def churn():
            stream = torch.mybackend.Stream()
            with torch.mybackend.stream(stream):
                while not stop:
                    x = torch.empty(70000, pin_memory=True); x[0] = 1
                    y = x.to("mybackend", non_blocking=True); del x
                    z = y.to("cpu", non_blocking=True); del y, z
        def check():
            x = torch.arange(1000.).pin_memory()
            y = x.to("mybackend", non_blocking=True)
            torch.mybackend.synchronize()
            ok = y.sum().item() == 499500
            event = torch.mybackend.Event(); event.record(); event.synchronize()
            del x
            mybackend.memory.empty_host_cache()
            return ok
        # torch chooses its CPU kernels in function-local statics at their first call: a fork while another thread is
        # in one leaves the child waiting for it for ever, with or without this device. So every kernel runs once here.
        x = torch.empty(2); x[0] = 1
        assert check()
        threads = [threading.Thread(target=churn) for _ in range(2)]
        [t.start() for t in threads]
        for _ in range(15):
            pid = os.fork()
            if pid == 0:
                os._exit(0 if check() else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        stop = True
        [t.join() for t in threads]
        torch.mybackend.synchronize()
        """
    )


def test_exit_with_work_queued(run_python) -> None:
    for background in ("False", "True"):
        run_python(
            """
            import torch
            x = torch.ones(5 << 20).pin_memory()
            y = [torch.empty(5 << 20, device="mybackend") for _ in range(3)]
            for _ in range(20):
                for z in y: z.copy_(x, non_blocking=True)
            """,
            MYBACKEND_ALLOC_CONF=f"pinned_use_background_threads:{background}",
        )


def test_out_of_memory(run_python) -> None:
    run_python(
        """
        import resource, torch, mybackend
        torch.ones(1, device="mybackend")
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + (400 << 20), resource.RLIM_INFINITY))
        x = [torch.empty(100 << 20, dtype=torch.uint8, pin_memory=True) for _ in range(3)]
        del x
        y = torch.empty(300 << 20, dtype=torch.uint8, pin_memory=True)   # after the cache was emptied
        try:
            torch.empty(2 << 30, dtype=torch.uint8, pin_memory=True)
            raise SystemExit("no error")
        except torch.OutOfMemoryError as error:
            assert "pinned" in str(error)
        assert torch.empty(10, pin_memory=True).is_pinned()
        """
    )
