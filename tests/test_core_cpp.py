"""The torch-free core, driven from C++ (tests/cpp): fuzzed with faults, and from threads."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import mybackend

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def stress(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("cpp") / "stress_core"
    library = Path(mybackend.library_path())
    subprocess.run(
        ["c++", "-std=c++20", "-O1", f"-I{ROOT / 'csrc'}", str(ROOT / "tests/cpp/stress_core.cpp"), "-o", str(program),
         f"-L{library.parent}", "-lmybackend_core", f"-Wl,-rpath,{library.parent}", "-pthread"],
        check=True,
    )  # fmt: skip
    return program


@pytest.mark.parametrize("seed", range(1, 5))
def test_random_operations_with_faults(stress: Path, seed: int) -> None:
    done = subprocess.run([str(stress), "30000", str(seed)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout.strip() == "ok", done.stderr
