"""mybackend: a PyTorch device whose memory is ours and whose compute is borrowed.

Importing the package registers the device: `tensor.to("mybackend")` and `torch.mybackend` work.
`import torch` does it by itself. Neither does where torch has a GPU to use, unless it is asked for:
once a device like ours is named, PyTorch (seen with 2.14) cannot run the backward of torch.cuda's tensors.
There `mybackend.register()`, a `driver` in the configuration, or MYBACKEND_DEVICE=1 (0: never at
import) registers it; `mybackend.cuda.install()` is for torch.cuda's own tensors and needs no device.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch

try:
    from mybackend import _build
except ImportError as error:
    raise ImportError("mybackend is not built; run `pip install .` in its folder") from error

if torch.__version__ != _build.TORCH_VERSION:
    raise ImportError(
        f"mybackend {_build.VERSION} was built for torch {_build.TORCH_VERSION}, but torch {torch.__version__} is "
        "installed; build it again against this torch: `pip install --force-reinstall --no-deps .`"
    )

import mybackend_autoload
from mybackend import _C, config, cpu, cuda, memory, replay, storage
from mybackend._register import register
from mybackend.cpu import allocate_aligned_bytes

__version__: str = _C.__version__


def _registers_at_import() -> bool:
    wish = os.environ.get("MYBACKEND_DEVICE", "")
    if wish in ("0", "1"):
        return wish == "1"
    if wish:
        warnings.warn(f"MYBACKEND_DEVICE: expected 0 or 1, not {wish!r}; ignored", stacklevel=3)
    return not mybackend_autoload.has_gpu() or config.names_a_device()


try:
    _C._config_read_environment()
except ValueError as error:  # raised again, as an error, by the first use of the device
    warnings.warn(f"mybackend: {error}", stacklevel=2)
if os.environ.get("MYBACKEND_CPU_ALLOCATOR", "0") not in ("", "0"):
    cpu.install()
if _registers_at_import():
    register()


def library_path() -> str:
    """The path of libmybackend_core.so, which needs neither torch nor Python."""
    return str(Path(__file__).resolve().parent / "libmybackend_core.so")


def include_path() -> str:
    """The folder to name with -I for `#include <mybackend/aligned_bytes.h>`."""
    return str(Path(__file__).resolve().parent / "include")


__all__ = [
    "__version__",
    "allocate_aligned_bytes",
    "config",
    "cpu",
    "cuda",
    "include_path",
    "library_path",
    "memory",
    "register",
    "replay",
    "storage",
]
