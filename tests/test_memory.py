"""Memory statistics, limits, errors, kinds, threads."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

import mybackend


def test_counters_are_exact() -> None:
    torch.mybackend.reset_peak_memory_stats()
    allocated, tracker = torch.mybackend.memory_allocated(), torch.mybackend.tracker_stats()
    x = torch.empty(1000, dtype=torch.uint8, device="mybackend")
    y = torch.empty(3 << 20, dtype=torch.uint8, device="mybackend")
    assert torch.mybackend.memory_allocated() == allocated + 1024 + (3 << 20)
    now = torch.mybackend.tracker_stats()
    assert now["current_bytes"] == tracker["current_bytes"] + 1000 + (3 << 20)
    assert now["allocation_count"] == tracker["allocation_count"] + 2
    del x, y
    now = torch.mybackend.tracker_stats()
    assert torch.mybackend.memory_allocated() == allocated
    assert now["current_bytes"] == tracker["current_bytes"] and now["free_count"] == tracker["free_count"] + 2
    assert now["total_freed_bytes"] - tracker["total_freed_bytes"] == 1000 + (3 << 20)
    assert torch.mybackend.max_memory_allocated() == allocated + 1024 + (3 << 20)
    torch.mybackend.reset_peak_memory_stats()
    assert torch.mybackend.max_memory_allocated() == allocated


def test_stats_have_all_the_keys_of_cuda() -> None:
    torch.ones(1, device="mybackend")
    stats = torch.mybackend.memory_stats()
    for name in [
        "allocation",
        "segment",
        "active",
        "inactive_split",
        "allocated_bytes",
        "reserved_bytes",
        "active_bytes",
        "inactive_split_bytes",
        "requested_bytes",
    ]:
        for pool in ("all", "small_pool", "large_pool"):
            for field in ("current", "peak", "allocated", "freed"):
                assert f"{name}.{pool}.{field}" in stats
    for name in ("oversize_allocations", "oversize_segments"):
        for field in ("current", "peak", "allocated", "freed"):
            assert f"{name}.{field}" in stats
    for name in [
        "num_alloc_retries",
        "num_ooms",
        "num_sync_all_streams",
        "num_device_alloc",
        "num_device_free",
        "num_oom_rejections",
        "max_split_size",
    ]:
        assert name in stats
    theirs = torch.accelerator.memory_stats()
    assert (
        theirs["allocated_bytes.all.current"]
        == torch.mybackend.memory_allocated()
        == torch.accelerator.memory_allocated()
    )
    assert torch.accelerator.memory_reserved() == torch.mybackend.memory_reserved()
    assert torch.accelerator.max_memory_allocated() == torch.mybackend.max_memory_allocated()


def test_accumulated_and_empty_cache() -> None:
    x = torch.empty(30 << 20, dtype=torch.uint8, device="mybackend")
    del x
    gc.collect()
    assert torch.mybackend.memory_reserved() >= 30 << 20
    free, total = torch.mybackend.mem_get_info()
    torch.mybackend.empty_cache()
    assert torch.mybackend.mem_get_info()[0] >= free + (30 << 20) and torch.mybackend.mem_get_info()[1] == total
    torch.mybackend.reset_accumulated_memory_stats()
    assert torch.mybackend.memory_stats()["allocation.all.allocated"] == 0
    assert torch.mybackend.tracker_stats()["total_allocated_bytes"] == 0
    torch.accelerator.empty_cache()


def test_beyond_capacity() -> None:
    _, total = torch.mybackend.mem_get_info()
    before = torch.mybackend.memory_stats()
    live = torch.mybackend.tracker_stats()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(total * 2, dtype=torch.uint8, device="mybackend")
    text = str(caught.value)
    assert f"Requested {total * 2} bytes" in text and "live " in text and "peak " in text and "free of" in text
    after = torch.mybackend.memory_stats()
    assert after["num_ooms"] == before["num_ooms"] + 1
    assert after["allocated_bytes.all.current"] == before["allocated_bytes.all.current"]
    assert torch.mybackend.tracker_stats() == live
    assert torch.ones(3, device="mybackend").sum().item() == 3


def test_out_of_memory_inside_a_kernel_leaves_everything_usable() -> None:
    x = torch.ones(1 << 20, device="mybackend")
    torch.mybackend.empty_cache()
    for primitive in ("memory_allocate", "physical_create"):  # segments of either kind
        mybackend._C._set_fault(primitive, 1, "oom", 1000)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.outer(x[:30000], x[:30000])  # an output that no cached block can hold
        with pytest.raises(torch.OutOfMemoryError):
            x.repeat(100)
    finally:
        mybackend._C._clear_faults()
    assert (x + x).sum().item() == 2 * (1 << 20)
    mybackend.memory.check_invariants()


def test_a_broken_driver_is_an_error_at_once_and_no_out_of_memory() -> None:
    x = torch.ones(1 << 20, device="mybackend")
    before = torch.mybackend.memory_stats()
    for primitive in ("memory_allocate", "physical_create"):
        mybackend._C._set_fault(primitive, 1, "failed", 1)
    try:
        with pytest.raises(RuntimeError, match="scripted fault") as error:
            torch.empty(300 << 20, dtype=torch.uint8, device="mybackend")
    finally:
        mybackend._C._clear_faults()
    assert not isinstance(error.value, torch.OutOfMemoryError)
    after = torch.mybackend.memory_stats()
    for name in ("num_ooms", "num_alloc_retries", "num_sync_all_streams", "allocated_bytes.all.current"):
        assert after[name] == before[name], name
    assert (x + x).sum().item() == 2 * (1 << 20)


def test_a_mapping_that_could_not_be_taken_back_is_given_back_with_the_cache(run_python) -> None:
    run_python(
        """
        import torch, mybackend
        from mybackend import _C
        mybackend.config.set("expandable_segments:True")
        free, total = torch.mybackend.mem_get_info()
        _C._set_fault("memory_map", 2, "failed", 1)
        _C._set_fault("memory_unmap", 1, "failed", 1)
        try:
            torch.empty(70 << 20, dtype=torch.uint8, device="mybackend")
            raise SystemExit("no error")
        except RuntimeError as error:
            assert "scripted fault" in str(error)
        _C._clear_faults()
        assert torch.mybackend.mem_get_info()[0] < free
        torch.mybackend.empty_cache()
        assert torch.mybackend.mem_get_info()[0] == free
        """
    )


def test_a_mapping_that_cannot_be_taken_back_is_used_later(run_python) -> None:
    run_python(
        """
        import torch, mybackend
        from mybackend import _C
        mybackend.config.set("expandable_segments:True")
        x = torch.ones(100, device="mybackend")
        _C._set_fault("memory_map", 2, "oom", 3)
        _C._set_fault("memory_unmap", 1, "failed", 2)
        try:
            torch.empty(70 << 20, dtype=torch.uint8, device="mybackend")
        except torch.OutOfMemoryError:
            pass
        _C._clear_faults()
        mybackend.memory.check_invariants()
        y = torch.empty(70 << 20, dtype=torch.uint8, device="mybackend").fill_(1)
        assert y.sum().item() == 70 << 20
        mybackend.memory.check_invariants()
        del x, y
        torch.mybackend.empty_cache()
        mybackend.memory.check_invariants()
        assert torch.mybackend.memory_reserved() == 0
        """
    )


def test_memory_fraction() -> None:
    torch.mybackend.empty_cache()
    _, total = torch.mybackend.mem_get_info()
    torch.mybackend.set_per_process_memory_fraction(0.01)
    try:
        assert torch.mybackend.get_per_process_memory_fraction() == 0.01
        with pytest.raises(torch.OutOfMemoryError, match="memory fraction"):
            torch.empty(int(total * 0.02), dtype=torch.uint8, device="mybackend")
    finally:
        torch.mybackend.set_per_process_memory_fraction(1.0)
    for bad in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="invalid fraction"):
            torch.mybackend.set_per_process_memory_fraction(bad)
    with pytest.raises(TypeError):
        torch.mybackend.set_per_process_memory_fraction("half")


def test_summary() -> None:
    x = torch.ones(1000, device="mybackend")
    text = torch.mybackend.memory_summary()
    for word in ("Allocated memory", "Reserved memory", "fragmentation", "cache hit rate", "tracker"):
        assert word in text
    assert len(torch.mybackend.memory_summary(abbreviated=True).splitlines()) < len(text.splitlines())
    del x


def test_memory_kind_pool() -> None:
    allocated = torch.mybackend.memory_allocated()
    live = torch.mybackend.tracker_stats()["current_bytes"]
    with mybackend.memory.use("pool"):
        x = torch.arange(1000.0, device="mybackend")
        y = x * 2
        big = torch.zeros(3 << 20, device="mybackend")
    z = x + y  # caching again, from pool operands
    assert torch.mybackend.memory_allocated() == allocated + 4096
    assert z.sum().item() == 3 * 499500 and big.sum().item() == 0
    assert torch.mybackend.tracker_stats()["current_bytes"] == live + 3 * 4000 + (12 << 20)
    thread = threading.Thread(target=lambda holder: holder.clear(), args=([x, y, big],))
    del x, y, big
    thread.start()
    thread.join()
    with pytest.raises(ValueError, match="expected caching, pool or mmap"), mybackend.memory.use("heap"):
        pass
    with pytest.raises(ValueError, match="only for the kind mmap"), mybackend.memory.use("pool", dir="/tmp"):
        pass
    with pytest.raises(NotADirectoryError), mybackend.memory.use("mmap", dir="/no/such/folder"):
        torch.empty(3, device="mybackend")
    assert mybackend._C._memory_kind() == "caching"


def test_training_in_the_pool_kind_copies_nothing() -> None:
    copies = mybackend.memory.copied_output_count()
    with mybackend.memory.use("pool"):
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(4 * 36, 2)).to(
            "mybackend"
        )
        model(torch.randn(5, 3, 8, 8, device="mybackend")).sum().backward()
        del model
        gc.collect()
    assert mybackend.memory.copied_output_count() == copies


def test_threads_lose_no_byte() -> None:
    before = torch.mybackend.tracker_stats()
    barrier = threading.Barrier(8)
    handed: list[list[torch.Tensor]] = [[] for _ in range(8)]
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            generator = torch.Generator().manual_seed(index)
            barrier.wait()
            for step in range(200):
                size = int(torch.randint(1, 300_000, (1,), generator=generator))
                x = torch.empty(size, dtype=torch.uint8, device="mybackend")
                x.fill_(index)
                assert x[-1].item() == index
                handed[(index + step) % 8].append(x)  # freed by whoever takes it
                if step % 3 == 0 and handed[index]:
                    handed[index].pop()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    mybackend.memory.check_invariants()
    handed.clear()
    gc.collect()
    after = torch.mybackend.tracker_stats()
    assert after["current_bytes"] == before["current_bytes"]
    assert after["allocation_count"] - before["allocation_count"] == after["free_count"] - before["free_count"]


def test_backward_in_threads_returns_all_memory() -> None:
    def work() -> None:
        model = torch.nn.Sequential(torch.nn.Linear(30, 30), torch.nn.ReLU(), torch.nn.Linear(30, 1)).to("mybackend")
        for _ in range(20):
            model(torch.randn(10, 30, device="mybackend")).sum().backward()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_no_caching(run_python) -> None:
    run_python(
        """
        import torch
        x = torch.ones(1000, device="mybackend")
        assert torch.mybackend.memory_reserved() == 0 and torch.mybackend.tracker_stats()["current_bytes"] == 4000
        y = torch.nn.functional.relu(x) + 1
        assert y.sum().item() == 2000
        del x, y
        assert torch.mybackend.tracker_stats()["current_bytes"] == 0
        free, total = torch.mybackend.mem_get_info(); assert free == total
        """,
        MYBACKEND_NO_MEMORY_CACHING="1",
    )


def test_profiler_sees_the_memory() -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        x = torch.ones(1 << 16, device="mybackend")
        y = x + x
    assert sum(event.self_device_memory_usage for event in prof.key_averages()) >= 2 * (1 << 18)
    del x, y


@pytest.mark.parametrize(
    "conf",
    [
        "",
        "expandable_segments:True",
        "max_split_size_mb:32,garbage_collection_threshold:0.5",
        "roundup_power2_divisions:4",
    ],
)
def test_training_under_each_configuration(conf: str, run_python) -> None:
    run_python(
        """
        import gc, torch, mybackend
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(16 * 36, 8)).to("mybackend")
        opt = torch.optim.AdamW(model.parameters())
        torch.mybackend.set_per_process_memory_fraction(0.5)
        for step in range(5):
            x = torch.randn(64 + step, 3, 8, 8, device="mybackend")
            loss = model(x).square().mean(); opt.zero_grad(); loss.backward(); opt.step()
            big = torch.empty((30 + step) << 20, dtype=torch.uint8, device="mybackend"); del big
            mybackend.memory.check_invariants()
        del model, opt, x, loss; gc.collect()
        assert torch.mybackend.memory_allocated() == 0
        torch.mybackend.empty_cache()
        assert torch.mybackend.memory_reserved() == 0, torch.mybackend.memory_reserved()
        mybackend.memory.check_invariants()
        """,
        MYBACKEND_ALLOC_CONF=conf,
    )
