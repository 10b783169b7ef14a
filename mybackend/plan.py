"""A memory planner: lay one iteration out in an arena, and run later iterations in it.

    with mybackend.memory.record_plan("cpu") as plan:
        step()
    print(plan)
    for batch in loader:
        with plan.use():
            step()

A plan holds each allocation of the recorded iteration with its lifetime and its place. In
`use()` the n-th allocation gets its place without a search; what deviates (another size, a place
that is still taken, another stream) falls through to the ordinary allocator and is counted. What
outlived the recorded iteration ("escaping": results, new gradients) is not in the arena."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path

import torch

from mybackend import _C

_FORMAT = "mybackend memory plan"
_VERSION = 1


def _target(device: str | int | torch.device) -> int:
    resolved = torch.device("mybackend", device) if isinstance(device, int) else torch.device(device)
    if resolved.type == "cpu":
        return -1
    if resolved.type != "mybackend":
        raise ValueError(f"device: expected 'cpu' or 'mybackend', not {str(device)!r}")
    return _C._current_device() if resolved.index is None else resolved.index


def _megabytes(count: int) -> str:
    return f"{count / 2**20:.2f} MiB"


class MemoryPlan:
    """Made by `record_plan` or `MemoryPlan.load`. Sizes are in bytes.

    `arena_bytes`: of the arena; `lower_bound_bytes`: no arena for this iteration can be smaller;
    `peak_live_bytes`: the most that was alive at one time, escaping allocations included;
    `reserved_bytes`: what the ordinary allocator held at the end of the recording."""

    def __init__(self) -> None:
        self._plan: _C._Plan | None = None
        self.reserved_bytes = 0

    def _recorded(self) -> _C._Plan:
        if self._plan is None:
            raise RuntimeError("the memory plan is still being recorded: leave the `with record_plan()` block first")
        return self._plan

    @property
    def device(self) -> torch.device:
        target = self._recorded().target
        return torch.device("cpu") if target < 0 else torch.device("mybackend", target)

    @property
    def arena_bytes(self) -> int:
        return self._recorded().arena_bytes

    @property
    def lower_bound_bytes(self) -> int:
        return self._recorded().lower_bound_bytes

    @property
    def peak_live_bytes(self) -> int:
        return self._recorded().peak_live_bytes

    @property
    def allocations(self) -> list[tuple[int, int, int, int]]:
        """(bytes, begin, end, offset) of each allocation, in order; end is -1 for escaping ones."""
        return self._recorded().allocations

    @property
    def counts(self) -> dict[str, int]:
        """Of the last iteration in `use()`: allocations `served` from the arena, `escaping`, and
        those that `fell_through`."""
        return self._recorded().counts

    @contextmanager
    def use(self) -> Iterator[MemoryPlan]:
        """One iteration from the plan. The arena is allocated at the first use and kept until the
        plan and every tensor in it are gone. For the CPU this serves all CPU tensors of the process
        from `mybackend.cpu`'s allocator meanwhile. Raises RuntimeError when another plan is in
        use for the device, torch.OutOfMemoryError when there is no room for the arena."""
        plan = self._recorded()
        plan.enter()
        try:
            yield self
        finally:
            plan.leave()

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the plan as JSON."""
        plan = self._recorded()
        data = {
            "format": _FORMAT,
            "version": _VERSION,
            "device": "cpu" if plan.target < 0 else "mybackend",
            "arena_bytes": plan.arena_bytes,
            "lower_bound_bytes": plan.lower_bound_bytes,
            "peak_live_bytes": plan.peak_live_bytes,
            "reserved_bytes": self.reserved_bytes,
            "allocations": plan.allocations,
        }
        Path(path).write_text(json.dumps(data))

    @classmethod
    def load(cls, path: str | PathLike[str], device: str | int | torch.device | None = None) -> MemoryPlan:
        """Reads what `save` wrote; `device` replaces the recorded one. Raises ValueError for a file
        that is no plan or contradicts itself."""
        try:
            data = json.loads(Path(path).read_text())
            if data["format"] != _FORMAT or data["version"] != _VERSION:
                raise ValueError(f"expected {_FORMAT!r}, version {_VERSION}")
            result = cls()
            result.reserved_bytes = int(data["reserved_bytes"])
            result._plan = _C._Plan(
                _target(device if device is not None else data["device"]),
                [tuple(a) for a in data["allocations"]],
                data["arena_bytes"],
                data["lower_bound_bytes"],
                data["peak_live_bytes"],
            )
        except (KeyError, TypeError, ValueError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: not a memory plan: {error}") from error
        return result

    def __repr__(self) -> str:
        if self._plan is None:
            return "<MemoryPlan, being recorded>"
        escaping = sum(1 for allocation in self.allocations if allocation[2] < 0)
        return (
            f"<MemoryPlan for {self.device}: {len(self.allocations)} allocations ({escaping} escaping), "
            f"arena {_megabytes(self.arena_bytes)} (lower bound {_megabytes(self.lower_bound_bytes)}), "
            f"peak of live bytes {_megabytes(self.peak_live_bytes)}, "
            f"reserved by the ordinary allocator {_megabytes(self.reserved_bytes)}>"
        )


@contextmanager
def record_plan(device: str | int | torch.device = "mybackend") -> Iterator[MemoryPlan]:
    """Records the allocations of a `with` block on one device ("cpu", or a mybackend device), on
    all threads, and lays them out at its end. An exception ends the recording without a plan."""
    target = _target(device)
    plan = MemoryPlan()
    _C._plan_start(target)
    try:
        yield plan
    except BaseException:
        _C._plan_cancel(target)
        raise
    if target < 0:
        stats = _C._cpu_tracker_stats()
        plan.reserved_bytes = (
            stats["current_bytes"] + _C._cpu_pool_stats()["cached_bytes"] + _C._cpu_cache_stats()["cached_bytes"]
        )
    else:
        plan.reserved_bytes = _C._memory_stats(target)["reserved_bytes"]["all"]["current"]
    plan._plan = _C._plan_finish(target)
