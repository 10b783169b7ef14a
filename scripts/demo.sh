#!/usr/bin/env bash
# Trains a small transformer on English text on `mybackend`, then on the CPU, and compares.
# Options (bash scripts/demo.sh --help): --steps, --size, --device, ...
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare
exec "$PYTHON" scripts/demo.py "$@"
