#!/usr/bin/env bash
# The allocator on a real GPU, in a few minutes: both swap-ins and tensors of mybackend, and
# the native allocator's time beside theirs. Prints a table, writes build/gpu.json, and says what it
# skipped and why. Needs a CUDA build of torch 2.11 or later and a C++20 compiler.
#
#   PYTHON   the Python with that torch (default python3)
# Arguments go to scripts/gpu_checks.py (--help).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ROOT=$PWD
PYTHON=$(command -v "${PYTHON:-python3}")
source scripts/cuda_environment.sh

(cd / && "$PYTHON" -c 'import torch; assert torch.version.cuda' 2> /dev/null) ||
  { echo "error: $PYTHON has no CUDA build of torch (set PYTHON)" >&2; exit 1; }
build_plain "$WORK/plain"
if (cd / && "$PYTHON" -c 'import torch, sys; sys.exit(tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) < (2, 13))'); then
  build_copy
else
  echo "skipped: the complete swap-in and tensors of mybackend need torch 2.13 or later" >&2
fi
say "checks"
cd "$WORK"
"$PYTHON" "$ROOT/scripts/gpu_checks.py" --plain "$WORK/plain" --output "$ROOT/build/gpu.json" "$@"
