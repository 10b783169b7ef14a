"""What `import torch` runs for this package (entry point group `torch.backends`).

It stands outside the package so that deciding *not* to load costs nothing: PrivateUse1, once
named, always wins `torch.accelerator.current_accelerator()`, which would surprise whoever has
a GPU and did not ask for this device.
"""

from __future__ import annotations

import os
import sys
import warnings


def has_gpu() -> bool:
    """Whether this torch build has a GPU to use; looks at device files only, starts no driver."""
    import torch

    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        return False
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return False  # hidden from this process
    return any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))


def autoload() -> None:
    """Loads mybackend, unless a GPU is there and MYBACKEND_AUTOLOAD=1 is not; =0 never loads."""
    wish = os.environ.get("MYBACKEND_AUTOLOAD", "")
    if wish not in ("", "0", "1"):
        warnings.warn(f"MYBACKEND_AUTOLOAD: expected 0 or 1, not {wish!r}; ignored", stacklevel=2)
        wish = ""
    if wish == "0" or "mybackend" in sys.modules or (wish != "1" and has_gpu()):
        return
    try:
        import mybackend

        mybackend.register()
    except Exception as error:  # an exception here would break `import torch` for everyone
        warnings.warn(f"mybackend was not loaded: {error}", stacklevel=2)
