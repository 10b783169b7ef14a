"""Three training steps give the same bits on the device as on the CPU: losses, gradients,
weights, optimizer state. And nothing is copied, nothing stays allocated."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from training_models import MODELS

import mybackend

STEPS = 3


def to_device(batch: Any, device: str) -> Any:
    return tuple(part.to(device) for part in batch) if isinstance(batch, tuple) else batch.to(device)


def train(
    model: torch.nn.Module, batch: Any, loss_of: Any, device: str, optimizer: str, foreach: bool
) -> dict[str, Any]:
    """Trains a copy of `model`; returns everything that a step leaves behind, on the CPU."""
    model = copy.deepcopy(model).to(device).train()
    batch = to_device(batch, device)
    if optimizer == "adamw":
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=foreach)
    else:
        opt = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, foreach=foreach)
    torch.manual_seed(7)
    seen: dict[str, Any] = {"losses": [], "gradients": []}
    for _ in range(STEPS):
        opt.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)
        seen["losses"].append(loss.detach().cpu())
        seen["gradients"].append([p.grad.cpu() for p in model.parameters() if p.grad is not None])
        opt.step()
    seen["weights"] = [value.cpu() for value in model.state_dict().values()]
    seen["state"] = [
        value.cpu()
        for entry in opt.state_dict()["state"].values()
        for value in entry.values()
        if isinstance(value, torch.Tensor)
    ]
    return seen


def assert_same_bits(ours: Any, theirs: Any, where: str = "") -> None:
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert_same_bits(ours[key], theirs[key], f"{where}.{key}")
    elif isinstance(ours, list):
        assert len(ours) == len(theirs), where
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert_same_bits(a, b, f"{where}[{i}]")
    else:
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), f"{where}: {ours} differs from {theirs}"


@pytest.mark.parametrize("foreach", [False, True], ids=["forloop", "foreach"])
@pytest.mark.parametrize("name", MODELS)
def test_training_is_bit_equal_to_the_cpu(name: str, foreach: bool) -> None:
    if name in ("gpt2", "bert"):
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, batch, loss_of = MODELS[name]()
    gc.collect()
    before = torch.mybackend.memory_allocated()
    live_before = torch.mybackend.tracker_stats()["current_bytes"]
    copies_before = mybackend.memory.copied_output_count()
    ours = train(model, batch, loss_of, "mybackend", "adamw" if foreach else "sgd", foreach)
    copies = mybackend.memory.copied_output_count() - copies_before
    theirs = train(model, batch, loss_of, "cpu", "adamw" if foreach else "sgd", foreach)
    assert_same_bits(ours, theirs)
    assert copies == 0, "outputs were copied instead of adopted"
    gc.collect()
    assert torch.mybackend.memory_allocated() == before
    assert torch.mybackend.tracker_stats()["current_bytes"] == live_before
    mybackend.memory.check_invariants()
