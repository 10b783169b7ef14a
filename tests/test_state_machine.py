"""Random programs over the Python face, with faults in every driver call and the allocator's
invariants checked after each step. hypothesis shrinks a failure to the shortest program."""

from __future__ import annotations

import ctypes
import gc

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import mybackend
from mybackend import _C, config

SIZES = st.one_of(st.integers(1, 2000), st.integers(1, 3 << 20), st.integers(9 << 20, 24 << 20))
FAULTS = [
    "memory_allocate",
    "memory_free",
    "address_reserve",
    "physical_create",
    "memory_map",
    "memory_unmap",
    "event_create",
    "event_record",
    "event_query",
]
CONFIGURATIONS = [
    "",
    "expandable_segments:True",
    "max_split_size_mb:32",
    "roundup_power2_divisions:4",
    "expandable_segments:True,max_split_size_mb:24",
]


class AllocatorMachine(RuleBasedStateMachine):
    """Tensors of one byte value each, which must keep it whatever else happens."""

    @initialize(conf=st.sampled_from(CONFIGURATIONS))
    def start(self, conf: str) -> None:
        gc.collect()
        _C._clear_faults()
        self.live: list[tuple[torch.Tensor, int]] = []
        self.before = torch.mybackend.tracker_stats()["current_bytes"]
        self.streams = [torch.mybackend.default_stream(), torch.mybackend.Stream()]
        torch.mybackend.empty_cache()
        config.reset()
        if conf:
            config.set(conf)

    @rule(size=SIZES, stream=st.integers(0, 1), value=st.integers(0, 255))
    def allocate(self, size: int, stream: int, value: int) -> None:
        try:
            with torch.mybackend.stream(self.streams[stream]):
                x = torch.empty(size, dtype=torch.uint8, device="mybackend")
        except (torch.OutOfMemoryError, RuntimeError):
            return  # a fault: nothing may have changed, which the invariants tell
        # Written and read without operators, which would allocate and meet the faults.
        ctypes.memset(x.data_ptr(), value, 1)
        ctypes.memset(x.data_ptr() + size - 1, value, 1)
        self.live.append((x, value))

    @rule(index=st.integers(0, 100))
    def free(self, index: int) -> None:
        if self.live:
            x, value = self.live.pop(index % len(self.live))
            assert ctypes.string_at(x.data_ptr(), 1)[0] == value
            assert ctypes.string_at(x.data_ptr() + x.numel() - 1, 1)[0] == value

    @rule(index=st.integers(0, 100), stream=st.integers(0, 1))
    def record_stream(self, index: int, stream: int) -> None:
        if self.live:
            self.live[index % len(self.live)][0].record_stream(self.streams[stream])

    @rule()
    def empty_cache(self) -> None:
        torch.mybackend.empty_cache()

    @rule(fraction=st.sampled_from([0.01, 0.3, 1.0]))
    def fraction(self, fraction: float) -> None:
        torch.mybackend.set_per_process_memory_fraction(fraction)

    @rule(
        primitive=st.sampled_from(FAULTS),
        calls=st.integers(1, 4),
        kind=st.sampled_from(["oom", "failed"]),
        repeat=st.integers(1, 3),
    )
    def fault(self, primitive: str, calls: int, kind: str, repeat: int) -> None:
        _C._set_fault(primitive, calls, kind, repeat)

    @rule(size=st.integers(1, 100000))
    def pool(self, size: int) -> None:
        pool = torch.mybackend.MemPool()
        try:
            with torch.mybackend.use_mem_pool(pool):
                self.live.append((torch.full((size,), 5, dtype=torch.uint8, device="mybackend"), 5))
        except (torch.OutOfMemoryError, RuntimeError):
            pass

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "live"):
            mybackend.memory.check_invariants()
            live = torch.mybackend.tracker_stats()["current_bytes"] - self.before
            assert live == sum(x.numel() for x, _ in self.live)

    def teardown(self) -> None:
        _C._clear_faults()
        if hasattr(self, "live"):
            self.live.clear()
        torch.mybackend.set_per_process_memory_fraction(1.0)
        config.reset()
        torch.mybackend.empty_cache()
        mybackend.memory.check_invariants()


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
