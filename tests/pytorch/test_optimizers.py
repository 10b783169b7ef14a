"""Every optimizer of PyTorch's optim_db beside the CPU, in all its implementations and settings."""

from __future__ import annotations

import copy
import unittest
from typing import Any

import torch
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_optimizers import optim_db, optims
from torch.testing._internal.common_utils import TestCase

from .harness import DEVICE_TYPE, assert_same, compared, exclusions, outcome

IMPLEMENTATIONS = ("for-loop", "foreach", "fused", "differentiable", "capturable")


def settings_of(info: Any, implementation: str) -> list[dict[str, Any]]:
    flags = dict.fromkeys(info.supported_impls, False)
    if implementation == "capturable":
        if not info.has_capturable_arg:
            return []
        flags["capturable"] = True
    elif implementation != "for-loop":
        if implementation not in info.supported_impls:
            return []
        flags[implementation] = True
    found = [dict(one.kwargs) for one in info.optim_inputs_func(device="cpu")]
    if implementation != "capturable":
        found = [one for one in found if not one.get("capturable")]
    return [one | flags for one in found]


def parameters(device: str, sparse: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = ((5, 3), (8, 2)) if sparse else ((5, 3), (4, 4), (1, 7))
    return [torch.nn.Parameter(torch.randn(shape).to(device)) for shape in shapes]


def train(info: Any, settings: dict[str, Any], device: str, reload: bool, steps: int = 4) -> list[torch.Tensor]:
    """The parameters and the state after some steps; with `reload`, midway through a state dictionary."""
    params = parameters(device)
    x = torch.linspace(-1, 1, 4).to(device)

    def loss() -> torch.Tensor:
        terms = [(p.square() * p.cos()).sum() + (p.flatten()[:4] * x).sum() for p in params]
        return torch.stack(terms).sum()

    settings = {
        k: v.to(device) if isinstance(v, torch.Tensor) and v.dim() == 0 and device != "cpu" else v
        for k, v in settings.items()
    }
    optimizer = info.optim_cls(params, **settings)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    for number in range(steps):
        if reload and number == steps // 2:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = info.optim_cls(params, **settings)
            optimizer.load_state_dict(state)
        if info.step_requires_closure or number % 2:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    state = [t for p in params for t in optimizer.state.get(p, {}).values() if isinstance(t, torch.Tensor)]
    return [p.detach() for p in params] + [t.detach() for t in state]


class TestOptimizers(TestCase):
    def beside(self, device: str, info: Any, implementation: str, reload: bool) -> None:
        if info.only_supports_sparse_grads:
            raise unittest.SkipTest("sparse gradients")
        cases = 0
        with exclusions("optimizer", f"{info.optim_cls.__name__}.{implementation}"):
            for settings in settings_of(info, implementation):
                reference = settings
                if implementation == "capturable":  # not on the CPU; there the state's place makes no difference
                    reference = settings | {"capturable": False}
                expected, error = outcome(lambda r=reference: train(info, r, "cpu", False))
                if error is not None:
                    continue
                result = train(info, settings, device, reload)
                # (Capturable implementations compute their factors as tensors, and not as Python's floats.)
                assert_same(result, expected, exact=implementation != "capturable")
                cases += 1
            compared(cases)

    @optims(optim_db)
    def test_optimizer_loop(self, device: str, dtype: torch.dtype, optim_info: Any) -> None:
        self.beside(device, optim_info, "for-loop", False)

    @optims(optim_db)
    def test_optimizer_foreach(self, device: str, dtype: torch.dtype, optim_info: Any) -> None:
        self.beside(device, optim_info, "foreach", False)

    @optims(optim_db)
    def test_optimizer_fused(self, device: str, dtype: torch.dtype, optim_info: Any) -> None:
        self.beside(device, optim_info, "fused", False)

    @optims(optim_db)
    def test_optimizer_differentiable(self, device: str, dtype: torch.dtype, optim_info: Any) -> None:
        self.beside(device, optim_info, "differentiable", False)

    @optims(optim_db)
    def test_optimizer_capturable(self, device: str, dtype: torch.dtype, optim_info: Any) -> None:
        if DEVICE_TYPE == "cpu":
            raise unittest.SkipTest("PyTorch has no capturable optimizers on the CPU")
        self.beside(device, optim_info, "capturable", False)

    @optims(optim_db)
    def test_optimizer_state(self, device: str, dtype: torch.dtype, optim_info: Any) -> None:
        """A state dictionary midway makes no difference."""
        self.beside(device, optim_info, "foreach" if "foreach" in optim_info.supported_impls else "for-loop", True)


instantiate_device_type_tests(TestOptimizers, globals(), only_for=DEVICE_TYPE, allow_mps=False)
