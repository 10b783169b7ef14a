"""The cost of borrowing, as ratios to the CPU, both sides measured in one run.

Three tables: the 200 operators of bench_operators.py on 8x8 operands (host overhead), 64 MB
elementwise operators (no copy), and training steps (AdamW, clipped gradients) of the demo's model
and of the models of tests/training_models.py, larger than in the tests. Every number is the median of many
interleaved measurements.

usage: bench_ops.py [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
import demo
from bench_operators import OPERATORS, operands
from training_models import MODELS

Results = dict[str, tuple[float, float, float]]  # seconds of ours, of the CPU, ratio
MODEL_SCALE = 8  # of the widths of tests/training_models.py


def compare(
    ours: Callable[[], object], theirs: Callable[[], object], calls: int, rounds: int
) -> tuple[float, float, float]:
    """Medians of: seconds a call of `ours`, of `theirs`, and of the ratio within a round."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 2):
        for side, function in enumerate((ours, theirs) if turn % 2 else (theirs, ours)):
            begin = time.perf_counter()
            for _ in range(calls):
                function()
            times[side if turn % 2 else 1 - side].append((time.perf_counter() - begin) / calls)
    a, b = times[0][2:], times[1][2:]
    return statistics.median(a), statistics.median(b), statistics.median(x / y for x, y in zip(a, b, strict=True))


def small_operators(rounds: int) -> Results:
    ours, theirs = operands("mybackend"), operands("cpu")
    with torch.no_grad():
        return {name: compare(partial(f, ours), partial(f, theirs), 200, rounds) for name, f in OPERATORS.items()}


def large_operator(rounds: int) -> Results:
    """64 MB operands; the output goes to memory that both sides already have, so that the
    allocator is the same on both: none."""
    a = torch.rand(16 << 20)
    b, out = torch.rand_like(a), torch.empty_like(a)
    x, y, z = a.to("mybackend"), b.to("mybackend"), out.to("mybackend")
    return {
        "add, out=": compare(lambda: torch.add(x, y, out=z), lambda: torch.add(a, b, out=out), 3, rounds),
        "mul_": compare(lambda: z.mul_(1.0), lambda: out.mul_(1.0), 3, rounds),
        "add": compare(lambda: x + y, lambda: a + b, 3, rounds),
    }


def demo_step(device: str) -> Callable[[], object]:
    layers, heads, width, context, batch = demo.SIZES["small"]
    torch.manual_seed(0)
    model = demo.Transformer(100, layers, heads, width, context, 0.1).to(device)
    tokens = torch.randint(0, 100, (batch, context + 1)).to(device)

    def loss() -> torch.Tensor:
        return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return step_of(model, loss)


def model_step(name: str, device: str) -> Callable[[], object]:
    torch.manual_seed(0)
    model, batch, loss_of = MODELS[name](MODEL_SCALE)
    model = model.to(device)
    batch = tuple(t.to(device) for t in batch) if isinstance(batch, tuple) else batch.to(device)
    return step_of(model, lambda: loss_of(model, batch))


def step_of(model: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step() -> None:
        value = loss()
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()

    return step


def training_steps(rounds: int) -> Results:
    results = {"demo model (small)": compare(demo_step("mybackend"), demo_step("cpu"), 1, rounds)}
    for name in MODELS:
        ours, theirs = model_step(name, "mybackend"), model_step(name, "cpu")
        begin = time.perf_counter()
        theirs()
        calls = max(1, int(0.05 / (time.perf_counter() - begin)))
        results[name] = compare(ours, theirs, calls, rounds)
    return results


def show(title: str, results: Results, unit: str, scale: float) -> None:
    print(f"\n{title}\n{'':<24}{'mybackend':>12}{'CPU':>12}{'ratio':>9}")
    for name, (ours, theirs, ratio) in results.items():
        print(f"{name:<24}{ours * scale:>9.2f} {unit:<2}{theirs * scale:>9.2f} {unit:<2}{ratio:>9.3f}")
    if len(results) > 1:
        ratios = [ratio for _, _, ratio in results.values()]
        print(f"{'median, worst':<24}{'':>24}{statistics.median(ratios):>9.3f}{max(ratios):>9.3f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    options = parser.parse_args()
    rounds = 11 if options.quick else 61
    print(
        f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads; medians of {rounds} rounds"
    )
    tables = {
        "operators, 8x8": small_operators(rounds),
        "64 MB operands": large_operator(max(11, rounds // 3)),
        "training steps": training_steps(max(7, rounds // 3)),
    }
    for title, results in tables.items():
        big = title in ("64 MB operands", "training steps")
        show(title, results, "ms" if big else "µs", 1e3 if big else 1e6)
    if options.json:
        options.json.write_text(json.dumps(tables, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
