"""Every operator of op_db in the ways in which PyTorch transforms and calls them, beside the CPU:
reference inputs, non-contiguous inputs, views, conjugate and negative views, second order gradients,
forward-mode derivatives, vmap, fake and meta tensors, tensors on two devices. Default dtypes; a part
of scripts/conformance.py, too long for the ordinary test run."""

from __future__ import annotations

import unittest
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.testing._internal.common_device_type import OpDTypes, instantiate_device_type_tests, ops
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import TestCase
from torch.utils._pytree import tree_map

from .harness import (
    DEVICE_TYPE,
    FULL,
    assert_same_grads,
    assert_same_results,
    case_name,
    compared,
    exclusions,
    grads,
    is_undefined,
    outcome,
    run,
    samples_of,
    tensors,
    to_device,
    value_of,
)  # fmt: skip

pytestmark = pytest.mark.skipif(not FULL, reason="a part of scripts/conformance.py")

# At most so many samples for what takes many calls a sample.
SOME = 12


def tensors_mapped(function: Any, value: Any) -> Any:
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, value)


def aliases(outputs: Any, inputs: Any) -> list[Any]:
    """Of each output: the input whose storage it shares, its offset and strides; None when it is new."""
    result: list[Any] = []
    for out in tensors(outputs):
        where = None
        for number, tensor in enumerate(tensors(inputs)):
            strided = out.layout == tensor.layout == torch.strided
            if strided and out.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() != 0:
                where = (number, out.storage_offset(), out.stride(), out._is_view())
                break
        result.append(where)
    return result


def described(outputs: Any) -> list[Any]:
    """What fake and meta tensors tell of results."""
    return [
        (tuple(t.shape), t.dtype, t.stride() if t.layout == torch.strided and t.numel() > 0 else None)
        for t in tensors(outputs)
    ]


