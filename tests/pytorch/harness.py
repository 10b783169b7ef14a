"""What the conformance tests share: samples on the device, exact comparison, exclusions."""

from __future__ import annotations

import itertools
import os
import unittest
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.testing._internal.common_device_type import OpDTypes
from torch.utils._pytree import tree_leaves, tree_map

from .exclusions import EXCLUSIONS

# Everything (scripts/conformance.py), or, by default, what fits into the ordinary test run.
FULL = os.environ.get("MYBACKEND_CONFORMANCE") == "full"
# The device beside the CPU; or the CPU beside itself, for the counts that the device's are compared with.
DEVICE_TYPE = os.environ.get("MYBACKEND_CONFORMANCE_DEVICE", "privateuse1")
SAMPLES = 10**9 if FULL else 6
DTYPES = OpDTypes.supported if FULL else OpDTypes.any_one

# The groups of scripts/conformance.py: the tests named test_GROUP_..., in the order in which they run.
GROUPS = (
    "forward", "backward", "out", "inplace", "errors", "reference", "noncontiguous", "views", "conjugate", "negative",
    "gradgrad", "forward_ad", "vmap", "fake", "meta", "two_devices", "module", "optimizer",
)  # fmt: skip

# Results of these are uninitialized memory.
UNDEFINED = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted")

# Their last bits depend on where LAPACK's operands lie: the CPU does not reproduce its own.
CLOSE = ("linalg.lstsq",)


def is_undefined(op: Any) -> bool:
    return op.name.rpartition(".")[2] in UNDEFINED


def samples_of(op: Any, dtype: torch.dtype, requires_grad: bool = False, kind: str = "sample_inputs") -> list[Any]:
    """Inputs on the CPU; the test makes their copies on the device."""
    torch.manual_seed(0)
    return list(itertools.islice(getattr(op, kind)("cpu", dtype, requires_grad=requires_grad), SAMPLES))


def value_of(sample: Any) -> Any:
    return (sample.input, sample.args, sample.kwargs)


def run(op: Any, sample: Any, value: Any) -> Any:
    input_, args, kwargs = value
    torch.manual_seed(1)
    return sample.output_process_fn_grad(op(input_, *args, **kwargs))


def move_tensor(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A copy with all of its storage: some operators look beyond the tensor."""
    if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
        return tensor.to(device, copy=True)
    storage = tensor.untyped_storage()
    if storage.nbytes() == tensor.numel() * tensor.itemsize or storage.nbytes() % tensor.itemsize:
        return tensor.to(device, copy=True)
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        storage, 0, (storage.nbytes() // tensor.itemsize,), (1,)
    )
    return whole.to(device, copy=True).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def to_device(value: Any, device: str) -> Any:
    """The same values with a copy of every tensor on the device, detached; what requires grad is a leaf."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return move_tensor(leaf.detach(), device).requires_grad_(leaf.requires_grad)
        if isinstance(leaf, torch.device) or (isinstance(leaf, str) and leaf == "cpu"):
            return torch.device(device)
        return leaf

    return tree_map(move, value)


def tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def assert_same(ours: Any, theirs: Any, exact: bool = True) -> None:
    """The same tensors, bit for bit: the compute is the CPU's own."""
    a, b = tensors(ours), tensors(theirs)
    assert len(a) == len(b), f"{len(a)} results, the CPU has {len(b)}"
    for x, y in zip(a, b, strict=True):
        assert x.requires_grad == y.requires_grad
        options = {"rtol": 0, "atol": 0} if exact else {}
        torch.testing.assert_close(x.detach().cpu(), y.detach(), equal_nan=True, check_stride=False, **options)


def assert_same_results(op: Any, ours: Any, theirs: Any) -> None:
    """assert_same(), as exactly as the operator can be compared."""
    if not is_undefined(op):
        assert_same(ours, theirs, exact=op.name not in CLOSE)


def grads(outputs: Any, inputs: Any, create_graph: bool = False) -> tuple[Any, ...]:
    """Gradients of the outputs' sums with respect to every input that requires grad; None where unused."""
    outputs = [t for t in tensors(outputs) if t.requires_grad]
    inputs = [t for t in tensors(inputs) if t.requires_grad]
    if not outputs or not inputs:
        return ()
    ones = [torch.ones_like(t) for t in outputs]
    return torch.autograd.grad(outputs, inputs, ones, allow_unused=True, create_graph=create_graph)


def assert_same_grads(ours: Any, theirs: Any, exact: bool = True) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            assert_same(mine.detach(), other.detach(), exact)


def case_name(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


@contextmanager
def exclusions(group: str, case: str, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Runs a case. An excluded one, named as NAME or NAME:DTYPE, must fail, so that the list can
    only shrink."""
    known = EXCLUSIONS.get(group, {}) if DEVICE_TYPE != "cpu" else {}
    reason = known.get(f"{case}:{str(dtype).removeprefix('torch.')}", known.get(case))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except unittest.SkipTest:
        raise
    except Exception as error:
        if reason is None:
            raise
        raise unittest.SkipTest(f"excluded: {reason} ({type(error).__name__})") from error
    else:
        assert reason is None, f"{group}: {case} passes now: take it out of exclusions.py"


def outcome(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """What it returns, or what it raises."""
    try:
        return function(), None
    except Exception as error:
        return None, error


def compared(cases: int) -> None:
    """Skips a test in which the CPU could do nothing."""
    if cases == 0:
        raise unittest.SkipTest("no sample that the CPU can run")
