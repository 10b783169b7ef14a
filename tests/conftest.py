"""Fixtures for all tests: nothing may stay allocated, and the allocator's state must be sound."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator

import pytest

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the device's memory is the host's here, also where a GPU is

import torch

import mybackend

DEVICE = "mybackend"


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test the live bytes are what they were before, and the invariants hold."""
    gc.collect()
    before = torch.mybackend.tracker_stats()["current_bytes"]
    yield
    gc.collect()
    if getattr(request.node, "rep_call_failed", False):
        return  # the failure's traceback keeps tensors alive
    # Autograd's thread for the device lets go of the last node a moment after backward() has returned.
    for _ in range(200):
        if torch.mybackend.tracker_stats()["current_bytes"] == before:
            break
        time.sleep(0.01)
    assert torch.mybackend.tracker_stats()["current_bytes"] == before, "device memory stayed allocated"
    mybackend.memory.check_invariants()


def pytest_collection_finish() -> None:
    """What was imported stays: the collections around each test need not look at it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):  # type: ignore[no-untyped-def]
    outcome = yield
    if call.when == "call":
        item.rep_call_failed = outcome.get_result().failed


@pytest.fixture
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a piece of Python in a process of its own, with the given environment variables."""

    def run(code: str, expect: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
        import os

        env = {k: v for k, v in os.environ.items() if not k.startswith(("MYBACKEND_", "PYTORCH_"))} | environment
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == expect, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run
