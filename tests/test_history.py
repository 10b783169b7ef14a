"""History, snapshots, private pools, out-of-memory observers, torch's own settings."""

from __future__ import annotations

import gc
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import mybackend
from mybackend import _C, config, memory

record = memory._record_memory_history


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    yield
    record(None)


def make_tensor(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="mybackend")


def entries() -> list[dict]:
    return memory._snapshot()["device_traces"][0]


def test_events_and_frames() -> None:
    record(clear_history=True)
    x = make_tensor(1000)
    address = x.data_ptr()
    del x
    found = [e for e in entries() if e["action"] != "segment_alloc"]
    assert [e["action"] for e in found[:3]] == ["alloc", "free_requested", "free_completed"]
    assert all(e["addr"] == address and e["size"] == 1000 and e["stream"] == 0 for e in found[:3])
    assert any(frame["name"] == "make_tensor" for frame in found[0]["frames"])
    assert any(frame["name"] == "test_events_and_frames" for frame in found[1]["frames"])
    assert found[0]["time_us"] > 1_600_000_000_000_000


def test_events_that_torch_does_not_have() -> None:
    record(clear_history=True)
    x = make_tensor(1000)
    stream = torch.mybackend.Stream()
    x.record_stream(stream)
    config.set("garbage_collection_threshold:0.5,roundup_power2_divisions:4")
    config.reset()
    torch.mybackend.set_per_process_memory_fraction(0.5)
    torch.mybackend.set_per_process_memory_fraction(1.0)
    del x
    torch.mybackend.synchronize()
    torch.mybackend.empty_cache()
    snapshot = memory._snapshot()
    own, trace = snapshot["mybackend_events"][0], snapshot["device_traces"][0]
    recorded = next(e for e in own if e["action"] == "record_stream")
    assert recorded["size"] == 1000 and recorded["stream"] == stream.stream_id
    assert recorded["thread"] == threading.get_native_id()
    assert [e["action"] for e in trace[: recorded["before"]]].count("alloc") == 1
    notes = [e["note"] for e in own if e["action"] in ("settings", "memory_fraction")]
    assert notes[0] == "garbage_collection_threshold:0.5,roundup_power2_divisions:4"
    assert notes[1:] == ["garbage_collection_threshold:,roundup_power2_divisions:", "0.500000", "1.000000"]
    assert any(e["action"] == "empty_cache" for e in own)
    assert all(e["thread"] == threading.get_native_id() for e in trace)
    known = {"alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "snapshot"}
    assert {e["action"] for e in trace} <= known


def test_what_runs_at_exit_captures_no_stacks() -> None:
    # On autograd's threads, which may still free memory while the interpreter goes; a stack would need it.
    record(stacks="all", clear_history=True)
    _C._drain_autograd_threads()
    seen = entries()
    assert any(e["action"] == "alloc" for e in seen) and not any(e["frames"] for e in seen)


def test_levels() -> None:
    record(context="state", clear_history=True)
    x = make_tensor(1000)
    assert entries()[-1]["frames"] == []
    blocks = [b for s in memory._snapshot()["segments"] for b in s["blocks"] if b["address"] == x.data_ptr()]
    assert any(frame["name"] == "make_tensor" for frame in blocks[0]["frames"])
    record(context=None, clear_history=True)
    y = make_tensor(1000)
    assert all(e["frames"] == [] for e in entries())
    record(stacks="all", clear_history=True)
    z = make_tensor(1000)
    assert any("empty" in frame["name"] for e in entries() for frame in e["frames"])
    del x, y, z


def test_bounded_and_skipped() -> None:
    record(max_entries=10, context=None, clear_history=True)
    for _ in range(30):
        make_tensor(700)
    assert len(entries()) == 10
    record(context=None, clear_history=True, skip_actions=["free_requested", "free_completed"])
    make_tensor(700)
    assert {e["action"] for e in entries()} <= {"alloc", "snapshot", "segment_alloc"}
    record("state")
    make_tensor(700)
    assert len(entries()) == 1


def test_stopping_keeps_nothing_new() -> None:
    record(clear_history=True)
    record(None)
    make_tensor(600)
    assert entries() == []


@pytest.mark.parametrize(
    "wrong",
    [{"enabled": "some"}, {"context": "x"}, {"stacks": "cpp"}, {"max_entries": -1}, {"skip_actions": ["nothing"]}],
)
def test_bad_arguments(wrong: dict) -> None:
    with pytest.raises(ValueError):
        record(**wrong)


def test_the_viewer_of_torch_accepts_a_snapshot(tmp_path: Path) -> None:
    from torch.cuda import _memory_viz

    record(clear_history=True)
    x = make_tensor(5 << 20)
    with pytest.raises(torch.OutOfMemoryError):
        make_tensor(1 << 45)
    y = make_tensor(3000)
    del x
    path = tmp_path / "snapshot.pickle"
    memory._dump_snapshot(str(path))
    snapshot = pickle.loads(path.read_bytes())
    assert {e["action"] for e in snapshot["device_traces"][0]} >= {"alloc", "free_requested", "free_completed", "oom"}
    for text in (_memory_viz.trace_plot(snapshot), _memory_viz.segment_plot(snapshot), _memory_viz.trace(snapshot)):
        assert len(text) > 100
    for segment in snapshot["segments"]:
        assert sum(b["size"] for b in segment["blocks"]) == segment["total_size"]
    del y


def test_mem_pool() -> None:
    pool = torch.mybackend.MemPool()
    assert pool.use_count() == 1 and pool.id[0] == 0
    with torch.mybackend.use_mem_pool(pool):
        assert pool.use_count() == 2
        x = make_tensor(3 << 20)
        x.fill_(1)
    assert pool.use_count() == 1
    y = make_tensor(3 << 20)
    segments = pool.snapshot()
    assert len(segments) == 1 and segments[0]["segment_pool_id"] == pool.id
    assert segments[0]["address"] <= x.data_ptr() < segments[0]["address"] + segments[0]["total_size"]
    assert not segments[0]["address"] <= y.data_ptr() < segments[0]["address"] + segments[0]["total_size"]
    stats = memory.memory_stats_as_nested_dict()["reserved_bytes_by_private_pools"]
    key = f"{pool.id[0]}_{pool.id[1]}"  # as torch.cuda names it
    assert stats[key]["all"]["current"] == stats[key]["large_pool"]["current"] == segments[0]["total_size"]
    assert memory.memory_stats()[f"reserved_bytes_by_private_pools.{key}.small_pool.current"] == 0
    del x
    del pool
    gc.collect()
    assert memory.memory_stats_as_nested_dict()["reserved_bytes_by_private_pools"][key]["all"]["current"] == 0
    with pytest.raises(ValueError, match="is on mybackend:0"):
        pool = torch.mybackend.MemPool()
        with torch.mybackend.use_mem_pool(pool, "mybackend:1"):
            pass
    del y, pool


def test_no_split_pool_and_tensors_that_outlive_it() -> None:
    pool = torch.mybackend.MemPool(no_split=True)
    with torch.mybackend.use_mem_pool(pool):
        x = make_tensor(1000)
        y = make_tensor(1000)
    assert all(len(s["blocks"]) == 1 for s in pool.snapshot()) and len(pool.snapshot()) == 2
    del pool
    x.fill_(3)
    assert x.sum().item() == 3000
    del x, y
    torch.mybackend.empty_cache()


def test_a_pool_as_a_fall_back(run_python) -> None:
    run_python(
        """
        import torch
        make = lambda mb: torch.empty(mb << 20, dtype=torch.uint8, device="mybackend")
        for use_on_oom in (False, True):
            pool = torch.mybackend.MemPool(use_on_oom=use_on_oom)
            with torch.mybackend.use_mem_pool(pool):
                x = make(40)
            del x
            try:
                y = make(40); assert use_on_oom
                assert pool.snapshot()[0]["address"] == y.data_ptr()
                del y
            except torch.OutOfMemoryError:
                assert not use_on_oom
            del pool
        """,
        MYBACKEND_ALLOC_CONF="device_memory_mb:64",
    )


def test_out_of_memory_observers() -> None:
    seen: list[tuple] = []
    torch.mybackend.attach_out_of_memory_observer(lambda *report: seen.append(report))
    with pytest.raises(torch.OutOfMemoryError):
        make_tensor(1 << 45)
    free, total = torch.mybackend.mem_get_info()
    assert seen == [(0, 1 << 45, total, free)]


def test_torch_settings_reach_us() -> None:
    try:
        torch._C._accelerator_setAllocatorSettings("max_split_size_mb:96")
        assert config.get("max_split_size_mb") == 96 and config.origin("max_split_size_mb") == "torch settings"
        with pytest.raises((ValueError, RuntimeError)):
            torch._C._accelerator_setAllocatorSettings("no_such_key:1")
        assert config.get("max_split_size_mb") == 96
    finally:
        config.reset()
        torch._C._accelerator_setAllocatorSettings("")


def test_torch_settings_reach_us_before_first_use(run_python) -> None:
    run_python(
        """
        import torch, mybackend
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        assert mybackend.config.get("expandable_segments")
        """
    )


def test_replay_of_what_was_recorded() -> None:
    """The history of a run, replayed as a trace, gives the same allocated bytes."""
    record(context=None, clear_history=True)
    keep = [make_tensor(1000 * (i + 1)) for i in range(20)]
    del keep[::2]
    ids: dict[int, int] = {}
    lines = []
    for number, e in enumerate(entries()):
        if e["action"] == "alloc":
            ids[e["addr"]] = number
            lines.append(f"a {number} {e['size']} 0")
        elif e["action"] == "free_requested" and e["addr"] in ids:
            lines.append(f"f {ids.pop(e['addr'])}")
    result = mybackend.replay.run("\n".join(lines) + "\n")
    assert result["stats"]["requested_bytes.all"][0] == sum(t.numel() for t in keep)
    del keep
