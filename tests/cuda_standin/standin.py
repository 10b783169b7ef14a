"""Programs on the stand-in driver and runtime, each in a process of its own. What they need is built
by scripts/test_cuda_standin.sh, which names its folder in MYBACKEND_STANDIN_FOLDER."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

FOLDER = os.environ.get("MYBACKEND_STANDIN_FOLDER", "")
NATIVE = ""
COMPLETE = "import mybackend; mybackend.cuda.install()"
PLAIN = """
import mybackend
torch.cuda.memory.change_current_allocator(mybackend.cuda.pluggable_allocator())
"""
PRELUDE = f"""
import ctypes, gc, json, os, sys, torch
st = ctypes.CDLL({FOLDER + "/libcuda.so.1"!r})
st.standin_used_bytes.restype = ctypes.c_size_t
st.standin_calls.restype = ctypes.c_int64
st.standin_live_events.restype = ctypes.c_size_t
st.standin_fail.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int]
st.standin_advance.argtypes = [ctypes.c_void_p]
"""


def run(code: str, swap: str = COMPLETE, standin: bool = True, expect: int = 0, **environment: str) -> str:
    """Runs Python in a process of its own, with the swap-in done before `code`; its output."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MYBACKEND_", "PYTORCH_", "LD_", "CUDA_"))}
    env |= {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "MYBACKEND_DEVICE": "0"} | environment  # as where a GPU is
    if standin:
        env |= {"LD_LIBRARY_PATH": FOLDER, "LD_PRELOAD": f"{FOLDER}/preload_cudart.so"}
    text = (PRELUDE if standin else "import torch\n") + textwrap.dedent(swap) + "\n" + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", text], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == expect, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
