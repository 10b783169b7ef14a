"""torch.autocast("mybackend") with both dtypes, and gradient scaling."""

from __future__ import annotations

import pytest
import torch
from torch import nn


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    a, b = torch.randn(4, 4, device="mybackend"), torch.randn(4, 4, device="mybackend")
    with torch.autocast("mybackend", dtype=dtype):
        assert torch.is_autocast_enabled("mybackend")
        assert (a @ b).dtype == dtype
        assert nn.functional.linear(a, b).dtype == dtype
        assert torch.exp(a @ b).dtype == torch.float32
        assert (a + b).dtype == torch.float32
        assert torch.softmax(a @ b, -1).dtype == torch.float32
        with torch.autocast("mybackend", enabled=False):
            assert (a @ b).dtype == torch.float32
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            nn.functional.binary_cross_entropy(a.sigmoid(), b.sigmoid())
    assert (a @ b).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_training_with_autocast(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 2)).to("mybackend")
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("mybackend")
    x, y = torch.randn(16, 8, device="mybackend"), torch.randint(0, 2, (16,), device="mybackend")
    losses = []
    for _ in range(20):
        opt.zero_grad()
        with torch.autocast("mybackend", dtype=dtype):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and model[0].weight.dtype == torch.float32


def test_cpu_autocast_does_not_reach_borrowed_kernels() -> None:
    x = torch.randn(4, 4, device="mybackend")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.float32
        assert torch.linalg.matrix_power(x, 2).dtype == torch.float32
