"""Random traces under random configurations: PyTorch's own allocator beside ours, until they differ.

The reference is a build of `native_replay` (PyTorch's CUDA caching allocator over a stand-in
runtime). Traces mix all events: several streams, record_stream, private pools, pools within
pools, memory limits that change, empty_cache and peak resets. Compared are statistics, driver
calls, segments, every action in order, and which requests ran out of memory. A difference is
shortened to the fewest events that still show it, and written to a file.

usage: fuzz_against_reference.py NATIVE_REPLAY [--runs N] [--seed N] [--events N]
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from mybackend import replay

MB = 1 << 20
COMPARED = ("stats", "driver", "segments", "actions", "oom")


def random_conf(generator: random.Random) -> str:
    choices = {
        "expandable_segments": ["True"],
        "max_split_size_mb": ["21", "32", "64", "200"],
        "max_non_split_rounding_mb": ["21", "60", "200"],
        "garbage_collection_threshold": ["0.3", "0.6", "0.9"],
        "roundup_power2_divisions": ["2", "4", "8", "[256:1,512:2,1024:4,>:8]", "[1:8,64:2,>:1]"],
        "large_segment_size_mb": ["20", "40", "64"],
        "throw_on_cudamalloc_oom": ["True"],
        "per_process_memory_fraction": ["0.4", "0.8"],
    }
    keys = generator.sample(sorted(choices), generator.choice([0, 1, 2, 2, 3, 4]))
    return ",".join(f"{key}:{generator.choice(choices[key])}" for key in keys)


class TraceWriter:
    """A random trace. Each run has its own weights of the events and its own sizes."""

    def __init__(self, generator: random.Random, expandable: bool) -> None:
        self.random = generator
        # The reference forgets a released pool when its expandable segments were unmapped as often
        # as mapped, live blocks or not; then it uses freed memory. There is nothing to compare.
        self.release_pools_in_use = not expandable
        self.pool_of: dict[int, int] = {}  # block -> the pool that was begun last
        self.lines: list[str] = []
        self.live: list[int] = []
        self.next_id = 1
        self.active_pools: list[int] = []
        self.made_pools: list[int] = []  # an entry for each begin that is not yet released
        self.next_pool = 1
        self.streams = generator.choice([1, 1, 2, 3, 5])
        self.keep = generator.choice([5, 30, 120])
        self.sizes = generator.choice(["small", "large", "both", "both", "huge"])
        self.weights = {
            "allocate": 40.0,
            "free": 38.0,
            "record_stream": generator.choice([0, 4, 10]) if self.streams > 1 else 0,
            "advance": generator.choice([0, 1, 4]),
            "empty_cache": generator.choice([0, 0.3, 1]),
            "reset_peak": 0.3,
            "fraction": generator.choice([0, 0, 0.5]),
            "pool": generator.choice([0, 0, 1.5, 4]),
        }

    def size(self) -> int:
        kind = self.sizes if self.sizes != "both" else self.random.choice(["small", "large"])
        if self.random.random() < 0.02:
            return self.random.choice([0, 1, 511, 512, 513, MB - 1, MB, MB + 1, 10 * MB - 1, 10 * MB, 20 * MB])
        if kind == "small":
            return int(2 ** self.random.uniform(0, 20.2))
        if kind == "large":
            return int(2 ** self.random.uniform(19.8, 26))
        return int(2 ** self.random.uniform(20, 29))

    def stream(self) -> int:
        return self.random.randrange(self.streams)

    def pool_event(self) -> None:
        if self.active_pools and self.random.random() < 0.55:
            pool = self.active_pools.pop(self.random.randrange(len(self.active_pools)))
            self.lines.append(f"n {pool}")
        elif self.made_pools and self.random.random() < 0.35:
            idle = [pool for pool in self.made_pools if pool not in self.active_pools]
            if not self.release_pools_in_use:
                used = {self.pool_of.get(block) for block in self.live}
                idle = [pool for pool in idle if pool not in used]
            if idle:
                pool = self.random.choice(idle)
                self.made_pools.remove(pool)
                self.lines.append(f"d {pool}")
        elif len(self.active_pools) < 3:
            # A pool that was released for good must not be begun again.
            known = [pool for pool in self.made_pools if pool not in self.active_pools]
            if known and self.random.random() < 0.5:
                pool = self.random.choice(known)
            else:
                pool, self.next_pool = self.next_pool, self.next_pool + 1
            self.active_pools.append(pool)
            self.made_pools.append(pool)  # each begin holds the pool once
            self.lines.append(f"b {pool}")

    def event(self) -> None:
        kind = self.random.choices(list(self.weights), list(self.weights.values()))[0]
        if kind == "allocate" and len(self.live) < 2 * self.keep:
            self.lines.append(f"a {self.next_id} {self.size()} {self.stream()}")
            self.live.append(self.next_id)
            if self.active_pools:
                self.pool_of[self.next_id] = self.active_pools[-1]
            self.next_id += 1
        elif kind == "free" and self.live:
            self.lines.append(f"f {self.live.pop(self.random.randrange(len(self.live)))}")
        elif kind == "record_stream" and self.live:
            self.lines.append(f"r {self.random.choice(self.live)} {self.stream()}")
        elif kind == "advance":
            self.lines.append(f"q {self.stream()}")
        elif kind == "empty_cache":
            self.lines.append("e")
        elif kind == "reset_peak":
            self.lines.append("p")
        elif kind == "fraction":
            self.lines.append(f"m {self.random.choice([0.1, 0.5, 0.9, 1.0])}")
        elif kind == "pool":
            self.pool_event()


def reference(program: Path, text: str, conf: str, capacity: int) -> dict:
    with tempfile.NamedTemporaryFile("w", suffix=".trace") as file:
        file.write(text)
        file.flush()
        environment = dict(os.environ, LD_LIBRARY_PATH=str(program.parent), FAKE_CUDA_CAPACITY=str(capacity))
        environment["PYTORCH_CUDA_ALLOC_CONF"] = conf
        if not conf:
            del environment["PYTORCH_CUDA_ALLOC_CONF"]
        done = subprocess.run([str(program), file.name], env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        return {"crash": f"exit status {done.returncode}: {done.stderr.strip()[:300]}"}
    return json.loads(done.stdout)


def differences(program: Path, text: str, conf: str, capacity: int) -> list[str]:
    """Names of what differs; empty when nothing does, or when the reference refuses to run."""
    theirs = reference(program, text, conf, capacity)
    if "crash" in theirs or "config_error" in theirs:
        return []
    try:
        ours = replay.run(text, conf=conf, capacity=capacity, actions=True)
    except (ValueError, RuntimeError) as error:
        return [f"ours raised: {error}"]
    return [name for name in COMPARED if ours.get(name) != theirs.get(name)]


def without_dangling(lines: list[str]) -> list[str]:
    """Without the events of blocks whose allocation was removed."""
    known, kept = set(), []
    for line in lines:
        kind, *fields = line.split()
        if kind == "a":
            known.add(fields[0])
        if kind not in "fr" or fields[0] in known:
            kept.append(line)
    return kept


def shorten(program: Path, lines: list[str], conf: str, capacity: int) -> list[str]:
    """Removes ever smaller pieces while a difference remains."""
    piece = max(1, len(lines) // 2)
    while piece >= 1:
        start = 0
        while start < len(lines):
            fewer = without_dangling(lines[:start] + lines[start + piece :])
            if fewer and differences(program, "\n".join(fewer) + "\n", conf, capacity):
                lines = fewer
            else:
                start += piece
        piece //= 2
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("native", type=Path, help="PyTorch's allocator as a command: native_replay TRACE")
    parser.add_argument("--runs", type=int, default=300, help="how many traces (default 300)")
    parser.add_argument("--seed", type=int, default=1, help="of the first trace; the next has the next (default 1)")
    parser.add_argument("--events", type=int, default=400, help="events a trace (default 400)")
    parser.add_argument("--write", type=Path, help="keep traces and the reference's results in this .json.gz")
    options = parser.parse_args()
    if not options.native.exists():
        parser.error(f"{options.native} does not exist")
    refused = equal = 0
    kept: list[dict] = []
    for seed in range(options.seed, options.seed + options.runs):
        generator = random.Random(seed)
        conf = random_conf(generator)
        capacity = generator.choice([64 << 30, 2 << 30, 512 * MB, 200 * MB])
        writer = TraceWriter(generator, "expandable" in conf)
        while len(writer.lines) < options.events:
            writer.event()
        text = "\n".join(writer.lines) + "\n"
        theirs = reference(options.native, text, conf, capacity)
        if "CachingAllocator option" in theirs.get("crash", ""):
            try:
                replay.run(text, conf=conf, capacity=capacity)
            except ValueError:
                refused += 1
                continue
            print(f"seed {seed}: the reference refuses {conf!r}, we do not")
            return 1
        if "crash" in theirs or "config_error" in theirs:
            print(f"seed {seed}: the reference stopped under {conf!r}: {theirs}")
            continue
        wrong = differences(options.native, text, conf, capacity)
        if wrong:
            short = shorten(options.native, writer.lines, conf, capacity)
            path = Path(f"difference_{seed}.trace")
            path.write_text(f"# conf {conf}\n# capacity {capacity}\n" + "\n".join(short) + "\n")
            print(
                f"seed {seed}: {', '.join(wrong)} differ under {conf!r}, capacity {capacity}: {path}, {len(short)} events"
            )
            return 1
        equal += 1
        if options.write is not None:
            hashed = json.dumps(theirs.pop("actions"), separators=(",", ":")).encode()
            theirs["actions_sha256"] = hashlib.sha256(hashed).hexdigest()
            del theirs["oom_text"]
            kept.append({"seed": seed, "conf": conf, "capacity": capacity, "trace": text, "result": theirs})
        if equal % 50 == 0:
            print(f"{equal} traces equal", flush=True)
    if options.write is not None:
        with gzip.open(options.write, "wt") as file:
            json.dump(kept, file)
    print(f"{equal} traces equal, {refused} configurations refused by both, none different")
    return 0


if __name__ == "__main__":
    sys.exit(main())
