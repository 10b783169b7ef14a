"""mybackend.cpu as the allocator of ordinary CPU tensors."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Iterator

import pytest
import torch

from mybackend import config, cpu

MIB = 1 << 20


@pytest.fixture
def installed() -> Iterator[None]:
    gc.collect()
    cpu.trim()
    before = cpu.memory_stats()["live_bytes"]
    with cpu.installed():
        yield
    gc.collect()
    assert cpu.memory_stats()["live_bytes"] == before, "pooled CPU memory stayed allocated"
    cpu.trim()
    config.reset()


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_install_and_uninstall() -> None:
    assert not cpu.is_installed()
    before = torch.arange(1000.0)
    cpu.install()
    cpu.install()  # once is enough
    try:
        live = cpu.memory_stats()["live_bytes"]
        inside = torch.arange(1000.0)
        large = torch.ones(3 * MIB)
        assert cpu.memory_stats()["live_bytes"] == live + 4096 + 12 * MIB
        with cpu.installed():
            assert cpu.is_installed()
    finally:
        cpu.uninstall()
    cpu.uninstall()
    assert not cpu.is_installed()
    outside = torch.arange(1000.0)
    assert torch.equal(before, inside) and torch.equal(inside, outside) and large.sum().item() == 3 * MIB
    live = cpu.memory_stats()["live_bytes"]
    del inside, large  # freed by whoever made them
    gc.collect()
    assert cpu.memory_stats()["live_bytes"] == live - 4096 - 12 * MIB
    del before, outside
    gc.collect()
    assert cpu.memory_stats()["live_bytes"] == live - 4096 - 12 * MIB


def test_the_environment_installs_it(run_python) -> None:
    code = """
        import torch, mybackend
        assert mybackend.cpu.is_installed() == {expected}
        x = torch.ones(10 << 20); assert (mybackend.cpu.memory_stats()["live_bytes"] >= 40 << 20) == {expected}
    """
    run_python(code.format(expected=True), MYBACKEND_CPU_ALLOCATOR="1")
    run_python(code.format(expected=False), MYBACKEND_CPU_ALLOCATOR="0")
    run_python(code.format(expected=False))


def test_large_blocks_are_reused(installed: None) -> None:
    x = torch.empty(40 * MIB, dtype=torch.uint8)
    pointer = x.data_ptr()
    assert pointer % 64 == 0
    before = cpu.memory_stats()
    del x
    assert cpu.memory_stats()["large"]["cached_bytes"] == before["large"]["cached_bytes"] + 40 * MIB
    y = torch.empty(39 * MIB, dtype=torch.uint8)  # the same class
    assert y.data_ptr() == pointer
    after = cpu.memory_stats()
    assert after["hits"] == before["hits"] + 1 and after["misses"] == before["misses"]


def test_classes_waste_at_most_an_eighth(installed: None) -> None:
    generator = random.Random(1)
    for _ in range(300):
        size = generator.randint(4 * MIB + 1, 300 * MIB)
        live = cpu.memory_stats()["live_bytes"]
        x = torch.empty(size, dtype=torch.uint8)
        assert size <= cpu.memory_stats()["live_bytes"] - live <= 1.125 * size + 4096
        del x


def test_the_bound_evicts_the_least_recently_used(installed: None) -> None:
    config.set("cpu_max_cached_mb:64")
    blocks = [torch.empty(size * MIB, dtype=torch.uint8) for size in (20, 24, 28)]
    pointers = [block.data_ptr() for block in blocks]
    evictions = cpu.memory_stats()["evictions"]
    while blocks:
        blocks.pop(0)
    stats = cpu.memory_stats()
    assert stats["evictions"] == evictions + 1 and stats["large"]["cached_bytes"] == 52 * MIB
    assert torch.empty(28 * MIB, dtype=torch.uint8).data_ptr() == pointers[2]
    config.set("cpu_max_cached_mb:0")
    assert cpu.memory_stats()["large"]["cached_bytes"] == 0


def test_decay(installed: None) -> None:
    config.set("cpu_decay_ms:1")
    x = torch.empty(8 * MIB, dtype=torch.uint8)
    del x
    done = threading.Event()
    done.wait(0.01)  # only a lower bound: it may take longer, never shorter
    y = torch.empty(64 * MIB, dtype=torch.uint8)  # another class: its allocation notices
    assert cpu.memory_stats()["large"]["cached_bytes"] == 0
    del y


def test_resident_memory_stays_near_what_is_live(installed: None) -> None:
    config.set("cpu_max_cached_mb:128")
    start = resident_bytes()
    generator = random.Random(2)
    alive: list[torch.Tensor] = []
    peak = most = 0
    for _ in range(250):
        alive.append(torch.empty(int(2 ** generator.uniform(20, 27.5)), dtype=torch.uint8).fill_(1))
        if len(alive) > 8:
            alive.pop(generator.randrange(len(alive)))
        peak = max(peak, sum(x.numel() for x in alive))
        most = max(most, resident_bytes() - start)
    assert most <= 1.25 * peak + 128 * MIB + 64 * MIB  # and the thread's pool
    alive.clear()
    cpu.trim()
    assert resident_bytes() - start < 32 * MIB


def test_other_threads_free(installed: None) -> None:
    made: list[torch.Tensor] = []

    def make() -> None:
        made.extend(torch.full((size,), 3.0) for size in (10, 10_000, 3_000_000))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert [x[-1].item() for x in made] == [3.0] * 3
    thread = threading.Thread(target=made.clear)
    thread.start()
    thread.join()


def test_a_thousand_threads_come_and_go(installed: None) -> None:
    def work() -> None:
        x = torch.ones(200_000)
        assert (x + x).sum().item() == 400_000

    def run(count: int) -> None:
        for _ in range(count // 20):
            threads = [threading.Thread(target=work) for _ in range(20)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    run(100)
    cpu.trim()
    start, threads = resident_bytes(), cpu.pool_stats()["threads"]
    run(1000)
    cpu.trim()
    assert cpu.pool_stats()["threads"] <= threads + 3  # threads of the libraries may have joined
    assert resident_bytes() - start < 32 * MIB


def test_out_of_memory_empties_the_caches_first(run_python) -> None:
    run_python(
        """
        import resource, torch, mybackend
        mybackend.cpu.install()
        mybackend.config.set("cpu_max_cached_mb:100000")
        x = torch.ones(1)
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + (600 << 20), resource.RLIM_INFINITY))
        blocks = [torch.empty(100 << 20, dtype=torch.uint8) for _ in range(5)]
        del blocks
        assert mybackend.cpu.memory_stats()["cached_bytes"] >= 500 << 20
        y = torch.empty(550 << 20, dtype=torch.uint8)  # fits only without the cache
        del y
        live = mybackend.cpu.memory_stats()["live_bytes"]
        try:
            torch.empty(5 << 30, dtype=torch.uint8)
            raise SystemExit("no error")
        except torch.OutOfMemoryError as error:
            assert "5368709120 bytes" in str(error), error
        assert mybackend.cpu.memory_stats()["live_bytes"] == live and torch.ones(5).sum().item() == 5
        """
    )


def test_the_profiler_sees_the_memory(installed: None) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        x = torch.empty(10 * MIB, dtype=torch.uint8)
        del x
    sizes = [event.cpu_memory_usage for event in profile.events()]
    assert 10 * MIB in sizes, sizes


def test_training_is_the_same(installed: None) -> None:
    def train() -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3), torch.nn.GELU(), torch.nn.Flatten(), torch.nn.Linear(2048, 10)
        )
        optimizer = torch.optim.AdamW(model.parameters())
        x, y = torch.randn(16, 3, 18, 18), torch.randint(0, 10, (16,))
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    pooled = train()
    cpu.uninstall()
    assert pooled == train()


def test_forked_children(run_python) -> None:
    run_python(
        """
        import os, threading, torch, mybackend
        torch.set_num_threads(1)
        mybackend.cpu.install()
        kept = torch.arange(3e6)
        stop = False
        def churn():
            while not stop:
                a = torch.empty(2_000_000); b = torch.empty(500); a[:5] = 1.0; del a, b
        def check():
            x = torch.full((2_000_000,), 2.0)
            y = torch.full((100,), 2.0)
            ok = (x + x)[-1].item() == 4 and (y + y).sum().item() == 400 and kept[-1].item() == 3e6 - 1
            mybackend.cpu.trim()
            return ok
        # Every kernel once, before the forks (see tests/test_fork.py).
        torch.empty(500)[:5] = 1.0
        assert check()
        threads = [threading.Thread(target=churn) for _ in range(3)]
        [t.start() for t in threads]
        for _ in range(20):
            pid = os.fork()
            if pid == 0:
                os._exit(0 if check() else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        stop = True
        [t.join() for t in threads]
        """
    )


def test_with_the_device(installed: None) -> None:
    x = torch.randn(2 * MIB)
    y = x.to("mybackend")
    assert torch.equal((y + y).cpu(), x + x)
    model = torch.nn.LSTM(8, 16).to("mybackend")  # scratch memory through the raw interface
    model(torch.randn(5, 2, 8, device="mybackend"))[0].sum().backward()
