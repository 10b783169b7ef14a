"""Every module of PyTorch's module_db beside the CPU: forward and backward, copies, pickles, moves,
non-contiguous inputs, memory formats."""

from __future__ import annotations

import copy
import io
import unittest
from collections.abc import Callable
from typing import Any

import torch
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_modules import module_db, modules
from torch.testing._internal.common_utils import TestCase, noncontiguous_like

from .harness import DEVICE_TYPE, FULL, assert_same, compared, exclusions, outcome, tensors, to_device

DTYPES = None if FULL else (torch.float32,)
Module = torch.nn.Module
Step = Callable[[Module, Any], Any]


def inputs_of(info: Any, dtype: torch.dtype, training: bool) -> list[Any]:
    torch.manual_seed(0)
    found = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
    return [one for one in found if one.forward_input is not None]


def made(info: Any, one: Any, dtype: torch.dtype, training: bool) -> Module:
    torch.manual_seed(1)
    module = info.module_cls(*one.constructor_input.args, **one.constructor_input.kwargs)
    return module.to(dtype=dtype).train(training)


def value_of(one: Any) -> Any:
    return one.forward_input.args, one.forward_input.kwargs


def step(module: Module, value: Any) -> Any:
    """Results, gradients of the inputs and of the parameters, and the buffers afterwards."""
    torch.manual_seed(2)
    args, kwargs = value
    result = module(*args, **kwargs)
    wanted = [t for t in tensors(value) if t.requires_grad] + list(module.parameters())
    outputs = [t for t in tensors(result) if t.requires_grad]
    gradients: tuple[Any, ...] = ()
    if outputs and wanted:
        gradients = torch.autograd.grad(outputs, wanted, [torch.ones_like(t) for t in outputs], allow_unused=True)
    return [t.detach() for t in tensors(result)], gradients, list(module.buffers())


def assert_same_step(ours: Any, theirs: Any) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert [t is None for t in mine] == [t is None for t in other]
        assert_same([t for t in mine if t is not None], [t for t in other if t is not None])


class TestModules(TestCase):
    def beside(
        self, group: str, device: str, dtype: torch.dtype, info: Any, training: bool, ours: Any, theirs: Step = step
    ) -> None:
        """`theirs(module, value)` on the CPU, `ours` with a copy of the module on the device."""
        cases = 0
        with exclusions(group, f"{info.name}.{'train' if training else 'eval'}", dtype):
            for one in inputs_of(info, dtype, training):
                module = made(info, one, dtype, training)
                moved = copy.deepcopy(module).to(device)
                expected, error = outcome(lambda m=module, o=one: theirs(m, to_device(value_of(o), "cpu")))
                if error is not None:
                    continue
                assert_same_step(ours(moved, to_device(value_of(one), device)), expected)
                cases += 1
            compared(cases)

    @modules(module_db, allowed_dtypes=DTYPES)
    def test_module_step(self, device: str, dtype: torch.dtype, module_info: Any, training: bool) -> None:
        self.beside("module_step", device, dtype, module_info, training, step)

    @modules(module_db, allowed_dtypes=(torch.float32,))
    def test_module_copies(self, device: str, dtype: torch.dtype, module_info: Any, training: bool) -> None:
        """Deep copies, pickles, state dictionaries and a way to the CPU and back keep everything."""

        def copies(module: Module, value: Any) -> Any:
            first = copy.deepcopy(module)
            file = io.BytesIO()
            torch.save(module, file)
            file.seek(0)
            second = torch.load(file, weights_only=False)
            if module_info.is_lazy:  # an uninitialized parameter's pickle does not tell its device
                second.to(device)
            third = copy.deepcopy(module).to("cpu").to(device)
            fourth = copy.deepcopy(module).to("cpu")
            fourth.load_state_dict(module.state_dict())
            results = []
            for one in (first, second, third, fourth.to(device)):
                assert all(t.device.type == torch.device(device).type for t in [*one.parameters(), *one.buffers()])
                results.append(step(one, to_device(value, device)))
            on_cpu = [[[None if t is None else t.cpu() for t in part] for part in result] for result in results]
            for result in on_cpu[1:]:
                assert_same_step(result, on_cpu[0])
            return results[0]

        self.beside("module_copies", device, dtype, module_info, training, copies)

    @modules(module_db, allowed_dtypes=(torch.float32,))
    def test_module_noncontiguous(self, device: str, dtype: torch.dtype, module_info: Any, training: bool) -> None:
        def strided(module: Module, value: Any) -> Any:
            def change(t: torch.Tensor) -> torch.Tensor:
                return noncontiguous_like(t) if t.numel() > 1 and t.layout == torch.strided else t

            moved = torch.utils._pytree.tree_map(
                lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf, value
            )
            return step(module, moved)

        self.beside("module_noncontiguous", device, dtype, module_info, training, strided, strided)

    @modules([info for info in module_db if info.module_memformat_affects_out], allowed_dtypes=(torch.float32,))
    def test_module_memory_format(self, device: str, dtype: torch.dtype, module_info: Any, training: bool) -> None:
        """channels_last weights and inputs: the same values, in the same format."""

        def channels_last(module: Module, value: Any) -> Any:
            found = tensors(value)
            dims = {t.dim() for t in found}
            if not dims & {4, 5}:
                raise unittest.SkipTest("no input has a memory format")
            memory_format = torch.channels_last if 4 in dims else torch.channels_last_3d

            def change(leaf: Any) -> Any:
                if isinstance(leaf, torch.Tensor) and leaf.dim() in (4, 5):
                    return leaf.detach().to(memory_format=memory_format).requires_grad_(leaf.requires_grad)
                return leaf

            args, kwargs = torch.utils._pytree.tree_map(change, value)
            module = module.to(memory_format=memory_format)
            result = module(*args, **kwargs)
            formats = [t.is_contiguous(memory_format=memory_format) for t in tensors(result) if t.dim() in (4, 5)]
            outputs, gradients, buffers = step(module, (args, kwargs))
            return [*outputs, torch.tensor(formats)], gradients, buffers

        self.beside("module_memory_format", device, dtype, module_info, training, channels_last, channels_last)


instantiate_device_type_tests(TestModules, globals(), only_for=DEVICE_TYPE, allow_mps=False)
