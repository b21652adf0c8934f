"""The CUDA kernels without their launches, compiled for the host (tests/cuda/emulate.cpp)."""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
from pathlib import Path

import torch
from paths import TESTS
from torch.utils import cpp_extension

COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
SCALAR_TYPES = {  # c10::ScalarType
    torch.int16: 2,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.bfloat16: 15,
}


class Given(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int64),
        ("dims", ctypes.c_int64),
        ("sizes", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
    )


class Options(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int64) for name in ("max_rows", "max_blocks", "backwards", "last_blocks"))


class Seen(ctypes.Structure):
    _fields_ = tuple((n, ctypes.c_int64) for n in ("linear", "strided", "scattered", "launches", "blocks", "widest"))


def build(folder: Path) -> ctypes.CDLL:
    target = folder / "emulate.so"
    torch_lib = Path(torch.__file__).parent / "lib"
    command = [
        *(COMPILER, "-std=c++20", "-O1", "-Wall", "-Werror", "-ffp-contract=off", "-shared", "-fPIC"),
        *os.environ.get("CXXFLAGS", "").split(),
        *(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}", "-o", str(target)),
        *itertools.chain.from_iterable(("-isystem", path) for path in cpp_extension.include_paths()),
        *(str(TESTS / "cuda" / "emulate.cpp"), f"-L{torch_lib}", "-lc10", f"-Wl,-rpath,{torch_lib}"),
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return ctypes.CDLL(str(target))


def given(tensors):
    def array(values):
        return (ctypes.c_int64 * len(values))(*values)

    return (Given * len(tensors))(
        *(Given(t.data_ptr(), SCALAR_TYPES[t.dtype], t.dim(), array(t.shape), array(t.stride())) for t in tensors)
    )
