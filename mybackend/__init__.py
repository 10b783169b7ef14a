"""mybackend: a PyTorch device whose memory is ours and whose compute is borrowed.

Importing the package names the device (`mybackend`), registers `torch.mybackend`, and makes
`tensor.to("mybackend")` work. `import torch` does it by itself, unless a GPU is present.
"""

from __future__ import annotations

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

from mybackend import _C, config, cpu, cuda, memory, replay, storage
from mybackend._register import register
from mybackend.cpu import allocate_aligned_bytes

__version__: str = _C.__version__

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
    "replay",
    "storage",
]
