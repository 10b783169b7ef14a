"""Pinned host memory, first version."""

from __future__ import annotations

import gc

import torch
from torch.utils.data import DataLoader, TensorDataset

import mybackend


def live() -> int:
    return mybackend.memory.pinned_stats()["current_bytes"]


def test_pin_memory() -> None:
    x = torch.arange(10000.0).pin_memory()
    assert x.is_pinned() and x[5:].is_pinned() and x[1:3].view(torch.int32).is_pinned()
    assert not torch.arange(3.0).is_pinned() and not torch.ones(3, device="mybackend").is_pinned()
    assert torch.empty(100, pin_memory=True).is_pinned()
    y = x.to("mybackend", non_blocking=True)
    torch.mybackend.synchronize()
    assert torch.equal(y.cpu(), x)
    assert torch.empty(0, pin_memory=True).numel() == 0
    del x
    gc.collect()


def test_blocks_are_given_back() -> None:
    before = live()
    x = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
    assert x.data_ptr() % 4096 == 0 and live() == before + (1 << 20)
    del x
    gc.collect()
    assert live() == before
    torch.accelerator.empty_host_cache()


def test_data_loader() -> None:
    loader = DataLoader(TensorDataset(torch.arange(32.0)), batch_size=8, pin_memory=True)
    batches = [batch for (batch,) in loader]
    assert all(batch.is_pinned() for batch in batches)
    assert sum(batch.to("mybackend", non_blocking=True).sum().item() for batch in batches) == 496
