"""The memory planner: record an iteration, lay it out, run later ones in the arena."""

from __future__ import annotations

import gc
import json
import random
from pathlib import Path

import pytest
import torch

from mybackend import _C, cpu, memory
from mybackend.memory import MemoryPlan, record_plan

DEVICES = ["cpu", "mybackend"]
KIB = 1024


@pytest.fixture(autouse=True)
def clean():  # type: ignore[no-untyped-def]
    gc.collect()
    before = cpu.memory_stats()["live_bytes"]
    yield
    gc.collect()
    assert cpu.memory_stats()["live_bytes"] == before, "CPU memory stayed allocated"


def transformer_step(device: str):  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
    model = torch.nn.Sequential(layer, torch.nn.Linear(128, 128)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(8, 32, 128).to(device)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


@pytest.mark.parametrize("device", DEVICES)
def test_a_transformer_step(device: str) -> None:
    step = transformer_step(device)
    expected = [step() for _ in range(7)]
    step = transformer_step(device)
    assert [step() for _ in range(3)] == expected[:3]
    with record_plan(device) as plan:
        assert step() == expected[3]
    assert plan.arena_bytes <= 1.05 * plan.lower_bound_bytes
    assert plan.arena_bytes <= 1.05 * plan.peak_live_bytes
    assert plan.reserved_bytes >= plan.arena_bytes or device == "cpu"
    for loss in expected[4:6]:
        with plan.use():
            assert step() == loss
        assert plan.counts["fell_through"] == 0 and plan.counts["served"] > 100
    assert step() == expected[6]  # and without it again


@pytest.mark.parametrize("device", DEVICES)
def test_layout(device: str) -> None:
    def iteration() -> torch.Tensor:
        a = torch.empty(64 * KIB, dtype=torch.uint8, device=device).fill_(1)
        b = torch.empty(128 * KIB, dtype=torch.uint8, device=device).fill_(2)
        del a
        c = torch.empty(64 * KIB, dtype=torch.uint8, device=device).fill_(3)
        assert bool((b == 2).all()) and bool((c == 3).all())
        return torch.empty(5 * KIB, dtype=torch.uint8, device=device)

    iteration()
    with record_plan(device) as plan:
        kept = iteration()
    sizes = [(size, end < 0) for size, _, end, _ in plan.allocations]
    assert sizes[:2] == [(64 * KIB, False), (128 * KIB, False)] and sizes[-1] == (5 * KIB, True)
    assert plan.lower_bound_bytes <= plan.arena_bytes <= 1.2 * plan.lower_bound_bytes
    with plan.use():
        again = iteration()
    assert plan.counts["escaping"] == 1 and plan.counts["fell_through"] == 0
    del kept, again


@pytest.mark.parametrize("device", DEVICES)
def test_what_deviates_falls_through(device: str) -> None:
    def make(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=device)

    def iteration(sizes: list[int]) -> None:
        for size in sizes:
            make(size).fill_(1)

    base = [10 * KIB, 20 * KIB, 30 * KIB, 40 * KIB]
    with record_plan(device) as plan:
        iteration(base)
    for sizes, served, fell_through in (
        (base, 4, 0),
        ([10 * KIB, 11 * KIB, 20 * KIB, 30 * KIB, 40 * KIB], 4, 1),  # one too many
        ([10 * KIB, 30 * KIB, 40 * KIB], 3, 0),  # one too few
        ([10 * KIB, 20 * KIB, 31 * KIB, 40 * KIB], 3, 1),
        (base + base, 4, 4),
    ):
        with plan.use():
            iteration(sizes)
        counts = plan.counts
        assert (counts["served"], counts["fell_through"]) == (served, fell_through), sizes
    with plan.use():  # a place that is still taken is not given twice
        first = make(10 * KIB).fill_(5)
        rest = [make(size).fill_(6) for size in base[1:]]
        assert plan.counts["fell_through"] >= 1 and bool((first == 5).all())
    with plan.use():  # not even in the next iteration
        iteration(base)
        assert plan.counts["fell_through"] >= 1 and bool((first == 5).all())
    del first, rest


def test_tensors_outlive_the_plan() -> None:
    for device in DEVICES:
        with record_plan(device) as plan:
            torch.empty(100 * KIB, dtype=torch.uint8, device=device)
        with plan.use():
            x = torch.empty(100 * KIB, dtype=torch.uint8, device=device).fill_(4)
        assert plan.counts["served"] == 1
        del plan
        gc.collect()
        assert bool((x == 4).all())
        del x  # the last one takes the arena with it


def test_random_lifetimes() -> None:
    """Layouts of random iterations: check_plan (in the constructor) refuses overlaps."""
    for seed in range(20):
        generator = random.Random(seed)
        with record_plan("mybackend") as plan:
            alive = []
            for _ in range(120):
                alive.append(torch.empty(int(2 ** generator.uniform(4, 20)), dtype=torch.uint8, device="mybackend"))
                if len(alive) > 12 or generator.random() < 0.4:
                    alive.pop(generator.randrange(len(alive)))
            alive.clear()
        assert plan.lower_bound_bytes <= plan.arena_bytes <= 1.3 * plan.lower_bound_bytes
        _C._Plan(0, plan.allocations, plan.arena_bytes, plan.lower_bound_bytes, plan.peak_live_bytes)


def test_save_and_load(tmp_path: Path) -> None:
    step = transformer_step("mybackend")
    step()
    with record_plan("mybackend") as plan:
        step()
    path = tmp_path / "plan.json"
    plan.save(path)
    loaded = MemoryPlan.load(path)
    assert loaded.allocations == plan.allocations and loaded.arena_bytes == plan.arena_bytes
    assert loaded.device == torch.device("mybackend", 0) and loaded.reserved_bytes == plan.reserved_bytes
    with loaded.use():
        step()
    assert loaded.counts["fell_through"] == 0
    data = json.loads(path.read_text())
    taken = next(a for a in data["allocations"] if a[2] >= 0)
    for wrong in (
        "no json",
        "{}",
        json.dumps(data | {"version": 99}),
        json.dumps(data | {"arena_bytes": 1}),
        json.dumps(data | {"allocations": [[1 << 40, 0, 1, 0]]}),
        json.dumps(data | {"allocations": [taken, [taken[0], taken[1] + 1, taken[2] + 5, taken[3]]]}),
        json.dumps(data | {"allocations": [[5, 3, 2, 0]]}),
        json.dumps(data | {"allocations": [[5, 1, 2, 7]]}),
        json.dumps(data | {"allocations": [["a", 1, 2, 0]]}),
    ):
        path.write_text(wrong)
        with pytest.raises(ValueError, match="not a memory plan"):
            MemoryPlan.load(path)
    with pytest.raises(OSError):
        MemoryPlan.load(tmp_path / "missing.json")


def test_wrong_use() -> None:
    with pytest.raises(ValueError, match="expected 'cpu' or 'mybackend'"), record_plan("meta"):
        pass
    with record_plan("cpu") as plan:
        torch.empty(10)
        with pytest.raises(RuntimeError, match="still being recorded"):
            plan.save("x")
        with pytest.raises(RuntimeError, match="being recorded for this device already"), record_plan("cpu"):
            pass
    assert "MemoryPlan for cpu" in repr(plan)
    with plan.use(), pytest.raises(RuntimeError, match="in use for this device"), plan.use():
        pass
    with pytest.raises(ZeroDivisionError), record_plan("cpu"):
        1 / 0  # noqa: B018
    with record_plan("cpu"):
        pass
    assert not cpu.is_installed()


def test_other_streams_fall_through() -> None:
    with record_plan("mybackend") as plan:
        torch.empty(100, device="mybackend")
    with plan.use(), torch.mybackend.stream(torch.mybackend.Stream()):
        torch.empty(100, device="mybackend")
    assert plan.counts == {"served": 0, "escaping": 0, "fell_through": 0}


def test_memory_stays_ours() -> None:
    before = memory.copied_output_count()
    step = transformer_step("mybackend")
    with record_plan("mybackend") as plan:
        step()
    with plan.use():
        step()
    assert memory.copied_output_count() == before
