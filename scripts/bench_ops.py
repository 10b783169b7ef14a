"""The cost of borrowing, as ratios to the CPU, both sides measured in one run.

Four tables: operators with typed kernels and boxed ones on 8x8 operands (host overhead), a
64 MB elementwise operator (no copy), and a training step of the demo's model. Every number is
the median of many interleaved measurements.

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
import demo

TYPED: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "neg": lambda a, b: a.neg(),
    "exp": lambda a, b: a.exp(), "sqrt": lambda a, b: a.sqrt(), "tanh": lambda a, b: a.tanh(), "sigmoid": lambda a, b: a.sigmoid(),
    "relu": lambda a, b: a.relu(), "gelu": lambda a, b: functional.gelu(a), "silu": lambda a, b: functional.silu(a),
    "pow": lambda a, b: a.pow(2), "where": lambda a, b: torch.where(a > 0, a, b), "eq": torch.eq, "lt": torch.lt,
    "sum": lambda a, b: a.sum(), "mean": lambda a, b: a.mean(1), "amax": lambda a, b: a.amax(1),
    "softmax": lambda a, b: a.softmax(1), "log_softmax": lambda a, b: a.log_softmax(1), "mm": torch.mm,
    "bmm": lambda a, b: torch.bmm(a[None], b[None]), "addmm": lambda a, b: torch.addmm(a, a, b),
    "layer_norm": lambda a, b: functional.layer_norm(a, (8,)), "cat": lambda a, b: torch.cat([a, b]),
    "add_": lambda a, b: a.add_(b), "copy_": lambda a, b: a.copy_(b), "zero_": lambda a, b: a.zero_(),
    "addcmul_": lambda a, b: a.addcmul_(b, b), "lerp_": lambda a, b: a.lerp_(b, 0.5),
}  # fmt: skip
BOXED: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "hypot": torch.hypot, "fmod": torch.fmod, "copysign": torch.copysign, "logaddexp": torch.logaddexp,
    "nextafter": torch.nextafter, "fmax": torch.fmax, "heaviside": torch.heaviside, "xlogy": torch.special.xlogy,
    "sinh": lambda a, b: a.sinh(), "digamma": lambda a, b: a.digamma(),
}  # fmt: skip


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


def small_operators(table: dict[str, Callable], rounds: int) -> dict[str, tuple[float, float, float]]:
    results = {}
    with torch.no_grad():
        for name, function in table.items():
            a, b = torch.rand(8, 8) + 0.5, torch.rand(8, 8) + 0.5
            x, y = a.to("mybackend"), b.to("mybackend")
            results[name] = compare(partial(function, x, y), partial(function, a, b), 300, rounds)
    return results


def large_operator(rounds: int) -> dict[str, tuple[float, float, float]]:
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


def training_step(rounds: int) -> dict[str, tuple[float, float, float]]:
    layers, heads, width, context, batch = demo.SIZES["small"]
    steps = []
    for device in ("mybackend", "cpu"):
        torch.manual_seed(0)
        model = demo.Transformer(100, layers, heads, width, context, 0.1).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        tokens = torch.randint(0, 100, (batch, context + 1)).to(device)

        def step(model=model, optimizer=optimizer, tokens=tokens) -> None:
            loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            optimizer.step()

        steps.append(step)
    return {"demo model (small)": compare(steps[0], steps[1], 1, rounds)}


def show(title: str, results: dict[str, tuple[float, float, float]], unit: str, scale: float) -> None:
    print(f"\n{title}\n{'':<24}{'mybackend':>12}{'CPU':>12}{'ratio':>9}")
    for name, (ours, theirs, ratio) in results.items():
        print(f"{name:<24}{ours * scale:>9.2f} {unit:<2}{theirs * scale:>9.2f} {unit:<2}{ratio:>9.3f}")
    if len(results) > 1:
        print(f"{'median':<24}{'':>24}{statistics.median(r for _, _, r in results.values()):>9.3f}")


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
        "typed kernels, 8x8": small_operators(TYPED, rounds),
        "boxed fallback, 8x8": small_operators(BOXED, rounds),
        "64 MB operands": large_operator(max(11, rounds // 3)),
        "training step": training_step(max(7, rounds // 4)),
    }
    for title, results in tables.items():
        big = title in ("64 MB operands", "training step")
        show(title, results, "ms" if big else "µs", 1e3 if big else 1e6)
    if options.json:
        options.json.write_text(json.dumps(tables, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
