"""Streams and events of the sim device."""

from __future__ import annotations

import pytest
import torch


def test_streams() -> None:
    default = torch.mybackend.default_stream()
    assert torch.mybackend.current_stream() == default
    s = torch.mybackend.Stream()
    assert s != default and s.device == torch.device("mybackend", 0) and s.query()
    x = torch.ones(3, device="mybackend")
    with torch.mybackend.stream(s):
        assert torch.mybackend.current_stream() == s
        y = x + 1
        y.record_stream(default)
    assert torch.mybackend.current_stream() == default
    s.synchronize()
    default.wait_stream(s)
    assert y.tolist() == [2, 2, 2]
    with torch.mybackend.stream(None):
        assert torch.mybackend.current_stream() == default


def test_blocks_belong_to_their_stream() -> None:
    s = torch.mybackend.Stream()
    x = torch.empty(5 << 20, dtype=torch.uint8, device="mybackend")
    pointer = x.data_ptr()
    del x
    with torch.mybackend.stream(s):
        y = torch.empty(5 << 20, dtype=torch.uint8, device="mybackend")
    assert y.data_ptr() != pointer
    z = torch.empty(5 << 20, dtype=torch.uint8, device="mybackend")
    assert z.data_ptr() == pointer


def test_events() -> None:
    a, b = torch.mybackend.Event(enable_timing=True), torch.mybackend.Event(enable_timing=True)
    a.record()
    torch.ones(100, device="mybackend").sum()
    b.record()
    b.synchronize()
    assert a.query() and b.query() and a.elapsed_time(b) > 0
    s = torch.mybackend.Stream()
    s.wait_event(a)
    event = s.record_event()
    event.wait(torch.mybackend.current_stream())
    s.synchronize()
    with pytest.raises(NotImplementedError, match="between processes"):
        torch.mybackend.Event(interprocess=True)


def test_backward_runs_on_the_streams_of_the_forward() -> None:
    s = torch.mybackend.Stream()
    x = torch.ones(3, device="mybackend", requires_grad=True)
    with torch.mybackend.stream(s):
        y = (x * 2).sum()
    y.backward()
    torch.mybackend.synchronize()
    assert x.grad.tolist() == [2, 2, 2]
