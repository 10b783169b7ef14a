#!/usr/bin/env bash
# PyTorch's operators beside the CPU, with every sample input (scripts/test.sh takes a few of each).
# Resumable: operators that passed are not run again until RESTART=1. Arguments go to pytest.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare test models lint
export MYBACKEND_CONFORMANCE=full OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
DONE="$ROOT/build/conformance"
mkdir -p "$DONE"
[ "${RESTART:-0}" = 1 ] && rm -f "$DONE"/*
status=0
for group in forward backward out inplace errors; do
  if [ -f "$DONE/$group" ]; then
    say "$group: passed before (RESTART=1 runs it again)"
    continue
  fi
  say "$group"
  if "$PYTHON" -m pytest tests/pytorch -q -n "$(nproc)" --dist worksteal -k "test_$group" "$@"; then
    touch "$DONE/$group"
  else
    status=1
  fi
done
exit $status
