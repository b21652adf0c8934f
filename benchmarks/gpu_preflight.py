"""Check the requirements of `make gpu-check`: each is found, or is missing, with a way to install it.

Only Python's standard library is imported, so that a missing torch is reported too.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

PYTHON, SETUPTOOLS, TORCH = (3, 10), 65, (2, 6)  # the oldest versions that pyproject.toml and setup.py accept

# Packages of PyPI, besides torch, that the stages need: name -> requirement for pip.
PACKAGES = {
    "setuptools": f"setuptools>={SETUPTOOLS}",
    "ninja": "ninja",
    "pybind11": "pybind11>=2",
    "pytest": "pytest>=8",
}

# Run in a child process: torch may be missing, and a broken CUDA may crash the process.
ASK_TORCH = """
import json, torch
found = {"torch": torch.__version__, "cuda": torch.version.cuda, "headers": torch.__path__[0] + "/include"}
if torch.cuda.is_available():
    of = torch.cuda.get_device_properties(0)
    found |= {"gpu": of.name, "gpus": torch.cuda.device_count(), "compute_capability": [of.major, of.minor]}
    found |= {"gigabytes": round(of.total_memory / 2**30)}
print(json.dumps(found))
"""


class Finding(NamedTuple):
    what: str
    there: bool
    text: str  # version and place; if it is missing, the problem and how to solve it

    def __str__(self) -> str:
        return f"  {self.what:<11}{'' if self.there else 'MISSING: '}{self.text}"


def preflight() -> tuple[list[Finding], dict[str, Any]]:
    """Return the findings, in the order in which a machine is set up, and torch's data on itself and the GPU."""
    torch, trouble = ask_torch()
    findings = [
        python(),
        package("setuptools", SETUPTOOLS),
        ninja(),
        pybind11(torch),
        package("pytest", 8),
        compiler(),
        nvcc(torch),
        python_headers(),
        torch_itself(torch, trouble),
        gpu(torch),
    ]
    return findings, torch


def to_bring(findings: Sequence[Finding]) -> list[str]:
    """Return lines on how to install the missing packages without a network; an empty list if none is missing."""
    wanted = [PACKAGES[finding.what] for finding in findings if not finding.there and finding.what in PACKAGES]
    if not wanted:
        return []
    names = " ".join(f"'{name}'" for name in wanted)
    python = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    return [
        f"  Without a network bring their wheels, from a machine with the same {python} and one:",
        f"    {python} -m pip download --dest wheels {names}",
        f"    {sys.executable} -m pip install --no-index --find-links wheels {names}",
    ]


def output_of(*command: str) -> tuple[int, str, str]:
    """Run a command, and return its exit status, stdout and stderr. If it cannot be run, the status is 127."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 127, "", str(error)
    return run.returncode, run.stdout, run.stderr


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def ask_torch() -> tuple[dict[str, Any], str]:
    """Return torch's data on itself and the GPU, and "". If torch fails, return {} and its error."""
    status, out, error = output_of(sys.executable, "-c", ASK_TORCH)
    return (json.loads(last_line(out)), "") if status == 0 else ({}, last_line(error) or f"it ended with {status}")


def python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < PYTHON:
        wanted = ".".join(map(str, PYTHON))
        return Finding("python", False, f"{version} is older than {wanted}: make gpu-check PYTHON=python{wanted}")
    return Finding("python", True, f"{version}, {sys.executable}")


def package(name: str, oldest: int) -> Finding:
    """Look for a package of this Python, of at least the major version `oldest`."""
    way_out = f"{sys.executable} -m pip install '{name}>={oldest}'"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, False, f"not installed for this Python: {way_out}")
    if int(version.split(".")[0]) < oldest:
        return Finding(name, False, f"{version} is older than {oldest}: {way_out}")
    return Finding(name, True, version)


def ninja() -> Finding:
    """Look for the program ninja on PATH, where torch looks for it."""
    path = shutil.which("ninja")
    if path is None:
        return Finding("ninja", False, f"not on PATH: {sys.executable} -m pip install ninja, and its folder on PATH")
    return Finding("ninja", True, f"{output_of(path, '--version')[1].strip()}, {path}")


