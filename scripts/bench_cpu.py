"""Host memory beside glibc, tcmalloc, jemalloc and mimalloc (Debian packages, preloaded).

Tables: allocate-and-free pairs and a churn of 256 live blocks; operators that allocate large
outputs, as a ratio to the same operator writing into an existing tensor; training steps on the
CPU; how much of a loader's copies pinned memory hides; what pinned memory wastes; a planned
training step. An allocator that is not installed is left out. Every number is the median of
interleaved rounds, in processes of their own.

usage: bench_cpu.py [--rounds N] [--pinned N]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

BATCHES = 16
ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = {
    "glibc": None,
    "tcmalloc": "libtcmalloc_minimal.so.4",
    "jemalloc": "libjemalloc.so.2",
    "mimalloc": "libmimalloc.so.2",
}
FOLDERS = [Path(f"/usr/lib/{platform.machine()}-linux-gnu"), Path("/usr/lib64"), Path("/usr/lib")]


def found_libraries() -> dict[str, Path | None]:
    found: dict[str, Path | None] = {}
    for name, file in LIBRARIES.items():
        if file is None:
            found[name] = None
        elif path := next((folder / file for folder in FOLDERS if (folder / file).exists()), None):
            found[name] = path
    return found


def median_ms(function: Callable[[], object], calls: int) -> float:
    times = []
    for _ in range(calls):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3


# --- What runs in a process of its own ------------------------------------------------------------


def measure_large() -> dict[str, float]:
    """a + a for several sizes, as a ratio to torch.add(a, a, out=...)."""
    import torch

    result = {}
    for megabytes in (40, 64, 256):
        a = torch.ones(megabytes << 18)
        out = torch.empty_like(a)
        calls = max(7, 1000 // megabytes)
        into = median_ms(lambda a=a, out=out: torch.add(a, a, out=out), calls)
        fresh = median_ms(lambda a=a: a + a, calls)
        result[f"{megabytes} MB"] = fresh / into
        result[f"{megabytes} MB ms"] = fresh
    return result


def measure_training() -> dict[str, float]:
    """Milliseconds of a training step."""
    import torch
    from torch import nn

    def step_of(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

        def step() -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        return step

    torch.manual_seed(0)
    convolutional = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, 10),
    )  # fmt: skip
    wide = nn.Sequential(nn.Linear(512, 4096), nn.GELU(), nn.Linear(4096, 4096), nn.GELU(), nn.Linear(4096, 512))
    result = {}
    for name, step in (
        ("convolutional", step_of(convolutional, torch.randn(32, 3, 64, 64))),
        ("wide MLP", step_of(wide, torch.randn(256, 512))),
    ):
        step()
        result[name] = median_ms(step, 7)
    return result


def measure_overlap() -> dict[str, float]:
    """A loader's batches copied to the device while the previous one is computed on."""
    import torch

    size = (12 << 20,)
    batches = [torch.ones(size).pin_memory() for _ in range(4)]
    weight = torch.randn(896, 896, device="mybackend")
    stream = torch.mybackend.Stream()
    slots = [torch.empty(size, device="mybackend") for _ in range(2)]
    torch.set_num_threads(1)  # the other core copies

    def compute() -> None:
        for _ in range(2):
            weight @ weight

    def copy(i: int, non_blocking: bool) -> None:
        slots[i % 2].copy_(batches[i % 4], non_blocking=non_blocking)

    def serial() -> None:
        for i in range(BATCHES):
            copy(i, False)
            compute()

    def overlapped() -> None:
        with torch.mybackend.stream(stream):
            copy(0, True)
        for i in range(BATCHES):
            stream.synchronize()  # batch i is there
            if i + 1 < BATCHES:
                with torch.mybackend.stream(stream):
                    copy(i + 1, True)
            compute()

    def copies() -> None:
        for i in range(BATCHES):
            copy(i, False)

    def computes() -> None:
        for _ in range(BATCHES):
            compute()

    for function in (serial, overlapped):
        function()
    times = {
        name: median_ms(f, 9)
        for name, f in (("serial", serial), ("overlapped", overlapped), ("copies", copies), ("computes", computes))
    }
    # What could be hidden: all copies but the first, as long as there is computing to hide behind.
    hidden = (times["serial"] - times["overlapped"]) / min(times["copies"], times["computes"])
    return times | {"hidden": hidden}


def measure_plan() -> dict[str, float]:
    import torch

    from mybackend import memory

    result: dict[str, float] = {}
    for device in ("cpu", "mybackend"):
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
        model = torch.nn.Sequential(layer, torch.nn.Linear(256, 256)).to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.randn(8, 64, 256, device=device)

        def step(model=model, optimizer=optimizer, x=x) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        for _ in range(3):
            step()
        with memory.record_plan(device) as plan:
            step()
        for _ in range(2):
            with plan.use():
                step()
        result[f"{device} arena"] = plan.arena_bytes / 2**20
        result[f"{device} lower bound"] = plan.lower_bound_bytes / 2**20
        result[f"{device} peak"] = plan.peak_live_bytes / 2**20
        result[f"{device} reserved"] = plan.reserved_bytes / 2**20
        result[f"{device} served"] = plan.counts["served"]
        result[f"{device} fell through"] = plan.counts["fell_through"]
    return result