class TestOpTransforms(TestCase):
    def beside(
        self, group: str, op: Any, dtype: torch.dtype, device: str, samples: Any, function: Any, same: Any = None
    ) -> None:
        """Runs function(sample, value) on the CPU and on the device; what the CPU cannot do is skipped."""
        cases = 0
        with exclusions(group, case_name(op), dtype):
            for sample in samples:
                value = value_of(sample)
                expected, error = outcome(lambda s=sample, v=value: function(s, to_device(v, "cpu")))
                if error is not None:
                    continue
                result = function(sample, to_device(value, device))
                if same is None:
                    assert_same_results(op, result, expected)
                elif not is_undefined(op):
                    same(result, expected)
                cases += 1
            compared(cases)

    @ops([op for op in op_db if op.reference_inputs_func is not None], dtypes=OpDTypes.any_one)
    def test_reference(self, device: str, dtype: torch.dtype, op: Any) -> None:
        samples = samples_of(op, dtype, kind="reference_inputs")
        self.beside("reference", op, dtype, device, samples, lambda s, v: run(op, s, v))

    @ops(op_db, dtypes=OpDTypes.any_one)
    def test_noncontiguous(self, device: str, dtype: torch.dtype, op: Any) -> None:
        has_grad = op.supports_autograd and dtype.is_floating_point
        made = [outcome(sample.noncontiguous)[0] for sample in samples_of(op, dtype, requires_grad=has_grad)]
        samples = [sample for sample in made if sample is not None]  # (sparse tensors cannot be)

        def both(sample: Any, value: Any) -> Any:
            result = run(op, sample, value)
            return tensors(result), grads(result, value) if has_grad else ()

        def same(ours: Any, theirs: Any) -> None:
            assert_same_results(op, ours[0], theirs[0])
            assert_same_grads(ours[1], theirs[1])

        self.beside("noncontiguous", op, dtype, device, samples, both, same)

    @ops(op_db, dtypes=OpDTypes.any_one)
    def test_views(self, device: str, dtype: torch.dtype, op: Any) -> None:
        def same(ours: Any, theirs: Any) -> None:
            assert ours == theirs

        self.beside("views", op, dtype, device, samples_of(op, dtype), lambda s, v: aliases(run(op, s, v), v), same)

    @ops([op for op in op_db if op.test_conjugated_samples], allowed_dtypes=(torch.complex64,))
    def test_conjugate(self, device: str, dtype: torch.dtype, op: Any) -> None:
        def conjugated(sample: Any, value: Any) -> Any:
            return run(op, sample, tensors_mapped(lambda t: t.conj() if t.is_complex() else t, value))

        self.beside("conjugate", op, dtype, device, samples_of(op, dtype), conjugated)

    @ops([op for op in op_db if op.test_neg_view], dtypes=OpDTypes.any_one)
    def test_negative(self, device: str, dtype: torch.dtype, op: Any) -> None:
        def negated(sample: Any, value: Any) -> Any:
            # (Not integers: several of the CPU's composite operators read indices and lengths past the bit.)
            return run(op, sample, tensors_mapped(lambda t: torch._neg_view(t) if t.is_floating_point() else t, value))

        self.beside("negative", op, dtype, device, samples_of(op, dtype), negated)

    @ops([op for op in op_db if op.supports_gradgrad], allowed_dtypes=(torch.float64, torch.complex128))
    def test_gradgrad(self, device: str, dtype: torch.dtype, op: Any) -> None:
        def second(sample: Any, value: Any) -> Any:
            first = grads(run(op, sample, value), value, create_graph=True)
            return grads([g for g in first if g is not None], value)

        def close(ours: Any, theirs: Any) -> None:
            # The graph's nodes are numbered by thread, and a device's backward has one of its own:
            # gradients are summed in another order.
            assert_same_grads(ours, theirs, exact=False)

        samples = samples_of(op, dtype, requires_grad=True)[:SOME]
        self.beside("gradgrad", op, dtype, device, samples, second, close)

    @ops([op for op in op_db if op.supports_forward_ad], allowed_dtypes=(torch.float32, torch.complex64))
    def test_forward_ad(self, device: str, dtype: torch.dtype, op: Any) -> None:
        def derivative(sample: Any, value: Any) -> Any:
            def dual(t: torch.Tensor) -> torch.Tensor:
                return forward_ad.make_dual(t.detach(), torch.ones_like(t)) if t.requires_grad else t

            with forward_ad.dual_level():
                unpacked = [forward_ad.unpack_dual(t) for t in tensors(run(op, sample, tensors_mapped(dual, value)))]
                return [[t for t in pair if t is not None] for pair in unpacked]

        samples = samples_of(op, dtype, requires_grad=True)[:SOME]
        self.beside("forward_ad", op, dtype, device, samples, derivative)

    @ops(op_db, dtypes=OpDTypes.any_one)
    def test_vmap(self, device: str, dtype: torch.dtype, op: Any) -> None:
        def batched(sample: Any, value: Any) -> Any:
            found = tensors(value)
            if not found:
                raise unittest.SkipTest("nothing to batch")

            def call(*batch: torch.Tensor) -> Any:
                rest = iter(batch)
                return tuple(tensors(run(op, sample, tensors_mapped(lambda _: next(rest), value))))

            return torch.vmap(call, randomness="same")(*(torch.stack([t, t.flip(0) if t.dim() else t]) for t in found))

        self.beside("vmap", op, dtype, device, samples_of(op, dtype)[:SOME], batched)

    @ops(op_db, dtypes=OpDTypes.any_one)
    def test_fake(self, device: str, dtype: torch.dtype, op: Any) -> None:
        def faked(sample: Any, value: Any) -> Any:
            real = run(op, sample, value)
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                fake = run(op, sample, tensors_mapped(mode.from_tensor, value))
            pairs = zip(tensors(fake), tensors(real), strict=True)
            return described(real), described(fake), [a.device.type == b.device.type for a, b in pairs]

        def same(ours: Any, theirs: Any) -> None:
            # As right as for the CPU: some operators have no fake strides at all.
            assert ours[1] == ours[0] or theirs[1] != theirs[0], f"fake {ours[1]}, real {ours[0]}"
            assert ours[2] == theirs[2], "a fake result is on another device"

        self.beside("fake", op, dtype, device, samples_of(op, dtype)[:SOME], faked, same)

    @ops(op_db, dtypes=OpDTypes.any_one)
    def test_meta(self, device: str, dtype: torch.dtype, op: Any) -> None:
        """Results have the sizes, strides and dtypes that meta tensors promise, as far as the CPU's do."""

        def promised(sample: Any, value: Any) -> Any:
            real = described(run(op, sample, value))
            return real == described(run(op, sample, to_device(value, "meta")))

        def same(ours: Any, theirs: Any) -> None:
            assert ours or not theirs

        self.beside("meta", op, dtype, device, samples_of(op, dtype)[:SOME], promised, same)

    @ops(op_db, dtypes=OpDTypes.any_one)
    def test_two_devices(self, device: str, dtype: torch.dtype, op: Any) -> None:
        """The last tensor is on the CPU: an error, or the right result; never a crash."""
        cases = 0
        with exclusions("two_devices", case_name(op), dtype):
            for sample in samples_of(op, dtype)[:SOME]:
                value = value_of(sample)
                expected, error = outcome(lambda s=sample, v=value: run(op, s, v))
                found = tensors(value)
                if error is not None or len(found) < 2 or found[-1] is found[0]:
                    continue
                last = found[-1]

                def call(sample: Any = sample, value: Any = value, last: Any = last) -> Any:
                    mixed = tensors_mapped(lambda t: to_device(t, "cpu" if t is last else device), value)
                    return run(op, sample, mixed)

                result, error = outcome(call)
                if error is None:
                    assert_same_results(op, result, expected)
                cases += 1
            compared(cases)


instantiate_device_type_tests(TestOpTransforms, globals(), only_for=DEVICE_TYPE, allow_mps=False)
