"""Device tensors between processes: torch.multiprocessing, both sharing strategies, no copy."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

STRATEGIES = ["file_descriptor", "file_system"]
METHODS = ["fork", "spawn", "forkserver"]


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> Iterator[str]:
    before = mp.get_sharing_strategy()
    mp.set_sharing_strategy(request.param)
    yield request.param
    gc.collect()
    mp.set_sharing_strategy(before)


def shared_files() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("torch_")}


def run_and_look(script: Path, *arguments: str) -> None:
    """Runs the script; the names that it and its children made must go. torch's manager process
    removes some of them a moment later."""
    process = subprocess.Popen([sys.executable, str(script), *arguments], start_new_session=True)
    assert process.wait(300) == 0
    ids = f"torch_{process.pid}_"
    for _ in range(200):
        left = {name for name in shared_files() if name.startswith(ids)}
        if not left:
            return
        time.sleep(0.05)
    raise AssertionError(f"left in /dev/shm: {left}")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def answer(strategy: str, inbox, outbox) -> None:  # type: ignore[no-untyped-def]
    mp.set_sharing_strategy(strategy)
    x, view, empty, parameter, half = inbox.get()
    outbox.put(
        {
            "device": str(x.device),
            "sum": x.sum().item(),
            "view": (view.storage_offset(), view.stride(), view.tolist()),
            "one_storage": x.untyped_storage()._cdata == view.untyped_storage()._cdata,
            "empty": tuple(empty.shape),
            "parameter": (type(parameter).__name__, parameter.requires_grad),
            "half": half.dtype == torch.float16 and half.sum().item() == 10,
            "shared": x.is_shared() and view.is_shared(),
        }
    )
    inbox.get()
    x.fill_(5.0)
    outbox.put("written")
    inbox.get()


@pytest.mark.parametrize("method", METHODS)
def test_tensors_through_queues(strategy: str, method: str) -> None:
    context = mp.get_context(method)
    inbox, outbox = context.Queue(), context.Queue()
    x = torch.arange(12.0, device="mybackend").reshape(3, 4)
    assert not x.is_shared()
    sent = (
        x,
        x[1:, ::2],
        torch.empty(0, 3, device="mybackend"),
        torch.nn.Parameter(torch.ones(2, device="mybackend")),
        torch.ones(10, dtype=torch.float16, device="mybackend"),
    )
    process = context.Process(target=answer, args=(strategy, inbox, outbox))
    process.start()
    inbox.put(sent)
    got = outbox.get(timeout=120)
    assert got == {
        "device": "mybackend:0",
        "sum": 66.0,
        "view": (4, (4, 2), [[4, 6], [8, 10]]),
        "one_storage": True,
        "empty": (0, 3),
        "parameter": ("Parameter", True),
        "half": True,
        "shared": True,
    }
    assert x.is_shared() and sent[1].is_shared()  # it moved there
    inbox.put("write")
    assert outbox.get(timeout=120) == "written"
    assert x.sum().item() == 60 and sent[1].tolist() == [[5, 5], [5, 5]]  # the same bytes
    inbox.put("end")
    process.join(60)
    assert process.exitcode == 0


def test_share_memory() -> None:
    x = torch.arange(1000.0, device="mybackend")
    view, pointer, live = x[10:], x.data_ptr(), torch.mybackend.memory_allocated()
    assert x.share_memory_() is x and x.is_shared() and view.is_shared() and x.data_ptr() != pointer
    assert torch.mybackend.memory_allocated() < live  # the device's block is free again
    assert view.data_ptr() == x.data_ptr() + 40 and view[0].item() == 10
    pointer = x.data_ptr()
    x.share_memory_()
    assert x.data_ptr() == pointer
    model = torch.nn.Linear(3, 2).to("mybackend")
    model.share_memory()
    assert all(p.is_shared() for p in model.parameters())
    assert not torch.ones(1, device="mybackend").is_shared()
    assert torch.empty(0, device="mybackend").share_memory_().numel() == 0
    assert torch.ones(3).share_memory_().is_shared()  # the CPU's as ever


HOGWILD = """
import sys, torch, torch.multiprocessing as mp

def train(model, steps):
    torch.set_num_threads(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(steps):
        x = torch.randn(16, 4, device="mybackend")
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()

if __name__ == "__main__":
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1).to("mybackend").share_memory()
    x = torch.randn(100, 4, device="mybackend")
    def loss():
        with torch.no_grad(): return (model(x) - x.sum(1, keepdim=True)).square().mean().item()
    before = loss()
    context = mp.get_context(sys.argv[1])
    processes = [context.Process(target=train, args=(model, 150)) for _ in range(2)]
    for process in processes: process.start()
    for process in processes: process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert loss() < 0.01 * before, (loss(), before)