def pybind11(torch: dict[str, Any]) -> Finding:
    """Look for the package pybind11, or for the headers in torch."""
    found = package("pybind11", 2)
    if not found.there and Path(torch.get("headers", ""), "pybind11", "pybind11.h").is_file():
        return Finding("pybind11", True, "the headers that torch brings")
    return found


def compiler() -> Finding:
    command = (os.environ.get("CXX") or "c++").split()
    if shutil.which(command[0]) is None:
        return Finding("compiler", False, f"no {command[0]!r} on PATH: install a C++ compiler, or name it in CXX")
    return Finding("compiler", True, output_of(*command, "--version")[1].partition("\n")[0])


def nvcc(torch: dict[str, Any]) -> Finding:
    """Look for nvcc and its toolkit. If nvcc is a wrapper, `nvcc --dryrun` prints its folder, as setup.py does."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    path = shutil.which("nvcc", path=f"{named}/bin" if named else None)
    way_out = "install CUDA's toolkit, or name its folder in CUDA_HOME"
    if path is None:
        where = f"in {named}/bin (CUDA_HOME)" if named else "on PATH, and CUDA_HOME is unset"
        return Finding("nvcc", False, f"not {where}: {way_out}")
    home = Path(path).parents[1]
    if not (home / "include" / "cuda_runtime.h").is_file():
        _, out, error = output_of(path, "--dryrun", "-c", "x.cu")
        top = re.search(r"^#\$ TOP=(.+)", out + error, re.MULTILINE)
        home = Path(top[1].strip()).resolve() if top else home
    for part, *others in (["include/cuda_runtime.h"], ["lib64/libcudart.so", "lib/libcudart.so", "lib/*/libcudart.so"]):
        if not any(any(home.glob(form)) for form in (part, *others)):
            return Finding("nvcc", False, f"{path} is there, but its toolkit in {home} has no {part}: {way_out}")
    release = re.search(r"release ([\d.]+)", output_of(path, "--version")[1])
    version = release[1] if release else "of an unknown release"
    wanted = torch.get("cuda")
    if release and wanted and version.split(".")[0] != wanted.split(".")[0]:
        return Finding("nvcc", False, f"{path} is of CUDA {version} and torch of {wanted}: {way_out}")
    return Finding("nvcc", True, f"{version}, {path}, toolkit in {home}")


def python_headers() -> Finding:
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.is_file():
        name = "python{}.{}-dev".format(*sys.version_info)
        return Finding("Python.h", False, f"not in {header.parent}: install this Python's headers (Debian: {name})")
    return Finding("Python.h", True, str(header))


def torch_itself(torch: dict[str, Any], trouble: str) -> Finding:
    if not torch:
        return Finding(
            "torch", False, f"{trouble}: install one for CUDA, or make gpu-check PYTHON=<a Python that has it>"
        )
    version = torch["torch"]
    if tuple(map(int, version.split(".")[:2])) < TORCH:
        return Finding("torch", False, f"{version} is older than {'.'.join(map(str, TORCH))}: install a newer one")
    if torch["cuda"] is None:
        return Finding("torch", False, f"{version} is a build without CUDA: install one for CUDA")
    return Finding("torch", True, f"{version}, for CUDA {torch['cuda']}")


def gpu(torch: dict[str, Any]) -> Finding:
    if "gpu" in torch:
        capability = ".".join(map(str, torch["compute_capability"]))
        count = f", the first of {torch['gpus']}" if torch["gpus"] > 1 else ""
        text = f"{torch['gpu']}, compute capability {capability}, {torch['gigabytes']} GB{count}"
        return Finding("GPU", True, text)
    status, out, _ = output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    if status == 0 and out.strip():
        return Finding(
            "GPU", False, f"nvidia-smi sees {out.splitlines()[0]}, torch none: a torch for the driver's CUDA"
        )
    return Finding("GPU", False, "none, nor nvidia-smi: run this on a machine with an NVIDIA GPU and its driver")
