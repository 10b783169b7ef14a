#!/usr/bin/env bash
# Everything that the project promises, on any machine with Python and a C++ compiler.
# Arguments go to pytest: bash scripts/test.sh -k storage
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare test models lint

if [ $# -eq 0 ]; then
  say "format and lint"
  "$VENV/bin/ruff" check --quiet .
  "$VENV/bin/ruff" format --check --quiet .
  find csrc tests/cpp tests/cuda_standin -name '*.h' -o -name '*.cpp' | xargs "$VENV/bin/clang-format" --dry-run -Werror
  "$PYTHON" scripts/check_layers.py
fi

say "tests"
workers=$(nproc)
[ "$workers" -gt 4 ] && workers=4
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
"$PYTHON" -m pytest -n "$workers" --dist worksteal "$@"

if [ $# -eq 0 ]; then
  for conf in expandable_segments:True max_split_size_mb:32,garbage_collection_threshold:0.5 roundup_power2_divisions:4; do
    say "the device's tests with $conf"
    MYBACKEND_ALLOC_CONF="$conf" "$PYTHON" -m pytest -n "$workers" --dist worksteal -W ignore \
      tests/test_{device,storage,memory,borrow,random,amp,streams,training,pinned}.py
  done
fi

# The allocator under torch.cuda needs a CUDA build of torch (5.5 GB): only where it is already, or asked for.
if [ $# -eq 0 ] && { [ "${MYBACKEND_TEST_CUDA:-}" = 1 ] || [ -x "${MYBACKEND_CUDA_VENV:-.venv-cuda}/bin/python" ]; }; then
  bash scripts/test_cuda_standin.sh
fi
