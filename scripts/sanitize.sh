#!/usr/bin/env bash
# Builds the torch-free core with tests/cpp/stress_core.cpp under AddressSanitizer and UBSan, then
# under ThreadSanitizer, and runs it. With clang there, also the libFuzzer target.
#   OPERATIONS   operations of the first run (default 1000000)
#   CXX          the compiler (default c++)
#   FUZZ_SECONDS how long the libFuzzer target runs (default 60)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
OPERATIONS="${OPERATIONS:-1000000}"
CXX="${CXX:-c++}"
mkdir -p build/sanitize

# build NAME MAIN FLAGS...: compiles what is older than the sources, two at a time, and links.
build() {
  local name=$1 main=$2 source object
  local -a objects=()
  shift 2
  for source in $(find csrc/base csrc/driver csrc/core csrc/replay csrc/capi -name '*.cpp') "tests/cpp/$main"; do
    object="build/sanitize/$name-${source//\//_}.o"
    objects+=("$object")
    [ -f "$object" ] && [ -z "$(find csrc tests/cpp -newer "$object" -name '*.[hci]*' -print -quit)" ] && continue
    while [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; do wait -n; done
    "$CXX" -std=c++20 -O1 -g -fno-omit-frame-pointer "$@" -DMYBACKEND_VERSION='"sanitized"' -Icsrc -c "$source" -o "$object" &
  done
  wait
  "$CXX" "$@" "${objects[@]}" -o "build/sanitize/$name" -pthread
}

echo "==> AddressSanitizer and UBSan, $OPERATIONS operations"
build address stress_core.cpp -fsanitize=address,undefined -fno-sanitize-recover=all
ASAN_OPTIONS=detect_leaks=1 build/sanitize/address "$OPERATIONS"
echo "==> ThreadSanitizer"
build thread stress_core.cpp -fsanitize=thread
TSAN_OPTIONS="halt_on_error=1" setarch "$(uname -m)" -R build/sanitize/thread 100000 1 --threads-only

if command -v clang++ > /dev/null; then
  echo "==> libFuzzer, ${FUZZ_SECONDS:-60} seconds"
  CXX=clang++ build fuzz fuzz_core.cpp -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all
  mkdir -p build/sanitize/corpus
  build/sanitize/fuzz -max_total_time="${FUZZ_SECONDS:-60}" -max_len=4096 -timeout=20 -print_final_stats=1 \
    -artifact_prefix=build/sanitize/ build/sanitize/corpus 2>&1 | tail -n 12
else
  echo "==> libFuzzer: no clang++ here, skipped"
fi