MEASUREMENTS = {
    f.__name__.removeprefix("measure_"): f for f in (measure_large, measure_training, measure_overlap, measure_plan)
}


def run_self(measurement: str, library: Path | None, ours: bool) -> dict[str, float]:
    environment = dict(os.environ)
    environment.pop("MYBACKEND_CPU_ALLOCATOR", None)
    if library is not None:
        environment["LD_PRELOAD"] = str(library)
    if ours:
        environment["MYBACKEND_CPU_ALLOCATOR"] = "1"
    command = [sys.executable, __file__, "--measure", measurement]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{measurement}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


# --- Tables ---------------------------------------------------------------------------------------


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}


def table(title: str, rows: dict[str, dict[str, float]], unit: str, keys: list[str] | None = None) -> None:
    keys = keys or list(next(iter(rows.values())))
    print(f"\n{title:<22}" + "".join(f"{key:>16}" for key in keys))
    for name, row in rows.items():
        print(f"{name:<22}" + "".join(f"{row[key]:>16.2f}" for key in keys), unit, flush=True)


def bench_pairs(libraries: dict[str, Path | None], rounds: int) -> None:
    import mybackend

    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "bench_cpu"
        library = Path(mybackend.library_path())
        subprocess.run(
            ["c++", "-std=c++20", "-O2", f"-I{ROOT / 'csrc'}", str(ROOT / "scripts/bench_cpu.cpp"), "-o", str(program),
             f"-L{library.parent}", "-lmybackend_core", f"-Wl,-rpath,{library.parent}"],
            check=True,
        )  # fmt: skip
        results: dict[str, list[dict[str, float]]] = {}
        for _ in range(rounds):
            for name, path in [("mybackend", None), *libraries.items()]:
                environment = dict(os.environ)
                if path is not None:
                    environment["LD_PRELOAD"] = str(path)
                side = "ours" if name == "mybackend" else "malloc"
                done = subprocess.run([str(program), side], env=environment, capture_output=True, text=True, check=True)
                results.setdefault(name, []).append(json.loads(done.stdout))
    rows = {name: medians(r) for name, r in results.items()}
    table("allocate and free", rows, "ns")


def bench_processes(title: str, measurement: str, libraries: dict[str, Path | None], rounds: int, unit: str) -> None:
    results: dict[str, list[dict[str, float]]] = {}
    for _ in range(rounds):
        results.setdefault("mybackend", []).append(run_self(measurement, None, True))
        for name, path in libraries.items():
            results.setdefault(name, []).append(run_self(measurement, path, False))
    rows = {name: medians(r) for name, r in results.items()}
    keys = [key for key in rows["mybackend"] if not key.endswith(" ms")]
    table(title, rows, unit, keys)


def bench_pinned(count: int) -> None:
    import torch

    from mybackend import config, memory

    config.set("pinned_max_cached_mb:0")
    generator = random.Random(0)
    asked = pinned = 0
    for _ in range(count):
        size = generator.randint(1 << 20, 300 << 20)
        block = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        asked += size
        pinned += memory.host_memory_stats()["allocated_bytes.current"]
        del block
    print(f"\npinned, {count} random sizes between 1 and 300 MB: {pinned / asked:.4f} x the bytes asked")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default 5)")
    parser.add_argument("--pinned", type=int, default=1000, help="sizes of the pinned table (default 1000)")
    parser.add_argument("--measure", choices=list(MEASUREMENTS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        import mybackend

        result = MEASUREMENTS[options.measure]()
        assert (
            options.measure != "large" or not mybackend.cpu.is_installed() or mybackend.cpu.memory_stats()["hits"] > 0
        )
        print(json.dumps(result))
        return 0
    libraries = found_libraries()
    missing = [name for name in LIBRARIES if name not in libraries]
    print(
        f"{os.cpu_count()} cores, {platform.machine()}; medians of {options.rounds} rounds"
        + (f"; not installed: {', '.join(missing)}" if missing else "")
    )
    bench_pairs(libraries, options.rounds)
    bench_processes("a + a / out=", "large", libraries, options.rounds, "x")
    bench_processes("training step", "training", libraries, options.rounds, "ms")
    overlap = medians([run_self("overlap", None, False) for _ in range(options.rounds)])
    print(
        f"\nloader, {BATCHES} batches of 48 MB: "
        + ", ".join(f"{key} {overlap[key]:.1f} ms" for key in ("serial", "copies", "computes", "overlapped"))
    )
    print(f"hidden behind compute: {overlap['hidden']:.0%} of what can be")
    plan = run_self("plan", None, False)
    for device in ("cpu", "mybackend"):
        print(f"\nplan of a transformer's step on {device}: arena {plan[f'{device} arena']:.2f} MiB (lower bound {plan[f'{device} lower bound']:.2f}), "
              f"peak of live bytes {plan[f'{device} peak']:.2f}, reserved {plan[f'{device} reserved']:.2f}; "
              f"{plan[f'{device} served']:.0f} served, {plan[f'{device} fell through']:.0f} fell through")  # fmt: skip
    bench_pinned(options.pinned)
    return 0


if __name__ == "__main__":
    sys.exit(main())
