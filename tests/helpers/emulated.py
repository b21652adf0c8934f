"""The CUDA kernels without their launches, compiled for the host (tests/cuda/emulate.cpp)."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import shutil
import subprocess
from pathlib import Path

import torch
from paths import ROOT, TESTS
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
    _fields_ = tuple(
        (n, ctypes.c_int64) for n in ("linear", "strided", "scattered", "launches", "blocks", "widest", "runs")
    )


def build() -> ctypes.CDLL:
    """Compile the kernels, unless out/ has a build of the same sources and command."""
    torch_lib = Path(torch.__file__).parent / "lib"
    command = [
        *(COMPILER, "-std=c++20", "-O1", "-Wall", "-Werror", "-ffp-contract=off", "-shared", "-fPIC"),
        *os.environ.get("CXXFLAGS", "").split(),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *itertools.chain.from_iterable(("-isystem", path) for path in cpp_extension.include_paths()),
        *(str(TESTS / "cuda" / "emulate.cpp"), f"-L{torch_lib}", "-lc10", f"-Wl,-rpath,{torch_lib}"),
    ]
    sources = sorted(path for path in [*(ROOT / "csrc").rglob("*"), *(TESTS / "cuda").iterdir()] if path.is_file())
    read = hashlib.sha256(f"{torch.__version__} {command}".encode())
    for path in sources:
        read.update(path.read_bytes())
    target = ROOT / "out" / "emulate" / f"{read.hexdigest()}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        own = target.with_suffix(f".{os.getpid()}")  # another process may compile it too
        result = subprocess.run([*command, "-o", str(own)], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        own.replace(target)
    return ctypes.CDLL(str(target))


def given(tensors):
    def array(values):
        return (ctypes.c_int64 * len(values))(*values)

    return (Given * len(tensors))(
        *(Given(t.data_ptr(), SCALAR_TYPES[t.dtype], t.dim(), array(t.shape), array(t.stride())) for t in tensors)
    )