"""


@pytest.mark.parametrize("method", METHODS)
def test_hogwild(method: str, tmp_path: Path) -> None:
    script = tmp_path / "hogwild.py"  # a process of its own: after a backward, a forked child cannot have another
    script.write_text(HOGWILD)
    subprocess.run([sys.executable, str(script), method], check=True, timeout=300)


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_pools_and_pipes(strategy: str) -> None:
    context = mp.get_context("fork")
    torch.set_num_threads(1)
    with context.Pool(2) as pool:
        results = pool.map(double, [torch.full((3,), float(i), device="mybackend") for i in range(5)])
    assert [r.tolist() for r in results] == [[2.0 * i] * 3 for i in range(5)]
    assert all(r.device.type == "mybackend" for r in results)


def echo(strategy: str, inbox, outbox, count: int) -> None:  # type: ignore[no-untyped-def]
    mp.set_sharing_strategy(strategy)
    for _ in range(count):
        outbox.put(inbox.get() + 1)
    inbox.get()


def test_nothing_leaks(strategy: str) -> None:
    context = mp.get_context("fork")
    inbox, outbox = context.SimpleQueue(), context.SimpleQueue()
    count = 1000
    process = context.Process(target=echo, args=(strategy, inbox, outbox, count))
    process.start()
    for i in range(count):
        inbox.put(torch.full((100,), float(i), device="mybackend"))
        assert outbox.get()[0].item() == i + 1
        if i == 20:
            gc.collect()
            start, files = descriptors(), len(shared_files())
    gc.collect()
    assert descriptors() <= start + 4 and len(shared_files()) <= files + 4
    inbox.put(None)
    process.join(60)
    assert process.exitcode == 0


RECEIVER_DIES = """
import os, signal, sys, torch, torch.multiprocessing as mp

def receive_and_die(inbox):
    assert inbox.get().numel() > 0
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    mp.set_sharing_strategy(sys.argv[1])
    context = mp.get_context("fork")
    inbox = context.SimpleQueue()
    process = context.Process(target=receive_and_die, args=(inbox,)); process.start()
    x = torch.arange(100_000.0, device="mybackend")
    inbox.put(x)
    process.join()
    assert process.exitcode == -signal.SIGKILL and x[-1].item() == 99_999
"""


def test_the_receiver_dies(tmp_path: Path) -> None:
    script = tmp_path / "dies.py"
    script.write_text(RECEIVER_DIES)
    for name in STRATEGIES:
        run_and_look(script, name)


def send_and_die(outbox, barrier) -> None:  # type: ignore[no-untyped-def]
    outbox.put(torch.arange(1000.0, device="mybackend"))
    barrier.wait(60)
    os.kill(os.getpid(), signal.SIGKILL)


def test_strategies_may_change(strategy: str) -> None:
    other = next(s for s in STRATEGIES if s != strategy)
    x = torch.arange(1000.0, device="mybackend").share_memory_()
    view = x[10:]
    mp.set_sharing_strategy(other)
    context = mp.get_context("fork")
    inbox, outbox = context.SimpleQueue(), context.SimpleQueue()
    process = context.Process(target=echo, args=(other, inbox, outbox, 1))
    process.start()
    inbox.put(x)
    assert outbox.get().sum().item() == 499_500 + 1000
    inbox.put(None)
    process.join(60)
    x[10] = -5
    assert view[0].item() == -5 and x.is_shared() and view.data_ptr() == x.data_ptr() + 40


def test_the_sender_dies(strategy: str) -> None:
    context = mp.get_context("fork")
    outbox, barrier = context.SimpleQueue(), context.Barrier(2)
    process = context.Process(target=send_and_die, args=(outbox, barrier))
    process.start()
    x = outbox.get()
    barrier.wait(60)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert x.sum().item() == 499_500  # it lives on here


def test_shared_memory_is_empty_afterwards(tmp_path: Path) -> None:
    script = tmp_path / "send.py"
    script.write_text(
        """
import sys, torch, torch.multiprocessing as mp
def child(q, r):
    mp.set_sharing_strategy(sys.argv[1]); r.put(q.get() + 1); q.get()
if __name__ == "__main__":
    mp.set_sharing_strategy(sys.argv[1])
    q, r = mp.get_context("spawn").Queue(), mp.get_context("spawn").Queue()
    p = mp.get_context("spawn").Process(target=child, args=(q, r)); p.start()
    q.put(torch.ones(1000, device="mybackend")); assert r.get().sum().item() == 2000
    q.put(None); p.join()
"""
    )
    for strategy in STRATEGIES:
        run_and_look(script, strategy)


def test_a_mapped_tensor_goes_too(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"x": torch.arange(100.0)}, path)
    x = torch.load(path, mmap=True, map_location="mybackend")["x"]
    context = mp.get_context("fork")
    inbox, outbox = context.SimpleQueue(), context.SimpleQueue()
    process = context.Process(target=echo, args=(mp.get_sharing_strategy(), inbox, outbox, 1))
    process.start()
    inbox.put(x)
    assert outbox.get().sum().item() == 4950 + 100
    inbox.put(None)
    process.join(60)
    assert x.is_shared() and x.sum().item() == 4950


def test_what_is_full_says_so(run_python) -> None:
    run_python(
        """
        import os, resource, signal, torch, torch.multiprocessing as mp
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        x = torch.ones(1 << 20, device="mybackend")
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
        for strategy in ("file_descriptor", "file_system"):
            mp.set_sharing_strategy(strategy)
            before = len(os.listdir("/proc/self/fd"))
            try:
                x.share_memory_()
                raise SystemExit("no error")
            except torch.OutOfMemoryError as error:
                assert "/dev/shm has" in str(error), error
            after = len(os.listdir("/proc/self/fd"))
            # (file_system: torch's manager process was started, with a connection to it)
            assert after == before if strategy == "file_descriptor" else after <= before + 1, (before, after)
            assert not [name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")]
        assert not x.is_shared() and x.sum().item() == 1 << 20
        """
    )
