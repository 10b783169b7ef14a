"""PyTorch's operators, modules and optimizers (op_db, module_db, optim_db) on the device, beside the
same tests on the CPU: every group in tests/pytorch, with every dtype and every sample input.

Runs in shards and is resumable: a shard that has run is not run again until --restart. Prints a table
(passed, failed, skipped by PyTorch or without a sample that the CPU can run, excluded in
tests/pytorch/exclusions.py) and writes it, with the names of what does not pass, as JSON.

Exits with 1 when a case fails, or when less than 99.5 % over all groups, or 99 % of one, passes of
what passes on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from conformance_table import OUTCOMES, table  # noqa: E402

from tests.pytorch.harness import GROUPS  # noqa: E402

DEVICES = {"cpu": "cpu", "mybackend": "privateuse1"}
# Groups of many dtypes are cut into several shards.
SHARDS = {"forward": 8, "backward": 8, "out": 4, "inplace": 2, "reference": 2, "module": 2}


def run_shard(device: str, group: str, number: int, count: int, workers: int) -> dict[str, str]:
    """Outcomes by test name (without its device)."""
    environment = dict(os.environ)
    environment["MYBACKEND_CONFORMANCE"] = "full"
    environment["MYBACKEND_CONFORMANCE_DEVICE"] = DEVICES[device]
    environment["MYBACKEND_CONFORMANCE_GROUP"] = group
    environment["MYBACKEND_CONFORMANCE_SHARD"] = f"{number}/{count}"
    environment.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "tests/pytorch", "-q", "-n", str(workers), "--dist", "worksteal"]
        command += ["-p", "no:cacheprovider", "-W", "ignore", "--tb=short", f"--junitxml={report}"]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if done.returncode not in (0, 1) or not report.exists():
            raise SystemExit(f"{group} on {device}: pytest ended with {done.returncode}\n{done.stdout[-3000:]}")
        outcomes: dict[str, str] = {}
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            name = re.sub(r"_(cpu|mybackend|privateuse1)(?=_|$)", "", case.get("name", ""))
            outcome = "passed"
            for child in case:
                if child.tag in ("failure", "error"):
                    outcome = "failed"
                elif child.tag == "skipped" and outcome == "passed":
                    outcome = "excluded" if "excluded:" in child.get("message", "") else "skipped"
            if outcomes.get(name) != "failed":
                outcomes[name] = outcome
        return outcomes


def counted(outcomes: dict[str, str]) -> dict[str, int]:
    return {kind: sum(outcome == kind for outcome in outcomes.values()) for kind in OUTCOMES}


def summary(results: dict[str, dict[str, dict[str, str]]]) -> dict[str, object]:
    groups: dict[str, object] = {}
    passed_cpu = passed_both = 0
    for group, by_device in results.items():
        cpu, ours = by_device["cpu"], by_device["mybackend"]
        wanted = [name for name, outcome in cpu.items() if outcome == "passed"]
        # (What PyTorch has no case of on the CPU, capturable optimizers, is not among what is wanted.)
        got = [name for name in wanted if ours.get(name) == "passed"]
        passed_cpu += len(wanted)
        passed_both += len(got)
        groups[group] = {
            "cpu": counted(cpu),
            "mybackend": counted(ours),
            "passed_of_cpu": len(got) / max(1, len(wanted)),
            "not_passed": {name: ours.get(name, "missing") for name in sorted(set(wanted) - set(got))},
        }
    return {"torch": torch.__version__, "passed_of_cpu": passed_both / max(1, passed_cpu), "groups": groups}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", help=f"default: all of {', '.join(GROUPS)}")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="test processes (default: the CPUs)")
    parser.add_argument("--restart", action="store_true", help="forget the shards of these groups that have run")
    parser.add_argument("--output", type=Path, default=ROOT / "conformance.json", help="default: conformance.json")
    options = parser.parse_args()
    if unknown := [group for group in options.groups if group not in GROUPS]:
        parser.error(f"no such group: {', '.join(unknown)}")
    chosen = options.groups or list(GROUPS)
    folder = ROOT / "build" / "conformance" / torch.__version__
    shards = [(g, d, n, SHARDS.get(g, 1)) for g in chosen for d in DEVICES for n in range(SHARDS.get(g, 1))]
    if options.restart:
        for group in chosen:
            for device in DEVICES:
                shutil.rmtree(folder / device / group, ignore_errors=True)
    results: dict[str, dict[str, dict[str, str]]] = {group: {device: {} for device in DEVICES} for group in chosen}
    for done, (group, device, number, count) in enumerate(shards, 1):
        file = folder / device / group / f"{number}-of-{count}.json"
        begin = time.monotonic()
        ran = not file.exists()
        if ran:
            outcomes = run_shard(device, group, number, count, options.workers)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.with_suffix(".part").write_text(json.dumps(outcomes))
            file.with_suffix(".part").rename(file)
        outcomes = json.loads(file.read_text())
        results[group][device] |= outcomes
        counts = ", ".join(f"{value} {kind}" for kind, value in counted(outcomes).items())
        took = f"{time.monotonic() - begin:.0f} s" if ran else "ran before"
        print(
            f"[{done}/{len(shards)}] {group} on {device}, part {number + 1} of {count}: {counts} ({took})", flush=True
        )
    report = summary(results)
    print("\n" + "\n".join(table(report)))
    for group, entry in report["groups"].items():  # type: ignore[attr-defined]
        for name, outcome in entry["not_passed"].items():
            print(f"{group}: {name}: {outcome}")
    if not options.groups:
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    entries = report["groups"].values()  # type: ignore[attr-defined]
    failed = any(entry["mybackend"]["failed"] for entry in entries)
    too_few = not options.groups and report["passed_of_cpu"] < 0.995  # type: ignore[operator]
    return 1 if failed or too_few or any(entry["passed_of_cpu"] < 0.99 for entry in entries) else 0


if __name__ == "__main__":
    sys.exit(main())
