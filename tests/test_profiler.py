"""torch.profiler: operators, kernels and copies of the device under its own activity."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

BOTH = [ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]


def test_kernels_belong_to_their_operators() -> None:
    x = torch.randn(50, 50, device="mybackend", requires_grad=True)
    with profile(activities=BOTH) as prof:
        (x @ x).exp().sum().backward()
    kernels = [event for event in prof.events() if event.device_type == DeviceType.PrivateUse1]
    names = [event.name for event in kernels]
    assert names[:2] == ["aten::mm", "aten::exp"] and names.count("aten::mm") == 3  # two of them in the backward
    assert all(event.device_index == 0 and event.time_range.elapsed_us() > 0 for event in kernels)
    operators = {event.name: event for event in prof.events() if event.device_type == DeviceType.CPU and event.kernels}
    assert [kernel.name for kernel in operators["aten::exp"].kernels] == ["aten::exp"]
    table = prof.key_averages().table(sort_by="self_device_time_total")
    assert "MYBACKEND total" in table
    (total,) = {
        entry.self_device_time_total
        for entry in prof.key_averages()
        if entry.key == "aten::mm" and entry.device_type == DeviceType.PrivateUse1
    }
    assert total == pytest.approx(
        sum(event.time_range.elapsed_us() for event in kernels if event.name == "aten::mm"), rel=1e-3
    )


def test_queued_copies_are_on_their_stream(tmp_path: Path) -> None:
    stream = torch.mybackend.Stream()
    source = torch.randn(300_000).pin_memory()
    with profile(activities=BOTH) as prof, torch.mybackend.stream(stream):
        target = source.to("mybackend", non_blocking=True)
    assert torch.equal(target.cpu(), source)
    path = tmp_path / "trace.json"
    prof.export_chrome_trace(str(path))
    copies = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == "gpu_memcpy"]
    assert len(copies) == 1 and copies[0]["tid"] == stream.stream_id and copies[0]["dur"] > 0


def test_nothing_is_recorded_without_the_activity() -> None:
    x = torch.randn(10, device="mybackend")
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        x.exp()
    assert all(event.device_type == DeviceType.CPU for event in prof.events())
    with profile(activities=BOTH) as prof:
        pass
    x.exp()
    assert not [event for event in prof.events() if event.device_type == DeviceType.PrivateUse1]
    with profile(activities=[ProfilerActivity.PrivateUse1]) as prof:  # a second profile starts empty
        x.sin()
    assert [event.name for event in prof.events() if event.device_type == DeviceType.PrivateUse1] == ["aten::sin"]
