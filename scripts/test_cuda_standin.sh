#!/usr/bin/env bash
# The allocator under torch.cuda, tested without a GPU: a CUDA build of torch over the stand-in
# driver and runtime of tests/cuda_standin. Arguments go to pytest.
#
#   MYBACKEND_CUDA_VENV    the environment's folder (default .venv-cuda); made when it is not there
#   MYBACKEND_CUDA_TORCH   the torch requirement (default torch==2.14.1: a CUDA build of 5.5 GB)
#   PYTHON3                the Python to make the environment with (default python3)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ROOT=$PWD
VENV="${MYBACKEND_CUDA_VENV:-$ROOT/.venv-cuda}"
PYTHON="$VENV/bin/python"
source scripts/cuda_environment.sh

if [ ! -x "$PYTHON" ]; then
  say "making $VENV"
  "${PYTHON3:-python3}" -m venv "$VENV"
fi
if ! (cd / && "$PYTHON" -c 'import torch; assert torch.version.cuda' 2> /dev/null); then
  say "installing ${MYBACKEND_CUDA_TORCH:-torch==2.14.1} (5.5 GB)"
  "$PYTHON" -m pip install --quiet "${MYBACKEND_CUDA_TORCH:-torch==2.14.1}" numpy
fi
(cd / && "$PYTHON" -c 'import pytest' 2> /dev/null) || "$PYTHON" -m pip install --quiet 'pytest>=8'
build_copy

say "building the stand-ins"
SITE=$("$PYTHON" -c 'import importlib.util as u, os; print(os.path.dirname(u.find_spec("torch").submodule_search_locations[0]))')
CUDA_INCLUDE=()
for folder in "${CUDA_HOME:-/usr/local/cuda}/include" "$SITE"/nvidia/cu*/include; do
  [ -e "$folder/cuda_runtime_api.h" ] && CUDA_INCLUDE=(-I"$folder" -I"$SITE/triton/backends/nvidia/include") && break
done
mkdir -p "$WORK/standin"
CXX="${CXX:-c++}"
so() { "$CXX" -std=c++20 -O1 -fPIC -shared -Icsrc "${CUDA_INCLUDE[@]}" "$@"; }
so tests/cuda_standin/libcuda.cpp -o "$WORK/standin/libcuda.so.1" -Wl,-soname,libcuda.so.1
so tests/cuda_standin/libnvidia_ml.cpp -o "$WORK/standin/libnvidia-ml.so.1" -Wl,-soname,libnvidia-ml.so.1
so tests/cuda_standin/libcudart.cpp -o "$WORK/standin/preload_cudart.so" -L"$WORK/standin" -l:libcuda.so.1 -Wl,-rpath,"$WORK/standin"
"$CXX" -std=c++20 -O1 -fPIC -shared -w tests/cuda_standin/replay.cpp -o "$WORK/standin/libreplay.so" -I"$SITE/torch/include" "${CUDA_INCLUDE[@]}" \
  -L"$SITE/torch/lib" -lc10_cuda -lc10 -Wl,-rpath,"$SITE/torch/lib"

say "tests"
# Not from the project's folder, whose mybackend belongs to another torch. The stand-ins are for
# the tests' child processes: only those are started with them.
cd "$WORK"
MYBACKEND_STANDIN_FOLDER="$WORK/standin" "$PYTHON" -m pytest -p no:cacheprovider -q -c /dev/null --rootdir "$ROOT/tests/cuda_standin" \
  --confcutdir "$ROOT/tests/cuda_standin" "$ROOT/tests/cuda_standin" "$@"
