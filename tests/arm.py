"""The quick tests on an emulated ARM processor: `make test-arm`, on Linux on x86-64 with Debian's packages.

    make test-arm                                # build, checks, then tests for 30 minutes, those that tell most first
    make test-arm MINUTES=300                    # all of them
    make test-arm ONLY="tests/casts tests/ways"  # these alone

Debian's Python for ARM is unpacked into .venv-arm/system, and ARM's wheels of torch and the tests' packages into
.venv-arm/packages. Nothing is installed outside of it. In out/arm, a copy of the sources, setup.py runs under qemu and
starts the cross compiler, which is a program of this machine. Checks follow: the hot loops are NEON vectors, and
`info` names the arithmetic of two kinds of processors. Tests that start a program are left out. Each result is in
out/arm/results.txt as it comes. Exits non-zero if a check or a test has failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE, COPY = ROOT / ".venv-arm", ROOT / "out" / "arm"
SYSTEM, PACKAGES, COMPILER = CACHE / "system", CACHE / "packages", CACHE / "g++"
RESULTS = COPY / "results.txt"
NOT_COPIED = (".git", ".venv*", "out", "build", "*.so", "_build.py", "__pycache__", ".*_cache", "*.egg-info")

# PyPI's newest torch for ARM that is imported without CUDA's libraries, some 2.5 GB.
TORCH = "2.10.0"
# With torch's own requirements: pip would look for those of this machine.
WHEELS = "pytest>=8 pluggy iniconfig packaging pygments hypothesis>=6.100 sortedcontainers attrs ml_dtypes>=0.5 numpy"
WHEELS += " scipy setuptools filelock typing-extensions sympy<1.15 mpmath<1.5 networkx jinja2 markupsafe fsspec"
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")
DEBIAN = ("python3", "libpython3-dev", "libstdc++6", "libgomp1")
TOOLS = {"qemu-aarch64-static": "qemu-user-static", "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu"}

# qemu's processor with all features but scalable vectors, whose emulation is slow; and {processor: has FP16, has BF16}.
# On one without either (cortex-a72) `import torch` ends with an illegal instruction.
PROCESSOR = "max,sve=off,pauth-impdef=on"
ARITHMETIC = {"neoverse-n1": (True, False), PROCESSOR: (True, True)}

# Folders, those first whose tests reach the most code that differs between processors.
ORDER = "multi_tensor casts optimizers storage masters ways training model frontend apex_surface support diagnose"
ORDER += " around watch comparison run project"

# Names of functions with hot loops -> the least share of NEON's instructions in their code. GCC 12 makes 0.39, 0.30,
# 0.18, 0.39 and 0.11; the rest chooses a loop, and serves the elements that fill no vector.
HOT = {
    r"Set::map<": 0.20,  # casts, checks, norms
    r"with_masters<.*Adam": 0.15,
    r"with_masters<.*Sgd": 0.09,
    r"with_random<": 0.20,  # stochastic rounding
    r"step_coded_chunk<": 0.08,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30, help="for the tests (default: %(default)s)")
    parser.add_argument("only", nargs="*", help="files and folders of tests (default: all, in an order)")
    options = parser.parse_args()
    missing = [package for tool, package in TOOLS.items() if shutil.which(tool) is None]
    if missing:
        sys.exit(f"arm.py: apt-get install {' '.join(missing)}")
    unpack_system()
    install_wheels()
    build()
    wrong = [*not_vectors(disassembly()), *wrong_arithmetic()]
    for line in wrong:
        print(f"arm.py: {line}", flush=True)
    run_tests(options.only or [f"tests/{name}" for name in ORDER.split()], options.minutes)
    counts = Counter(line.split()[0] for line in RESULTS.read_text().splitlines())
    told = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    print(f"torch {TORCH} on qemu's {PROCESSOR}: {told}")
    sys.exit(bool(wrong or counts["failed"]))


# ---------------------------------------------------------------------------------------------------------------------
# The machine


def unpack_system() -> None:
    """Unpack Debian's Python for ARM, and what it needs, into SYSTEM."""
    if SYSTEM.exists():
        return
    apt, archives, part = CACHE / "apt", CACHE / "apt" / "archives", CACHE / "part"
    (archives / "partial").mkdir(parents=True, exist_ok=True)
    (apt / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    (apt / "status").write_text("")  # nothing is installed: apt resolves everything
    settings = {
        "Dir::State::Lists": apt / "lists",
        "Dir::State::status": apt / "status",
        "Dir::Cache": apt,
        "Dir::Cache::archives": archives,
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "Debug::NoLocking": 1,
    }
    get = ["apt-get", "-q", *(part for name, value in settings.items() for part in ("-o", f"{name}={value}"))]
    subprocess.run([*get, "update"], check=True)
    subprocess.run([*get, "-y", "--download-only", "--no-install-recommends", "install", *DEBIAN], check=True)
    shutil.rmtree(part, ignore_errors=True)
    for archive in sorted(archives.glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", str(archive), str(part)], check=True)
    part.rename(SYSTEM)
    shutil.rmtree(apt)


def python() -> Path:
    """Return Debian's Python for ARM."""
    return (SYSTEM / "usr" / "bin" / "python3").resolve()


def install_wheels() -> None:
    if PACKAGES.exists() and (PACKAGES / f"torch-{TORCH}.dist-info").exists():
        return
    shutil.rmtree(PACKAGES, ignore_errors=True)
    part = CACHE / "part"
    shutil.rmtree(part, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--only-binary=:all:"]
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    version = ["--python-version", python().name.removeprefix("python"), "--target", str(part)]
    subprocess.run([*pip, *platforms, *version, *WHEELS.split(), f"torch=={TORCH}"], check=True)
    part.rename(PACKAGES)


def emulated(*arguments: str, processor: str = PROCESSOR, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Debian's Python for ARM in COPY; return its exit status, with what it printed if "STDOUT" is given."""
    command = ["qemu-aarch64-static", "-cpu", processor, "-L", str(SYSTEM), str(python()), *arguments]
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("AMP_PATCH", "PYTHON"))}
    output = subprocess.PIPE if environment.pop("STDOUT", "") else None
    given = {**keep, "PYTHONPATH": f"{COPY}{os.pathsep}{PACKAGES}", **environment}
    return subprocess.run(command, cwd=COPY, env=given, text=True, stdout=output)


def build() -> None:
    """Copy the sources to COPY and compile the extension there; objects of unchanged sources are kept."""
    COPY.mkdir(parents=True, exist_ok=True)
    for old in COPY.iterdir():
        if old.name not in ("build", "results.txt"):
            shutil.rmtree(old) if old.is_dir() else old.unlink()
    shutil.copytree(ROOT, COPY, ignore=shutil.ignore_patterns(*NOT_COPIED), dirs_exist_ok=True)
    # Debian's Python names its headers in /usr/include, where this machine's own may be.
    headers = SYSTEM / "usr" / "include"
    COMPILER.write_text(
        f'#!/bin/sh\nexec aarch64-linux-gnu-g++ -I"{headers}/{python().name}" -idirafter "{headers}" "$@"\n'
    )
    COMPILER.chmod(0o755)
    compilers = {"CC": str(COMPILER), "CXX": str(COMPILER), "LDSHARED": f"{COMPILER} -shared"}
    done = emulated("setup.py", "-q", "build_ext", "--inplace", AMP_PATCH_REQUIRE_EXT="1", STDOUT="1", **compilers)
    if done.returncode:
        sys.exit(f"{done.stdout}\narm.py: the extension could not be cross-compiled")


# ---------------------------------------------------------------------------------------------------------------------
# The checks


def disassembly() -> str:
    (library,) = (COPY / "amp_patch").glob("_C.*.so")
    command = ["aarch64-linux-gnu-objdump", "-d", "--no-show-raw-insn", "-C", str(library)]
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout


_VECTOR = re.compile(r"\bv\d+\.(?:2d|2s|4s|4h|8h|8b|16b)\b|\bq\d+\b")


def vectors(listing: str) -> dict[str, tuple[int, int]]:
    """Return {function: (its vector instructions, all its instructions)} of objdump's listing."""
    found: dict[str, tuple[int, int]] = {}
    name = ""
    for line in listing.splitlines():
        if line.endswith(">:"):
            name = line.partition("<")[2].removesuffix(">:")
        elif name and (match := re.match(r"\s+[0-9a-f]+:\t(.+)", line)):
            of_vectors, all_ = found.get(name, (0, 0))
            found[name] = of_vectors + bool(_VECTOR.search(match[1])), all_ + 1
    return found


def not_vectors(listing: str) -> list[str]:
    """Name the kinds of hot loops whose functions have fewer vector instructions than HOT wants."""
    counted = vectors(listing)
    told = []
    for kind, least in HOT.items():
        pairs = [pair for name, pair in counted.items() if re.search(kind, name)]
        of_vectors, all_ = sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)
        print(f"{kind}: {of_vectors} of {all_} instructions are NEON's, in {len(pairs)} functions", flush=True)
        if not all_ or of_vectors < least * all_:
            told.append(f"{kind}: {of_vectors} of {all_} instructions are NEON's; wanted at least {least:.0%}")
    return told


def wrong_arithmetic() -> Iterable[str]:
    """Compare what `info` says of FP16 and BF16 with what the processors have."""
    for processor, (fp16, bf16) in ARITHMETIC.items():
        said = emulated("-m", "amp_patch", "info", processor=processor, STDOUT="1").stdout
        for name, has in (("FP16", fp16), ("BF16", bf16)):
            wanted = f"this CPU has {'' if has else 'no '}{name} arithmetic"
            if wanted not in said:
                yield f"info on qemu's {processor}: wanted {wanted!r}, got\n{said}"


# ---------------------------------------------------------------------------------------------------------------------
# The tests


def run_tests(where: list[str], minutes: float) -> None:
    """Run the tests of each of `where`, in a process of its own, until `minutes` are over."""
    RESULTS.write_text("")
    until = time.time() + 60 * minutes
    for folder in where:
        if time.time() > until:
            print(f"arm.py: {minutes:g} minutes are over before {folder}", flush=True)
            continue
        options = ["-q", "-p", "no:cacheprovider", "-p", "emulated_arm", "-m", "not slow and not program", folder]
        given = {"AMP_PATCH_ARM_RESULTS": str(RESULTS), "AMP_PATCH_ARM_UNTIL": str(until), "OMP_NUM_THREADS": "2"}
        done = emulated("-m", "pytest", *options, PYTHONDONTWRITEBYTECODE="1", **given)
        if done.returncode not in (0, 1, 2, 5):  # pytest's: passed, failed, stopped, no test
            with RESULTS.open("a") as results:
                results.write(f"failed {folder} (the process ended with {done.returncode})\n")


if __name__ == "__main__":
    main()
