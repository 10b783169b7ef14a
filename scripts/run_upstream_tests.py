"""Runs test files of a PyTorch checkout on the CPU and on this device, with the installed torch, and
prints how many pass on each, file by file, and which tests pass on the CPU only.

    python scripts/run_upstream_tests.py --pytorch PATH [FILE ...]

FILE is relative to PATH/test. The device is reached through the environment that PyTorch provides
(PYTORCH_TESTING_DEVICE_ONLY_FOR); nothing in the checkout is changed. Exits with 1 when a test passes
on the CPU and fails on the device, and upstream/exclusions.py does not say why.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

DEFAULT_FILES = (
    "test_view_ops.py",
    "test_indexing.py",
    "test_type_promotion.py",
    "test_shape_ops.py",
    "test_torch.py",
    "test_serialization.py",
)
DEVICES = ("cpu", "mybackend")
PLUGINS = Path(__file__).resolve().parent / "upstream"
sys.path.insert(0, str(PLUGINS))
from exclusions import EXCLUSIONS  # noqa: E402


def common_name(name: str) -> str:
    """A test's name without its device: test_add_cpu_float32 -> test_add_float32."""
    return re.sub(r"_?(cpu|mybackend|privateuse1)", "", name, flags=re.IGNORECASE)


def reason_for(file: str, name: str) -> str | None:
    known = EXCLUSIONS.get(Path(file).name, {})
    return next((reason for pattern, reason in known.items() if fnmatch.fnmatchcase(name, pattern)), None)


def run_file(tests: Path, file: str, device: str, workers: int, timeout: int) -> dict[str, str]:
    """Outcomes by test: passed, failed, skipped. A test that takes the process down has failed."""
    environment = dict(os.environ)
    environment["PYTORCH_TESTING_DEVICE_ONLY_FOR"] = device
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment["MYBACKEND_AUTOLOAD"] = "1"
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PLUGINS), environment.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--noconftest",
            "-p",
            "upstream_compat",
            "-p",
            "no:cacheprovider",
            "-W",
            "ignore",
        ]
        command += ["-n", str(workers), "--dist", "worksteal", "--maxfail=100000", f"--junitxml={report}"]
        command += ["--rootdir", str(tests), "-c", "/dev/null", file]
        try:
            done = subprocess.run(
                command,
                cwd=tests,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=timeout,
            )
            output = done.stdout
        except subprocess.TimeoutExpired as expired:
            output = f"no end within {timeout} s\n{expired.output or ''}"
        if not report.exists():
            raise SystemExit(f"{file} on {device}: pytest wrote no report\n{output[-3000:]}")
        if done_nothing := re.search(r"ERROR collecting.*?\nE +(.+)", output, flags=re.DOTALL):
            raise SystemExit(f"{file} on {device}: cannot be imported: {done_nothing.group(1).splitlines()[0]}")
        outcomes: dict[str, str] = {}
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            kinds = {child.tag for child in case}
            outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
            name = common_name(f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}")
            if outcomes.get(name) != "failed":
                outcomes[name] = outcome
        return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pytorch", type=Path, required=True, help="a checkout of PyTorch, with its test folder")
    parser.add_argument("files", nargs="*", default=list(DEFAULT_FILES), help=f"default: {' '.join(DEFAULT_FILES)}")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="test processes (default: the CPUs)")
    parser.add_argument("--timeout", type=int, default=3600, help="seconds for one file on one device (default 3600)")
    parser.add_argument("--output", type=Path, help="where to write every outcome, as JSON")
    options = parser.parse_args()
    tests = options.pytorch.resolve() / "test"
    if not tests.is_dir():
        parser.error(f"{options.pytorch} has no folder named test")
    missing = [file for file in options.files if not (tests / file).is_file()]
    if missing:
        parser.error(f"not in {tests}: {', '.join(missing)}")

    results: dict[str, dict[str, dict[str, str]]] = {}
    lost: list[str] = []
    excluded: list[str] = []
    print(f"{'file':28} {'':10} {'passed':>7} {'failed':>7} {'skipped':>7}   lost and excluded", flush=True)
    for file in options.files:
        results[file] = {}
        for device in DEVICES:
            outcomes = results[file][device] = run_file(tests, file, device, options.workers, options.timeout)
            counts = [sum(outcome == kind for outcome in outcomes.values()) for kind in ("passed", "failed", "skipped")]
            last = ""
            if device != "cpu":
                cpu = results[file]["cpu"]
                only_cpu = sorted(
                    n for n, outcome in cpu.items() if outcome == "passed" and outcomes.get(n) == "failed"
                )
                reasons = {name: reason_for(file, name) for name in only_cpu}
                lost += [f"{file}: {name}" for name, reason in reasons.items() if reason is None]
                excluded += [f"{file}: {name} ({reason})" for name, reason in reasons.items() if reason is not None]
                last = f"{sum(r is None for r in reasons.values())} and {sum(r is not None for r in reasons.values())}"
            print(f"{file:28} {device:10} {counts[0]:7} {counts[1]:7} {counts[2]:7}   {last}", flush=True)
    if options.output is not None:
        options.output.write_text(json.dumps(results, indent=1))
    for line in excluded:
        print(f"excluded: {line}")
    for line in lost:
        print(f"lost: {line}")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
