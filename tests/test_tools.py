"""The layer check can fail; the command line; the installed package."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mybackend

ROOT = Path(__file__).resolve().parent.parent
CHECK = ROOT / "scripts" / "check_layers.py"


def check(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(CHECK), "--root", str(root), *options], capture_output=True, text=True)


def test_the_layers_are_clean() -> None:
    done = check(ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("file", "line", "message"),
    [
        ("core/tracker.cpp", '#include "torch/context.h"', "core may not include torch"),
        ("base/units.h", '#include "driver/driver.h"', "base may not include driver"),
        ("core/caching/block.h", "#include <ATen/ATen.h>", "may not include <ATen/ATen.h>"),
        ("driver/sim/sim_stream.h", "#include <cuda_runtime.h>", "may not include <cuda_runtime.h>"),
        ("core/tracker.h", '#include "core/nowhere.h"', "does not exist"),
    ],
)
def test_a_planted_violation_is_found(tmp_path: Path, file: str, line: str, message: str) -> None:
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    path = tmp_path / "csrc" / file
    path.write_text(line + "\n" + path.read_text())
    done = check(tmp_path, "--no-libraries")
    assert done.returncode == 1 and message in done.stdout


def test_a_planted_library_is_found(tmp_path: Path) -> None:
    (tmp_path / "csrc").mkdir()
    (tmp_path / "mybackend").mkdir()
    source = tmp_path / "planted.cpp"
    source.write_text(
        'extern "C" int foreign_function() { return 1; }\nextern "C" void Py_Initialize(); void f() { Py_Initialize(); }\n'
    )
    subprocess.run(
        ["c++", "-shared", "-fPIC", str(source), "-o", str(tmp_path / "mybackend" / "libmybackend_core.so")], check=True
    )
    done = check(tmp_path)
    assert done.returncode == 1
    assert "foreign_function" in done.stdout and "Py_Initialize" in done.stdout


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "mybackend", *arguments], capture_output=True, text=True)


def test_command_line() -> None:
    done = run("info")
    assert done.returncode == 0, done.stderr
    for word in (mybackend.__version__, "driver", "sim", "device 0", "max_split_size_mb", "from default"):
        assert word in done.stdout
    info = json.loads(run("info", "--json").stdout)
    assert info["settings"]["backend"] == {"value": "caching", "from": "default"}
    assert "blocks of at least this size" in run("config", "max_split_size_mb").stdout
    assert "| `backend` |" in run("config").stdout
    bad = run("config", "--check", "max_split_size_mb:1")
    assert bad.returncode == 2 and "below large_segment_size_mb" in bad.stderr
    assert run("config", "--check", "max_split_size_mb:64").stdout.strip() == "ok"
    assert run("config", "nonsense").returncode == 2
    assert run().returncode == 2 and "info" in run("--help").stdout


def test_public_headers_compile_alone(tmp_path: Path) -> None:
    """A C++ program that uses the public headers and the library, and neither torch nor Python."""
    source = tmp_path / "program.cpp"
    source.write_text(
        """
        #include <mybackend/aligned_bytes.h>
        #include <mybackend/cpu_pool.h>
        #include <mybackend/mybackend.h>
        #include <cstdio>
        #include <thread>
        #include <vector>
        using namespace mybackend;
        static void* nothing(std::size_t) { return nullptr; }
        int main() {
          auto block = allocate_aligned_bytes(1024);
          auto gpu = allocate_aligned_bytes(64 << 20, Device::GPU);
          if (reinterpret_cast<std::uintptr_t>(block.get()) % kCpuAlignment != 0) return 1;
          if (allocate_aligned_bytes(0)) return 2;
          if (aligned_bytes_tracker(Device::CPU).stats().current_bytes != 1024) return 3;
          std::vector<std::thread> threads;
          for (int i = 0; i < 4; ++i) threads.emplace_back([] { for (int j = 0; j < 1000; ++j) { auto a = allocate_aligned_bytes(100 * j + 1); } });
          for (auto& t : threads) t.join();
          std::thread([moved = std::move(block)]() mutable { moved.reset(); }).join();  // the pool of an exiting thread
          if (aligned_bytes_tracker(Device::CPU).stats().current_bytes != 0) return 4;
          // A block freed by a thread_local destructor, after the thread's pool is gone.
          std::thread([] { thread_local std::shared_ptr<std::byte[]> late; allocate_aligned_bytes(10); late = allocate_aligned_bytes(300); }).join();
          if (aligned_bytes_tracker(Device::CPU).stats().current_bytes != 0) return 5;
          cpu_pool::trim();
          cpu_pool::set_system_allocate_for_testing(&nothing);
          try { allocate_aligned_bytes(500); return 6; }
          catch (const OutOfMemory& e) { if (e.requested_bytes != 500 || e.live_bytes != 0 || e.peak_bytes < 1024) return 7; }
          cpu_pool::set_system_allocate_for_testing(nullptr);
          if (aligned_bytes_tracker(Device::CPU).stats().current_bytes != 0) return 8;
          std::puts(mybackend_version());
        }
        """
    )
    library = Path(mybackend.library_path())
    program = tmp_path / "program"
    subprocess.run(
        [
            "c++",
            "-std=c++20",
            "-O1",
            f"-I{mybackend.include_path()}",
            str(source),
            "-o",
            str(program),
            f"-L{library.parent}",
            "-lmybackend_core",
            f"-Wl,-rpath,{library.parent}",
            "-pthread",
        ],
        check=True,
    )
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == mybackend.__version__


def test_the_readme_lists_the_keys_as_they_are() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "readme.py"), "--check"])
    assert done.returncode == 0, "run scripts/readme.py"
