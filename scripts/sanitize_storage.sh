#!/usr/bin/env bash
# Builds the extension with AddressSanitizer and runs the storage tests with it: mapped files,
# sharing between processes (both strategies), lifetimes. Needs some minutes. Further arguments
# go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare test
SITE="$ROOT/build/address-site"
say "building with AddressSanitizer"
rm -rf "$SITE" build/lib.*
MYBACKEND_SANITIZE=address PATH="$VENV/bin:$PATH" "$PYTHON" -m pip install --quiet --no-build-isolation --no-deps --target "$SITE" .
# Away from the sources, so that the instrumented package is the one that is imported.
rm -rf "$SITE/tests"
cp -r tests "$SITE/tests"
cd "$SITE/tests"
export OMP_NUM_THREADS=1  # OpenMP does not survive a fork
export PYTHONPATH="$SITE" LD_PRELOAD="$("${CXX:-c++}" -print-file-name=libasan.so):$("${CXX:-c++}" -print-file-name=libstdc++.so)"
# (libstdc++ too: AddressSanitizer looks for its exceptions before Python has loaded it.)
# Python and torch free little at exit; what we lose, the tests count themselves.
export ASAN_OPTIONS="detect_leaks=0:abort_on_error=1"
"$PYTHON" -c 'import mybackend; print("testing", mybackend.__file__)'
# Two tests cannot run so: AddressSanitizer makes mlock do nothing, and its own memory exceeds the
# limit on private memory.
exec "$VENV/bin/pytest" -n 2 --rootdir . --deselect test_pinned.py::test_not_being_locked_is_reported \
  --deselect test_mapped.py::test_a_training_run_in_files_below_the_memory_limit -q -p no:cacheprovider test_mapped.py test_sharing.py test_storage.py test_pinned.py test_plan.py "$@"
