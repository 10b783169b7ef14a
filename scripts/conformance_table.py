"""The table of a conformance.json."""

from __future__ import annotations

OUTCOMES = ("passed", "failed", "skipped", "excluded")


def table(report: dict) -> list[str]:
    lines = ["| group | passed | on the CPU | ratio | failed | skipped | excluded |", "|---|---|---|---|---|---|---|"]
    for group, entry in report["groups"].items():
        ours = entry["mybackend"]
        numbers = f"{ours['passed']:,} | {entry['cpu']['passed']:,} | {100 * entry['passed_of_cpu']:.2f} %"
        lines.append(f"| {group} | {numbers} | {ours['failed']} | {ours['skipped']} | {ours['excluded']} |")
    total = {kind: sum(entry["mybackend"][kind] for entry in report["groups"].values()) for kind in OUTCOMES}
    cpu = sum(entry["cpu"]["passed"] for entry in report["groups"].values())
    numbers = f"{total['passed']:,} | {cpu:,} | {100 * report['passed_of_cpu']:.2f} %"
    lines.append(f"| **all** | {numbers} | {total['failed']} | {total['skipped']} | {total['excluded']} |")
    return lines
