"""Streams and events of the sim device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


def test_backward_runs_on_the_streams_of_the_forward() -> None:
    s = torch.mybackend.Stream()
    x = torch.ones(3, device="mybackend", requires_grad=True)
    with torch.mybackend.stream(s):
        y = (x * 2).sum()
    y.backward()
    torch.mybackend.synchronize()
    assert x.grad.tolist() == [2, 2, 2]


IPC = """
import sys, torch, torch.multiprocessing as mp
from mybackend import _C

def child(inbox, outbox):
    handle, x = inbox.get()
    event = torch.mybackend.Event.from_ipc_handle(0, handle)
    outbox.put(event.query())
    stream = torch.mybackend.Stream()
    event.wait(stream)
    with torch.mybackend.stream(stream):
        y = torch.empty(1000, pin_memory=True)
        y.copy_(x, non_blocking=True)        # after the other process' copy
    outbox.put(stream.query())
    event.synchronize()
    stream.synchronize()
    outbox.put((event.query(), y.sum().item()))

if __name__ == "__main__":
    context = mp.get_context(sys.argv[1])
    inbox, outbox = context.Queue(), context.Queue()
    x = torch.zeros(1000, device="mybackend").share_memory_()
    stream, event = torch.mybackend.Stream(), torch.mybackend.Event(interprocess=True)
    hold = _C._hold_stream(stream)
    source = torch.ones(1000).pin_memory()
    with torch.mybackend.stream(stream):
        x.copy_(source, non_blocking=True)
        event.record()
    assert not event.query()
    process = context.Process(target=child, args=(inbox, outbox)); process.start()
    inbox.put((event.ipc_handle(), x))
    assert outbox.get(timeout=120) is False   # not complete
    assert outbox.get(timeout=120) is False   # its stream waits
    hold.release()
    assert outbox.get(timeout=120) == (True, 1000.0)
    process.join()
    assert process.exitcode == 0
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_events_between_processes(method: str, tmp_path: Path) -> None:
    script = tmp_path / "ipc.py"
    script.write_text(IPC)
    subprocess.run([sys.executable, str(script), method], check=True, timeout=300)


def test_handles_of_events() -> None:
    event = torch.mybackend.Event(interprocess=True)
    assert event.query()  # never recorded
    event.record()
    event.synchronize()
    same = torch.mybackend.Event.from_ipc_handle("mybackend", event.ipc_handle())
    assert same.query()
    with pytest.raises(RuntimeError, match="interprocess=True"):
        torch.mybackend.Event().ipc_handle()
    with pytest.raises(ValueError, match="enable_timing"):
        torch.mybackend.Event(interprocess=True, enable_timing=True)
    for wrong in (b"", b"nonsense", b"\xff\xfe", b"mybackend_event:1:2x", b"mybackend_event:999999999:3"):
        with pytest.raises(ValueError, match=r"handle|gone"):
            torch.mybackend.Event.from_ipc_handle(0, wrong)
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        torch.mybackend.Event(interprocess=True).record()
    torch.mybackend.synchronize()
    assert len(os.listdir("/proc/self/fd")) == descriptors
