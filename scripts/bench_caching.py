"""The host cost of the caching allocator, in nanoseconds per event.

Three tables: each trace beside PyTorch's own allocator, when a build of `native_replay` is given
(without it, ours alone); the cost with few and with many live blocks; and the throughput of
several threads on one device beside one thread's.

usage: bench_caching.py [--native PROGRAM] [--repeat N]
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from mybackend import _C, replay

TRACES = Path(__file__).resolve().parent.parent / "tests" / "data" / "traces"
COMPARED = [
    "recorded_bert_train", "recorded_cnn_train", "recorded_gpt_train", "recorded_gpt_gen", "synthetic_small",
    "synthetic_uniform", "synthetic_streams", "synthetic_heavy_tail", "synthetic_mlp",
]  # fmt: skip
ROUNDS = 5


def native_ns(program: Path, trace: Path, repeat: int) -> float:
    """What `native_replay TRACE REPEAT` prints, on a device of 64 GiB."""
    environment = dict(os.environ, LD_LIBRARY_PATH=str(program.parent), FAKE_CUDA_CAPACITY=str(replay.DEFAULT_CAPACITY))
    environment.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    done = subprocess.run(
        [str(program), str(trace), str(repeat)], env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)["ns_per_event"]


def compare_traces(program: Path | None, repeat: int) -> None:
    print(f"\n{'trace':<26}{'mybackend':>12}" + (f"{'native':>12}{'ratio':>9}" if program else ""))
    with tempfile.TemporaryDirectory() as folder:
        for name in COMPARED:
            path = Path(folder) / f"{name}.trace"
            path.write_bytes(gzip.decompress((TRACES / f"{name}.trace.gz").read_bytes()))
            ours, theirs = [], []
            for _ in range(ROUNDS):  # interleaved: a shared machine changes its speed
                ours.append(replay.benchmark(path, repeat=repeat))
                if program:
                    theirs.append(native_ns(program, path, repeat))
            line = f"{name:<26}{statistics.median(ours):>9.1f} ns"
            if program:
                ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
                line += f"{statistics.median(theirs):>9.1f} ns{ratio:>9.3f}"
            print(line, flush=True)


def heap_trace(live: int, events: int, order: str) -> tuple[str, str]:
    """`live` blocks of up to 64 KB, then `events` frees and allocations beside or among them; and
    the trace without the second part, whose cost is subtracted."""
    generator = random.Random(1)
    fill = [f"a {i} {generator.randint(1, 65536)} 0" for i in range(live)]
    churn: list[str] = []
    alive = list(range(live))
    stack: list[int] = []
    for i in range(events // 2):
        new = f"a {live + i} {generator.randint(1, 65536)} 0"
        if order == "last in, first out":  # runs of temporaries, as operators make them
            churn.append(new)
            stack.append(live + i)
            if generator.random() < 0.1 or i == events // 2 - 1:
                churn += [f"f {block}" for block in reversed(stack)]
                stack.clear()
            continue
        index = i % live if order == "first in, first out" else generator.randrange(live)
        churn += [f"f {alive[index]}", new]
        alive[index] = live + i
    return "\n".join(fill) + "\n", "\n".join(fill + churn) + "\n"


def scaling() -> None:
    """Nanoseconds per event by the number of live blocks."""
    orders = ("last in, first out", "first in, first out", "random")
    print(f"\n{'live blocks':<14}" + "".join(f"{order:>20}{'ratio':>8}" for order in orders))
    events = 400_000
    counts = (1_000, 10_000, 100_000, 1_000_000)
    traces = {(live, order): heap_trace(live, events, order) for live in counts for order in orders}
    rounds: dict[tuple[int, str], list[float]] = {key: [] for key in traces}
    for _ in range(ROUNDS):
        for (live, order), (base, full) in traces.items():
            without = replay.benchmark(base, capacity=1 << 42, repeat=3) * live
            total = replay.benchmark(full, capacity=1 << 42, repeat=3) * (live + events)
            rounds[live, order].append((total - without) / events)
    for live in counts:
        line = f"{live:<14,}"
        for order in orders:
            ours = rounds[live, order]
            ratio = statistics.median(a / b for a, b in zip(ours, rounds[counts[0], order], strict=True))
            line += f"{statistics.median(ours):>17.1f} ns{ratio:>8.2f}"
        print(line, flush=True)


def threads() -> None:
    print(f"\n{'threads on one device':<26}{'pairs/s':>12}{'ratio':>9}")
    first = None
    for count in (1, 2, 4, 8):
        rate = statistics.median(_C._thread_throughput(count, 200_000) for _ in range(5))
        first = first or rate
        print(f"{count:<26}{rate / 1e6:>10.2f} M{rate / first:>9.2f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--native", type=Path, help="PyTorch's allocator as a command: native_replay TRACE REPEAT")
    parser.add_argument("--repeat", type=int, default=30, help="passes over a trace, the best counts (default 30)")
    options = parser.parse_args()
    if options.native is not None and not options.native.exists():
        parser.error(f"--native: {options.native} does not exist")
    print(f"{os.cpu_count()} cores, {platform.machine()}; medians of {ROUNDS} rounds")
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cpus)})  # both sides on one core: another may be busy with something else
    compare_traces(options.native, options.repeat)
    scaling()
    os.sched_setaffinity(0, cpus)
    threads()
    return 0


if __name__ == "__main__":
    sys.exit(main())
