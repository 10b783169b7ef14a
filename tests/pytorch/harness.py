"""What the conformance tests share: samples on the device, exact comparison, exclusions."""

from __future__ import annotations

import os
import unittest
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from .exclusions import EXCLUSIONS

# Everything, or (default) what fits into the ordinary test run.
FULL = os.environ.get("MYBACKEND_CONFORMANCE") == "full"
SAMPLES = 10**9 if FULL else 6


def move_tensor(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """With all of its storage: some operators look beyond the tensor."""
    if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
        return tensor.to(device)
    storage = tensor.untyped_storage()
    if storage.nbytes() == tensor.numel() * tensor.itemsize or storage.nbytes() % tensor.itemsize:
        return tensor.to(device)
    whole = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, (storage.nbytes() // tensor.itemsize,), (1,))
    return whole.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def to_device(value: Any, device: str) -> Any:
    """The same values with every tensor on the device, detached; what requires grad is a leaf."""

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


def case_name(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


@contextmanager
def exclusions(group: str, case: str) -> Iterator[None]:
    """Runs a case. An excluded one must fail, so that the list can only shrink."""
    reason = EXCLUSIONS.get(group, {}).get(case)
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
