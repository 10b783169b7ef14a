#!/usr/bin/env bash
# PyTorch's operators, modules and optimizers on the device beside the CPU, all of it, resumable:
# makes the environment and runs scripts/conformance.py, which takes the arguments (--help).
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare test models lint
exec "$PYTHON" scripts/conformance.py "$@"
