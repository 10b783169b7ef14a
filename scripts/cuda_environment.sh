# Sourced by the scripts that need a CUDA build of torch: builds a copy of the project for it under
# build/cuda (the build in the project's own folder may belong to another torch).
#   $PYTHON   the Python with that torch

WORK="$ROOT/build/cuda"
say() { printf '\033[1m==> %s\033[0m\n' "$*" >&2; }

build_copy() {
  (cd / && "$PYTHON" -c 'import ninja, wheel, setuptools, numpy' 2> /dev/null) ||
    "$PYTHON" -m pip install --quiet 'setuptools>=70' wheel ninja numpy
  say "building mybackend for $(cd /; "$PYTHON" -c 'import torch; print("torch", torch.__version__)')"
  mkdir -p "$WORK/src/mybackend"
  cp -rpu csrc setup.py pyproject.toml README.md LICENSE* mybackend_autoload.py "$WORK/src/"
  cp -pu mybackend/*.py mybackend/*.pyi mybackend/py.typed "$WORK/src/mybackend/"
  (cd "$WORK/src" && find csrc -type f | while read -r file; do [ -e "$ROOT/$file" ] || rm "$file"; done)
  rm -f "$WORK/src/mybackend/_build.py"
  if ! (cd "$WORK/src" && PATH="$(dirname "$PYTHON"):$PATH" "$PYTHON" -m pip install --no-build-isolation --no-deps --editable . > "$WORK/build.log" 2>&1); then
    tail -n 60 "$WORK/build.log" >&2
    echo "error: the build failed; the whole log is in build/cuda/build.log" >&2
    exit 1
  fi
}

# The plain swap-in alone, for a torch that mybackend's extension does not know: the torch-free
# library and mybackend/cuda.py, in the folder $1.
build_plain() {
  local folder=$1 source object
  local -a objects=()
  say "building libmybackend_core.so alone"
  mkdir -p "$folder/objects"
  # A header may be in any of them.
  find csrc -name '*.h' -o -name '*.inc' | while read -r source; do
    [ -z "$(find "$folder/objects" -name '*.o' ! -newer "$source" -print -quit)" ] || { rm -f "$folder"/objects/*.o; break; }
  done
  for source in $(find csrc/base csrc/driver csrc/core csrc/replay csrc/capi -name '*.cpp'); do
    object="$folder/objects/${source//\//_}.o"
    objects+=("$object")
    [ "$object" -nt "$source" ] && continue
    while [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; do wait -n; done
    "${CXX:-c++}" -std=c++20 -O2 -fPIC -fno-semantic-interposition -DMYBACKEND_VERSION='"0"' -Icsrc -c "$source" -o "$object" &
  done
  wait
  "${CXX:-c++}" -shared "${objects[@]}" -o "$folder/libmybackend_core.so" -Wl,-soname,libmybackend_core.so -pthread -ldl
  cp mybackend/cuda.py "$folder/mybackend_cuda.py"
}
