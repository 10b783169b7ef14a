"""Every operator of PyTorch's op_db beside the CPU: results, gradients, out=, in-place, errors."""

from __future__ import annotations

import unittest
from typing import Any

import torch
from torch.testing._internal.common_device_type import OpDTypes, instantiate_device_type_tests, ops
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import TestCase

from .harness import (
    DEVICE_TYPE,
    DTYPES,
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


def filled(tensor: torch.Tensor) -> torch.Tensor:
    """Of the right size; with a value, since some out= variants leave parts as they are."""
    return torch.full_like(tensor, 7)


def wider(tensor: torch.Tensor) -> torch.Tensor:
    """A dtype that the result can (or, for float to integer, cannot) be cast to."""
    return torch.full_like(tensor, 7, dtype=torch.float64 if not tensor.dtype.is_floating_point else torch.int64)


def with_out(op: Any, value: Any, expected: Any, make: Any, device: str) -> Any:
    """The out tensors after the call; or the exception."""
    out = [make(t).to(device) for t in tensors(expected)]
    pointers = [t.data_ptr() for t in out]
    given = out[0] if isinstance(expected, torch.Tensor) else tuple(out)
    torch.manual_seed(1)
    result, error = outcome(lambda: op(value[0], *value[1], **value[2], out=given))
    if error is not None:
        return error
    for t, pointer, wanted in zip(out, pointers, tensors(expected), strict=True):
        assert t.device.type == torch.device(device).type and t.shape == wanted.shape
        if make is filled:
            assert t.data_ptr() == pointer, "an out= of the right size was moved"
    for mine, given_one in zip(tensors(result), out, strict=False):  # some return nothing
        assert mine.data_ptr() == given_one.data_ptr()
    return out


class TestOps(TestCase):
    @ops(op_db, dtypes=DTYPES)
    def test_forward(self, device: str, dtype: torch.dtype, op: Any) -> None:
        cases = 0
        with exclusions("forward", case_name(op), dtype):
            for sample in samples_of(op, dtype):
                # Copies for both: some operators change their inputs, and some inputs depend on each other.
                theirs, ours = to_device(value_of(sample), "cpu"), to_device(value_of(sample), device)
                expected, error = outcome(lambda s=sample, v=theirs: run(op, s, v))
                if error is not None:  # what the CPU cannot do need not be done
                    continue
                result = run(op, sample, ours)
                assert_same_results(op, result, expected)
                cases += 1
            compared(cases)

    @ops(op_db, dtypes=DTYPES)
    def test_backward(self, device: str, dtype: torch.dtype, op: Any) -> None:
        if not op.supports_autograd or not (dtype.is_floating_point or dtype.is_complex):
            raise unittest.SkipTest("no autograd")
        cases = 0
        with exclusions("backward", case_name(op), dtype):
            for sample in samples_of(op, dtype, requires_grad=True):
                theirs, ours = to_device(value_of(sample), "cpu"), to_device(value_of(sample), device)
                expected, error = outcome(lambda s=sample, v=theirs: grads(run(op, s, v), v))
                if error is not None:
                    continue
                result = grads(run(op, sample, ours), ours)
                if not is_undefined(op):
                    assert_same_grads(result, expected)
                cases += bool(expected)
            compared(cases)

    @ops([op for op in op_db if op.supports_out], dtypes=DTYPES)
    def test_out(self, device: str, dtype: torch.dtype, op: Any) -> None:
        if op.name in ("fft.ihfft2", "fft.ihfftn"):
            raise unittest.SkipTest("on one dimension, its out= variant leaves parts of the result undefined")
        with exclusions("out", case_name(op), dtype):
            for sample in samples_of(op, dtype):
                value = value_of(sample)
                expected, error = outcome(lambda v=value: op(v[0], *v[1], **v[2]))
                if error is not None or not tensors(expected) or is_undefined(op):
                    continue
                ours = to_device(value, device)
                for make in (filled, lambda t: torch.empty(0, dtype=t.dtype), wider):
                    theirs = with_out(op, value, expected, make, "cpu")
                    if isinstance(theirs, Exception):
                        with self.assertRaises(type(theirs)):
                            result = with_out(op, ours, expected, make, device)
                            if isinstance(result, Exception):
                                raise result
                    else:
                        result = with_out(op, ours, expected, make, device)
                        if isinstance(result, Exception):
                            raise result
                        assert_same_results(op, result, theirs)
                if DEVICE_TYPE != "cpu" and tensors(value):  # an out tensor on another device is refused
                    wrong = with_out(op, ours, expected, filled, "cpu")
                    assert isinstance(wrong, Exception), "an out= on the CPU was accepted"

    @ops([op for op in op_db if op.inplace_variant is not None], dtypes=DTYPES)
    def test_inplace(self, device: str, dtype: torch.dtype, op: Any) -> None:
        function = op.inplace_variant
        with exclusions("inplace", case_name(op), dtype):
            for sample in samples_of(op, dtype):
                if sample.broadcasts_input or not isinstance(sample.input, torch.Tensor):
                    continue
                theirs = to_device(value_of(sample), "cpu")
                theirs = (theirs[0].clone(), *theirs[1:])
                ours = to_device(theirs, device)
                torch.manual_seed(1)
                expected, error = outcome(lambda v=theirs: function(v[0], *v[1], **v[2]))
                torch.manual_seed(1)
                if error is not None:
                    with self.assertRaises(type(error)):
                        function(ours[0], *ours[1], **ours[2])
                    continue
                result = function(ours[0], *ours[1], **ours[2])
                assert result is ours[0] or result.data_ptr() == ours[0].data_ptr()
                assert_same_results(op, result, expected)

    @ops([op for op in op_db if op.error_inputs_func is not None], dtypes=OpDTypes.none)
    def test_errors(self, device: str, op: Any) -> None:
        def call(sample: Any) -> Any:
            return op(sample.input, *sample.args, **sample.kwargs)

        with exclusions("errors", case_name(op)):
            torch.manual_seed(0)
            on_cpu = list(op.error_inputs("cpu"))
            torch.manual_seed(0)
            for mine, theirs in zip(op.error_inputs(device), on_cpu, strict=False):
                _, expected = outcome(lambda e=theirs: call(e.sample_input))
                if expected is None:
                    continue
                _, error = outcome(lambda e=mine: call(e.sample_input))
                assert error is not None, f"no error; the CPU says: {expected}"
                assert isinstance(error, (mine.error_type, type(expected))), f"{error!r}; the CPU raises {expected!r}"


instantiate_device_type_tests(TestOps, globals(), only_for=DEVICE_TYPE, allow_mps=False)
