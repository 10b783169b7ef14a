"""The caching allocator takes the decisions of PyTorch's CUDA caching allocator."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest

from mybackend import replay

DATA = Path(__file__).parent / "data"
GOLDEN: dict[str, dict] = json.loads(gzip.decompress((DATA / "golden.json.gz").read_bytes()))
COMPARED = ("stats", "driver", "segments", "n_actions", "actions_sha256", "oom")


def differences(run: str) -> list[str]:
    trace, capacity, conf = run.split("|")
    result = replay.run(DATA / "traces" / f"{trace}.gz", conf, int(capacity))
    return [key for key in COMPARED if result[key] != GOLDEN[run][key]]


@pytest.mark.parametrize("run", GOLDEN)
def test_equals_the_golden_result(run: str) -> None:
    assert differences(run) == []


def test_equals_the_reference_on_random_traces() -> None:
    """Written by scripts/fuzz_against_reference.py --write: combinations of keys, pools within
    pools, record_stream in pools, changing memory limits."""
    runs = json.loads(gzip.decompress((DATA / "fuzz_golden.json.gz").read_bytes()))
    assert len(runs) > 100
    different = []
    for run in runs:
        result = replay.run(run["trace"], run["conf"], run["capacity"])
        if any(result[key] != run["result"][key] for key in COMPARED if key != "n_actions"):
            different.append(run["seed"])
    assert different == []


@pytest.mark.parametrize("trace", ["synthetic_pools", "synthetic_streams", "synthetic_pressure"])
@pytest.mark.parametrize(
    "conf", ["", "expandable_segments:True", "max_split_size_mb:64,garbage_collection_threshold:0.5"]
)
def test_invariants_hold_after_every_event(trace: str, conf: str) -> None:
    replay.run(DATA / "traces" / f"{trace}.trace.gz", conf, 1 << 30, check_invariants=True)


def test_result_and_actions() -> None:
    result = replay.run("a 1 1000 0\na 2 5 0\nf 1\n# a comment\n\na 3 0 0\nf 3\n", actions=True)
    assert [a[0] for a in result["actions"]] == ["segment_alloc", "alloc", "alloc", "free_requested", "free_completed"]
    assert result["stats"]["allocated_bytes.all"] == [512, 1536, 1536, 1024]
    assert result["oom"] == [] and result["n_actions"] == 5
    tight = replay.run("a 7 9000000 0", capacity=2 << 20)
    assert tight["oom"] == [7] and "free of 2.00 MiB" in tight["oom_text"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a 1 10 0\nx 3\n", "line 2: unknown event 'x'"),
        ("a 1 10\n", "line 1: expected 'a ID BYTES STREAM'"),
        ("a 1 ten 0\n", "line 1: expected"),
        ("a 1 10 0 7\n", "line 1: expected"),
        ("a 1 -10 0\n", "line 1: expected"),
        ("\n\nf 4\n", "line 3: allocation 4 was never made"),
        ("m 1.5\n", "line 1: expected"),
        ("d 3\n", "event 1"),
        ("n 3\n", "event 1"),
    ],
)
def test_malformed_traces(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replay.run(text)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="unknown key"):
        replay.run("a 1 1 0\n", conf="nonsense:1")
    with pytest.raises(ValueError, match="capacity"):
        replay.run("a 1 1 0\n", capacity=0)
    with pytest.raises(FileNotFoundError):
        replay.run("no_such_file.trace")
    with pytest.raises(ValueError, match="repeat"):
        replay.benchmark("a 1 1 0\n", repeat=0)


def test_benchmark() -> None:
    assert 0 < replay.benchmark(DATA / "traces" / "synthetic_mlp.trace.gz", repeat=3) < 1e6


def test_many_small_blocks_in_one_segment() -> None:
    # More than 128 starts in 2 MiB: their records are divided, and joined again as blocks merge.
    generator = random.Random(5)
    events = [f"a {i} {generator.randint(1, 1200)} 0" for i in range(900)]
    order = list(range(900))
    generator.shuffle(order)
    events += [f"f {i}" for i in order[:600]]
    events += [f"a {900 + i} {generator.randint(1, 5000)} 0" for i in range(200)]
    events += [f"f {i}" for i in order[600:]] + [f"f {900 + i}" for i in range(200)]
    result = replay.run("\n".join(events) + "\n", check_invariants=True)
    assert result["stats"]["active.all"][0] == 0
    assert all(len(segment["blocks"]) == 1 for segment in result["segments"])


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_records_divided_and_used_again(conf: str) -> None:
    # 2 MiB full of the smallest blocks in one corner, then elsewhere, then few large ones at the same addresses.
    smallest = [f"a {i} 1 0" for i in range(1000)]
    events = [*smallest, *(f"f {i}" for i in range(0, 1000, 2)), *(f"a {1000 + i} 300 0" for i in range(500))]
    events += [f"f {i}" for i in range(1, 1000, 2)] + [f"f {1000 + i}" for i in range(500)]
    events += [f"a {2000 + i} {size} 0" for i, size in enumerate((900_000, 1, 1, 60_000, 1, 500_000, 1, 1, 400_000))]
    events += [f"a {3000 + i} 512 0" for i in range(400)] + [f"f {2000 + i}" for i in (0, 3, 5, 8)]
    events += [f"a {4000 + i} 1 0" for i in range(3000)]
    result = replay.run("\n".join(events) + "\n", conf, check_invariants=True)
    requested = [block[1] for segment in result["segments"] for block in segment["blocks"] if block[2]]
    assert sorted(requested) == [1] * 3005 + [512] * 400
    events += [f"f {i}" for i in (*(2000 + i for i in (1, 2, 4, 6, 7)), *range(3000, 3400), *range(4000, 7000))]
    result = replay.run("\n".join(events) + "\n", conf, check_invariants=True)
    assert result["stats"]["active.all"][0] == 0


def test_free_blocks_terabytes_apart() -> None:
    # The free set keeps the addresses of a size relative to their 2 TiB; best fit takes the lowest of all.
    size, events, allocations = 5 << 18, [], 0  # 16 in a segment
    parts = []
    for _ in range(5):
        parts.append(range(allocations, allocations + 128))
        events += [f"a {i} {size} 0" for i in parts[-1]]
        allocations += 129
        events.append(f"a {allocations - 1} {1 << 41} 0")
    freed = [i for part in parts for i in part if i % 2 == 0]
    random.Random(8).shuffle(freed)
    events += [f"f {i}" for i in freed] + [f"a {allocations + i} {size} 0" for i in range(len(freed))]
    result = replay.run("\n".join(events) + "\n", capacity=1 << 45, check_invariants=True, actions=True)
    taken = [action[1] for action in result["actions"] if action[0] == "alloc"]
    lowest_first = sorted(taken[i] for i in freed)
    assert lowest_first[-1] - lowest_first[0] > 4 << 41
    assert taken[allocations:] == lowest_first


def test_segments_all_over_the_address_space() -> None:
    # The records are found by address, 2 GiB at a time: many of those, which then hold nothing, and others.
    generator = random.Random(6)
    events, allocations = [], 0
    for _ in range(3):
        numbers = list(range(allocations, allocations + 120))
        allocations += 120
        events += [f"a {i} {generator.choice((700 << 20, 1500 << 20, 3 << 30, 1000))} 0" for i in numbers]
        generator.shuffle(numbers)
        events += [f"f {i}" for i in numbers] + ["e"]
    result = replay.run("\n".join(events) + "\n", capacity=1 << 42, check_invariants=True)
    assert result["segments"] == [] and result["oom"] == []
    assert result["stats"]["allocation.all"][2] == allocations


def test_small_and_large_requests_side_by_side() -> None:
    # Records of requests up to 65535 bytes take less room; with a larger one beside them, all of their 2 MiB take more.
    small = "".join(f"a {i} {60000 + i} 0\n" for i in range(10))
    trace = small + "a 10 70000 0\nf 10\n"
    (segment,) = replay.run(trace, check_invariants=True)["segments"]
    assert [block[1] for block in segment["blocks"]] == [*range(60000, 60010), 70000]
    # What is left of the large one still says so, also after its neighbour has been split in many.
    trace += "".join(f"a {20 + i} {100 + i} 0\n" for i in range(40))
    (segment,) = replay.run(trace, check_invariants=True)["segments"]
    assert [block[1] for block in segment["blocks"]] == [*range(60000, 60010), *range(100, 140), 70000]


def test_requests_around_the_limits_of_their_records() -> None:
    generator = random.Random(7)
    events, live, count = [], [], 0
    for _ in range(3000):
        if live and generator.random() < 0.48:
            events.append(f"f {live.pop(generator.randrange(len(live)))}")
        else:
            size = generator.choice((300, 900, 65535, 65536, 70000, 1 << 20))
            events.append(f"a {count} {size} {generator.randrange(2)}")
            live.append(count)
            count += 1
        if generator.random() < 0.2:
            events.append(f"r {generator.choice(live)} {generator.randrange(3)}" if live else "q 1")
        elif generator.random() < 0.1:
            events.append(f"q {generator.randrange(3)}")
    for conf in ("", "expandable_segments:True"):
        trace = "\n".join(events) + "\n"
        sizes = {int(e.split()[1]): int(e.split()[2]) for e in events if e[0] == "a"}
        result = replay.run(trace, conf, check_invariants=True)
        requested = [block[1] for segment in result["segments"] for block in segment["blocks"] if block[2]]
        assert sorted(requested) == sorted(sizes[i] for i in live)


def test_requests_of_more_than_4_gib() -> None:
    gib = 1 << 30
    first, second = 5 * gib - 3, 6 * gib - 1
    trace = f"a 1 {first} 0\na 2 {second} 0\nf 1\na 3 {gib} 0\n"
    result = replay.run(trace, conf="expandable_segments:True", capacity=64 * gib, check_invariants=True)
    (segment,) = result["segments"]
    # What is left of the first block still says what it was last used for. (Behind all: the rest of a page.)
    assert [block[1] for block in segment["blocks"]] == [gib, first, second, 0]
    assert [bool(block[2]) for block in segment["blocks"]] == [True, False, True, False]
    result = replay.run(trace + "f 2\nf 3\n", conf="expandable_segments:True", capacity=64 * gib, check_invariants=True)
    (segment,) = result["segments"]
    assert [block[1] for block in segment["blocks"]] == [gib] and not segment["blocks"][0][2]
