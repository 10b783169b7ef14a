"""Replays an allocation trace through the caching allocator, with no device and no memory.

A trace has one event a line: `a ID BYTES STREAM` (allocate), `f ID` (free), `r ID STREAM`
(record_stream), `q STREAM` (the stream catches up), `e` (empty_cache), `p` (reset peaks),
`m FRACTION` (memory fraction), `b POOL`, `n POOL`, `d POOL` (begin, end, release a pool).
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from mybackend import _C

__all__ = ["DEFAULT_CAPACITY", "benchmark", "run"]

DEFAULT_CAPACITY = 64 << 30  # bytes
_POOLS = ("all", "small_pool", "large_pool")
_FIELDS = ("current", "peak", "allocated", "freed")


def _text_of(trace: str | os.PathLike[str]) -> str:
    if isinstance(trace, str) and ("\n" in trace or re.match(r"\s*([afrqmbnd] \S|[ep]?$)", trace)):
        return trace
    path = Path(trace)
    if path.suffix == ".gz":
        with gzip.open(path, "rt") as file:
            return file.read()
    return path.read_text()


def run(
    trace: str | os.PathLike[str],
    conf: str = "",
    capacity: int = DEFAULT_CAPACITY,
    actions: bool = False,
    check_invariants: bool = False,
) -> dict[str, Any]:
    """Runs a trace under a configuration on a device of `capacity` bytes.

    `trace` is a path (.trace or .trace.gz) or the text itself. The result has `stats` (each
    counter as [current, peak, allocated, freed]), `driver` (calls), `segments`, `n_actions`,
    `actions_sha256`, `oom` (IDs that ran out of memory), `oom_text`, and with `actions=True`
    the `actions` themselves as [name, address, size, stream]. `check_invariants` checks the
    whole state after every event. Raises ValueError for a malformed trace (with its line) or
    configuration."""
    raw = _C._replay(_text_of(trace), conf, _capacity(capacity), check_invariants)
    stats: dict[str, Any] = {}
    for name, value in raw["stats"].items():
        if name == "num_oom_rejections":
            continue  # not part of the recorded results' format
        if not isinstance(value, dict):
            stats[name] = value
        elif "all" in value:
            for pool in _POOLS:
                stats[f"{name}.{pool}"] = [value[pool][field] for field in _FIELDS]
        else:
            stats[name] = [value[field] for field in _FIELDS]
    result = {
        "stats": stats,
        "driver": raw["driver"],
        "segments": raw["segments"],
        "n_actions": raw["n_actions"],
        "actions_sha256": hashlib.sha256(raw["actions_json"].encode()).hexdigest(),
        "oom": raw["oom"],
        "oom_text": raw["oom_text"],
    }
    if actions:
        result["actions"] = json.loads(raw["actions_json"])
    return result


def benchmark(
    trace: str | os.PathLike[str], conf: str = "", capacity: int = DEFAULT_CAPACITY, repeat: int = 30
) -> float:
    """Nanoseconds per event: the best of `repeat` passes over the trace, timed in C++."""
    return _C._replay_benchmark(_text_of(trace), conf, _capacity(capacity), repeat)


def _capacity(capacity: int) -> int:
    if isinstance(capacity, bool) or not isinstance(capacity, int) or not 0 < capacity < 1 << 62:
        raise ValueError(f"capacity: expected a positive number of bytes, not {capacity!r}")
    return capacity
