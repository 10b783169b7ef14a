"""CUDA kernels for the stand-in: its device memory is the host's, so each of torch's operators on CUDA
tensors can be the CPU's kernel over the same bytes.

`install()` puts them in place of torch's own, which the stand-in cannot launch. What is left as it is:
operators that make tensors, resize them or give views (they launch nothing).
"""

from __future__ import annotations

import ctypes
from collections import Counter
from typing import Any

import torch
from torch.utils._pytree import tree_map

LAUNCH_NOTHING = {
    "empty", "empty_strided", "resize_", "as_strided", "view", "_reshape_alias", "set_", "record_stream", "unfold",
    "_has_compatible_shallow_copy_type", "_fused_sdp_choice", "is_pinned", "_pin_memory", "is_set_to", "alias",
}  # fmt: skip
calls: Counter[str] = Counter()
generators: list[torch.Generator] = []  # that were given to kernels
_library = None


def _bytes(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the bytes of a CUDA tensor."""
    address, nbytes = _bytes(tensor)
    empty = torch.empty(0, dtype=tensor.dtype)
    if nbytes == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    flat = torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)
    alias = empty.set_(flat.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
    return alias.conj() if tensor.is_conj() else alias


def _to_device(result: torch.Tensor, device: torch.device) -> torch.Tensor:
    made = torch.empty_strided(result.size(), result.stride(), dtype=result.dtype, device=device)
    address, nbytes = _bytes(made)
    if result.numel():
        ctypes.memmove(address, result.data_ptr(), min(nbytes, result.untyped_storage().nbytes()))
    return made


def _kernel(op: Any) -> Any:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        calls[op.name()] += 1
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []

        def lend(value: Any) -> Any:
            if isinstance(value, torch.Generator):
                generators.append(value)
                return torch.Generator().manual_seed(value.initial_seed())
            if isinstance(value, torch.device):
                return torch.device("cpu")
            if not isinstance(value, torch.Tensor) or value.device.type != "cuda":
                return value
            for original, alias in seen:
                if original is value:
                    return alias
            alias = _on_host(value)
            seen.append((value, alias))
            return alias

        device = torch.device("cuda", torch.cuda.current_device())
        results = op(*tree_map(lend, args), **tree_map(lend, kwargs))

        def give_back(result: Any) -> Any:
            if not isinstance(result, torch.Tensor):
                return result
            for original, alias in seen:
                if alias is result:
                    if original.size() != alias.size():
                        original.resize_(alias.size())
                        address, nbytes = _bytes(original)
                        ctypes.memmove(address, alias.data_ptr(), nbytes)
                    return original
                if alias.untyped_storage().data_ptr() == result.untyped_storage().data_ptr() and result.numel():
                    return original.as_strided(result.size(), result.stride(), result.storage_offset())
            return _to_device(result, device)

        return tree_map(give_back, results)

    return kernel


def _lstm_cell(igates: Any, hgates: Any, cx: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    """CUDA has a fused cell where the CPU composes one."""
    gates = igates + hgates + (0 if b_ih is None else b_ih) + (0 if b_hh is None else b_hh)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def _lstm_cell_backward(grad_hy: Any, grad_cy: Any, cx: Any, cy: Any, workspace: Any, has_bias: bool) -> Any:
    i, f, g, o = workspace.chunk(4, 1)
    grad_hy = torch.zeros_like(cy) if grad_hy is None else grad_hy
    grad_c = grad_hy * o * (1 - cy.tanh() ** 2) + (0 if grad_cy is None else grad_cy)
    gates = torch.cat(
        [
            grad_c * g * i * (1 - i),
            grad_c * cx * f * (1 - f),
            grad_c * i * (1 - g * g),
            grad_hy * cy.tanh() * o * (1 - o),
        ],
        1,
    )
    return gates, grad_c * f, gates.sum(0) if has_bias else None


class _Function:
    """What _kernel needs of an operator."""

    def __init__(self, name: str, function: Any) -> None:
        self.name = lambda: name
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def install() -> None:
    """For all operators of aten that have a CUDA kernel and a CPU one."""
    global _library
    _library = torch.library.Library("aten", "IMPL")
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        if namespace != "aten" or base in LAUNCH_NOTHING:
            continue
        if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"):
            continue
        try:
            op = getattr(getattr(torch.ops.aten, base), overload or "default")
        except AttributeError:
            continue
        _library.impl(rest, _kernel(op), "CUDA", allow_override=True)
    for name, function in (
        ("_thnn_fused_lstm_cell", _lstm_cell),
        ("_thnn_fused_lstm_cell_backward_impl", _lstm_cell_backward),
    ):
        _library.impl(name, _kernel(_Function(f"aten::{name}", function)), "CUDA", allow_override=True)
    # Composite, and the way of every copy.
    _library.impl("copy_", _kernel(torch.ops.aten.copy_.default), "CUDA", allow_override=True)
