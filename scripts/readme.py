"""Renews the generated parts of README.md: the table of configuration keys, what passes of PyTorch's
own tests (from conformance.json), and, given the results of `bench_ops.py --json FILE`, the performance
table.

usage: readme.py [--bench FILE --machine "in words"] [--check]
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"
CONFORMANCE = README.parent / "conformance.json"
sys.path.insert(0, str(README.parent / "scripts"))
from conformance_table import table  # noqa: E402


def replace(text: str, name: str, content: str) -> str:
    """Puts `content` between the markers of part `name`."""
    pattern = re.compile(rf"(<!-- begin: {name} -->\n).*?(<!-- end: {name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"README.md has no part '{name}'")
    return pattern.sub(lambda match: match.group(1) + content.rstrip() + "\n" + match.group(2), text)


def performance(tables: dict, machine: str) -> str:
    """The table of ratios; `tables` is what bench_ops.py wrote."""
    rows = [f"Measured by `scripts/bench_ops.py` on {machine}; medians, both sides in one run.", "",
            "| what | mybackend | CPU | ratio |", "|---|---|---|---|"]  # fmt: skip
    small = tables["operators, 8x8"]
    for name in ("add", "softmax", "layer_norm", "conv2d"):
        ours, theirs, ratio = small[name]
        rows.append(f"| `{name}`, 8×8 | {ours * 1e6:.2f} µs | {theirs * 1e6:.2f} µs | {ratio:.2f} |")
    ratios = [ratio for _, _, ratio in small.values()]
    rows.append(
        f"| median of {len(ratios)} operators, 8×8 | | | **{statistics.median(ratios):.2f}** (worst {max(ratios):.2f}) |"
    )
    for title, unit in (("64 MB operands", "64 MB operands"), ("training steps", "training step")):
        for name, (ours, theirs, ratio) in tables[title].items():
            rows.append(f"| `{name}`, {unit} | {ours * 1e3:.1f} ms | {theirs * 1e3:.1f} ms | **{ratio:.3f}** |")
    return "\n".join(rows)


def conformance(report: dict) -> str:
    """The table of groups; `report` is what conformance.py wrote."""
    groups = report["groups"]
    cpu = sum(entry["cpu"]["passed"] for entry in groups.values())
    excluded = sum(entry["mybackend"]["excluded"] for entry in groups.values())
    rows = [
        f"Of {cpu:,} cases of `op_db`, `module_db` and `optim_db` that pass on the CPU (torch {report['torch']}), "
        f"**{100 * report['passed_of_cpu']:.2f} %** pass on the device; each of the {excluded} excluded ones is named in "
        "`tests/pytorch/exclusions.py` with its reason.",
        "",
        *table(report),
    ]
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", type=Path, help="the JSON that bench_ops.py wrote")
    parser.add_argument("--machine", default="", help="the machine, in words")
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit with 1 when README.md is not current"
    )
    options = parser.parse_args()
    from mybackend import config

    old = README.read_text()
    new = replace(old, "configuration", config.table())
    new = replace(new, "conformance", conformance(json.loads(CONFORMANCE.read_text())))
    if options.bench:
        if not options.machine:
            parser.error("--bench needs --machine")
        new = replace(new, "performance", performance(json.loads(options.bench.read_text()), options.machine))
    if options.check:
        return int(new != old)
    README.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
