# Sourced by the other scripts: makes .venv with torch and the given extras, builds the package
# in place, and puts the environment's Python in $PYTHON. Quick when nothing changed.
#
#   PYTHON3           the Python to make the environment with (default python3, 3.10 or later)
#   MYBACKEND_TORCH   the torch requirement (default torch==2.13.0)
#   MYBACKEND_VENV    the environment's folder (default .venv)

set -euo pipefail
export CUDA_VISIBLE_DEVICES=""  # these scripts are about host memory, also where a GPU is
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT"
VENV="${MYBACKEND_VENV:-$ROOT/.venv}"
PYTHON="$VENV/bin/python"

say() { printf '\033[1m==> %s\033[0m\n' "$*" >&2; }

need() {
  command -v "$1" > /dev/null || { echo "error: $2" >&2; exit 1; }
}

# prepare EXTRA...: extras of pyproject.toml (test, models, lint)
prepare() {
  need "${PYTHON3:-python3}" "Python 3.10 or later is needed (python3)"
  need "${CXX:-c++}" "a C++20 compiler is needed (g++ 11 or later, or clang 14 or later)"
  if [ ! -x "$PYTHON" ]; then
    say "making $VENV"
    "${PYTHON3:-python3}" -m venv "$VENV"
  fi
  if ! "$PYTHON" -c 'import torch' 2> /dev/null; then
    say "installing torch (${MYBACKEND_TORCH:-torch==2.13.0})"
    "$PYTHON" -m pip install --quiet "${MYBACKEND_TORCH:-torch==2.13.0}" numpy
  fi
  local extras stamp wanted
  extras=$(IFS=,; echo "$*")
  stamp="$VENV/.mybackend-tools"
  wanted="$extras $(sha256sum pyproject.toml | cut -d' ' -f1)"
  if [ "$(cat "$stamp" 2> /dev/null || true)" != "$wanted" ]; then
    say "installing tools (setuptools, ninja${extras:+, extras: $extras})"
    "$PYTHON" - "$@" > "$VENV/.mybackend-requirements" << 'PY'
import sys
try:
    import tomllib
except ImportError:
    from pip._vendor import tomli as tomllib
with open("pyproject.toml", "rb") as file:
    extras = tomllib.load(file)["project"]["optional-dependencies"]
for line in ["setuptools>=70", "wheel", "ninja", "numpy", *(r for name in sys.argv[1:] for r in extras[name])]:
    print(line)
PY
    "$PYTHON" -m pip install --quiet -r "$VENV/.mybackend-requirements"
    echo "$wanted" > "$stamp"
  fi
  build
}

build() {
  local stamp="$VENV/.mybackend-build" state
  state=$({ "$PYTHON" -c 'import torch; print(torch.__version__)'; find csrc setup.py pyproject.toml mybackend_autoload.py -type f -exec sha256sum {} + | sort; } 2> /dev/null | sha256sum)
  if [ "$(cat "$stamp" 2> /dev/null || true)" = "$state" ] && "$PYTHON" -c 'from mybackend import _C' 2> /dev/null; then
    return
  fi
  say "building mybackend (the first time takes some minutes)"
  mkdir -p build
  if ! PATH="$VENV/bin:$PATH" "$PYTHON" -m pip install --no-build-isolation --no-deps --editable . > build/build.log 2>&1; then
    tail -n 60 build/build.log >&2
    echo "error: the build failed; the whole log is in build/build.log" >&2
    exit 1
  fi
  echo "$state" > "$stamp"
}
