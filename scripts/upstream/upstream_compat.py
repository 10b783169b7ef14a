"""A pytest plugin for test files that are older than the installed torch: decorators that skip on
some platform, and that `torch.testing._internal` has dropped since, do nothing; questions about
CUDA that it has dropped are answered with no."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.testing._internal import common_cuda, common_device_type, common_mkldnn, common_utils

PREFIXES = ("skipIf", "skipUnless", "skipCUDAIf", "skipMPS", "expectedFailure", "unMarkDynamo", "bf32_on_and_off")


def _nothing(*args: Any, **kwargs: Any) -> Any:
    """As a decorator, or as a function that makes one."""
    if len(args) == 1 and not kwargs and callable(args[0]):
        return args[0]
    return lambda decorated: decorated


def _missing_from(module: str) -> Callable[[str], Any]:
    def get(name: str) -> Any:
        if name.startswith(PREFIXES):
            return _nothing
        if name.startswith("tf32_is"):
            return lambda: False
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return get


for _module in (common_utils, common_device_type, common_cuda, common_mkldnn):
    _module.__getattr__ = _missing_from(_module.__name__)  # type: ignore[attr-defined]
