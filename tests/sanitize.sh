#!/bin/sh
# Builds the extension with AddressSanitizer, UBSan and libstdc++'s assertions in out/sanitize, a copy of the sources,
# and runs there the tests of what is written in C++. PYTHON is the interpreter (default python3). Arguments: the test
# files, if not all of these, and options for pytest.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
case $PYTHON in */*) PYTHON=$(cd "$(dirname "$PYTHON")" && pwd)/$(basename "$PYTHON") ;; esac

# Times are kept, so that only what has changed is compiled again.
mkdir -p out/sanitize
rm -rf out/sanitize/amp_patch out/sanitize/csrc out/sanitize/tests
cp -Rp amp_patch csrc tests setup.py pyproject.toml README.md out/sanitize
cd out/sanitize
rm -f amp_patch/_build.py amp_patch/_C.*
AMP_PATCH_SANITIZE=1 AMP_PATCH_REQUIRE_EXT=1 AMP_PATCH_NO_EXT=0 "$PYTHON" setup.py -q build_ext --inplace \
    >build.log 2>&1 || { cat build.log >&2; exit 1; }
nm -D amp_patch/_C.*.so | grep -q __asan_report || { echo "sanitize.sh: the extension is not instrumented" >&2; exit 1; }

# Python has no sanitizer in it, so the runtime is loaded before it; and libstdc++ too, or there would be no exceptions
# to intercept yet. Python and torch leave much to the end of the process: leaks are not looked for. Torch is not
# instrumented, but its memory comes from the sanitizer's malloc. CXXFLAGS: for what test_chunk.py compiles.
CXX=${CXX:-c++}
runtime="$("$CXX" -print-file-name=libasan.so) $("$CXX" -print-file-name=libstdc++.so)"
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONPATH="$PWD" OMP_NUM_THREADS=2
export CXXFLAGS="-fsanitize=address,undefined -fno-sanitize-recover=all -D_GLIBCXX_ASSERTIONS"
OF_KERNELS="plan chunk multi_tensor lists update_scale kernel_errors steps step_layouts split stochastic_round step_chunk properties"
OF_CASTS="threads casts wrapped_names entered_casts weight_cache casts_in_modules registration cpu_half cpu_half_autograd low_sums"
FILES=
for name in $OF_KERNELS; do FILES="$FILES tests/multi_tensor/test_$name.py"; done
for name in $OF_CASTS; do FILES="$FILES tests/casts/test_$name.py"; done
case ${1:-} in tests/*) FILES= ;; esac
# Not the compilers of torch, which take minutes, nor the cases on plain torch and Python's wrappers, which run no C++ of
# ours. A report must reach the terminal: the process ends right after it.
OF_CPP="not compile and not [torch] and not [torch- and not -torch- and not -torch] and not [python and not -python"
LD_PRELOAD="$runtime" "$PYTHON" -m pytest --capture=sys -p no:cacheprovider -q -n "${WORKERS:-2}" --dist loadfile \
    -k "$OF_CPP" -m "not slow" $FILES "$@"
