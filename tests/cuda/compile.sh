#!/bin/sh
# Proves with nvcc, and no GPU, that csrc's device code compiles, and that bindings.cpp does with WITH_CUDA: warnings are
# errors, nothing is linked or run. As C++20, which newer releases of torch build extensions with; then all sources as
# C++17, which 2.11 and older ones do: to the PTX of one architecture, and .cpp files as far as the syntax. Prints the
# registers that the kernels use and what they spill, and, where there is an nvdisasm, how many loads they have in
# flight; too few are an error. PYTHON is the interpreter whose torch gives the headers (default python3), ARCHS the
# architectures, NVDISASM CUDA's disassembler (default: that on PATH, beside nvcc, or of PyPI's nvidia-cuda-nvdisasm in
# PYTHON).
set -eu
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
NVCC=${NVCC:-nvcc}
command -v "$NVCC" >/dev/null || { echo "compile.sh: no $NVCC here: install CUDA's compiler or set NVCC" >&2; exit 1; }

paths=$("$PYTHON" -c 'import sysconfig
from torch.utils.cpp_extension import include_paths
print(*("-isystem " + path for path in [*include_paths(), sysconfig.get_path("include")]))')
# C10_CUDA_NO_CMAKE_CONFIGURE_FILE: a CPU wheel of torch does not ship that header.
defines="-DWITH_CUDA -DC10_CUDA_NO_CMAKE_CONFIGURE_FILE -DTORCH_EXTENSION_NAME=_C"
# As torch's build of an extension defines them.
defines="$defines -D__CUDA_NO_HALF_OPERATORS__ -D__CUDA_NO_HALF_CONVERSIONS__ -D__CUDA_NO_HALF2_OPERATORS__"
defines="$defines -D__CUDA_NO_BFLOAT16_CONVERSIONS__"
targets=""
for arch in ${ARCHS:-80 90}; do targets="$targets -gencode arch=compute_$arch,code=sm_$arch"; done
if [ -z "${NVDISASM:-}" ]; then
    wheel=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    for file in "$(command -v nvdisasm || true)" "$(dirname "$NVCC")"/nvdisasm "$wheel"/nvidia/*/bin/nvdisasm; do
        if [ -x "$file" ]; then NVDISASM=$file; fi
    done
fi
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

for source in $(find csrc -name "*.cu" | sort); do
    # shellcheck disable=SC2086
    "$NVCC" -c "$source" -o "$out/object.o" -std=c++20 -O3 --fmad=false --expt-relaxed-constexpr --threads 0 \
        --keep --keep-dir "$out" --resource-usage $targets $paths $defines -Xcompiler -Wall,-Werror,-fPIC --Werror all-warnings \
        2>"$out/said" || { grep -v "^ptxas info\|bytes stack frame" "$out/said" >&2; exit 1; }
    echo "$source compiles"
    c++filt <"$out/said" | awk -f tests/cuda/resources.awk
    for cubin in "$out"/*90.cubin "$out/$(basename "$source" .cu).cubin"; do # the second: of a single architecture
        [ -e "$cubin" ] || continue
        if [ -n "${NVDISASM:-}" ]; then
            echo "  loads in flight, by what the instructions wait for:"
            "$NVDISASM" -hex -c "$cubin" | "$PYTHON" tests/cuda/loads.py
        else
            echo "  no nvdisasm here: the loads in flight are not counted"
        fi
        rm "$cubin"
    done
    # shellcheck disable=SC2086
    "$NVCC" -ptx "$source" -o "$out/17.ptx" -std=c++17 --fmad=false --expt-relaxed-constexpr -arch=compute_90 \
        $paths $defines -Xcompiler -Wall,-Werror,-fPIC --Werror all-warnings
    echo "$source compiles as C++17"
done
# shellcheck disable=SC2086
"${CXX:-c++}" -fsyntax-only -std=c++20 -Wall -Werror csrc/bindings.cpp $paths $defines
echo "csrc/bindings.cpp compiles with CUDA"

# The headers of torch are read once: they take ten times as long as a source of ours.
cat >"$out/headers.h" <<EOF
#include <torch/csrc/python_headers.h>

#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
EOF
as_17="${CXX:-c++} -std=c++17 -Wall -Wno-psabi -Werror -fopenmp"
# shellcheck disable=SC2086
$as_17 -x c++-header "$out/headers.h" -o "$out/headers.h.gch" $paths $defines
for source in $(find csrc -name "*.cpp" | sort); do
    # shellcheck disable=SC2086
    $as_17 -fsyntax-only -include "$out/headers.h" "$source" $paths $defines
done
echo "csrc's .cpp files compile as C++17"
