"""Registers the device with torch, once: its name, its module, its methods, and the few places
where core's Python code does not yet ask a PrivateUse1 backend."""

from __future__ import annotations

import atexit
import functools
import os
import warnings

import torch

from mybackend import _C, cuda, storage, torch_module

DEVICE_NAME = "mybackend"
_registered = False


def register() -> None:
    """Registers the device: names PrivateUse1 `mybackend` and adds `torch.mybackend`. Idempotent.

    The import of the package does it, unless torch has a GPU to use. Raises RuntimeError when another
    backend has taken PrivateUse1.
    """
    global _registered
    if _registered:
        return
    current = torch._C._get_privateuse1_backend_name()
    if current not in ("privateuseone", DEVICE_NAME):
        raise RuntimeError(
            f"mybackend: another backend is loaded as PrivateUse1 in this process ('{current}'), and torch has room "
            "for one; set MYBACKEND_AUTOLOAD=0 to keep mybackend from loading"
        )
    torch.utils.rename_privateuse1_backend(DEVICE_NAME)
    torch._register_device_module(DEVICE_NAME, torch_module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    _C._register_boxed_kernels()
    _patch_dlpack()
    storage._register()
    _C._set_cuda_hooks(cuda._is_free, cuda._lend)
    atexit.register(_C._drain_autograd_threads)
    _registered = True
    if "MYBACKEND_DEVICE_COUNT" in os.environ and not os.environ["MYBACKEND_DEVICE_COUNT"].isdigit():
        warnings.warn("MYBACKEND_DEVICE_COUNT: expected a whole number from 1 to 64", stacklevel=3)


def _patch_dlpack() -> None:
    """Core maps the *original* name of PrivateUse1 to DLPack's device type for extensions; after
    the renaming its test no longer matches."""
    from torch.utils.dlpack import DLDeviceType

    original = torch.Tensor.__dlpack_device__

    @functools.wraps(original)
    def __dlpack_device__(self):  # type: ignore[no-untyped-def]
        if type(self) is torch.Tensor and self.device.type == DEVICE_NAME:
            return (DLDeviceType.kDLExtDev, self.device.index)
        return original(self)

    torch.Tensor.__dlpack_device__ = __dlpack_device__  # type: ignore[method-assign]
