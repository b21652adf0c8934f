"""Builds amp_patch._C, the optional C++ extension. The metadata is in pyproject.toml.

Environment: AMP_PATCH_NO_EXT=1 builds none. AMP_PATCH_REQUIRE_EXT=1 makes a failed build an error (else amp_patch runs
on plain torch and `python -m amp_patch info` tells why). FORCE_CUDA=1 compiles the CUDA kernels without looking for a
compiler and a torch for CUDA.
"""

from __future__ import annotations

import os
import shutil
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


def flag(name: str) -> bool:
    return os.environ.get(name, "0").lower() not in ("", "0", "false", "off", "no")


NO_EXT, REQUIRE_EXT, FORCE_CUDA = flag("AMP_PATCH_NO_EXT"), flag("AMP_PATCH_REQUIRE_EXT"), flag("FORCE_CUDA")
if NO_EXT and REQUIRE_EXT:
    raise SystemExit("AMP_PATCH_NO_EXT=1 and AMP_PATCH_REQUIRE_EXT=1 contradict each other: unset one of them.")

# The extension must be compiled against the torch that will load it, so an isolated build cannot help.
ADVICE = "install torch first, then `pip install --no-build-isolation .` (or AMP_PATCH_NO_EXT=1 to do without _C)."


def extension() -> tuple[Extension, type[build_ext]]:
    if NO_EXT:
        return Extension("amp_patch._C", []), build_ext
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError as error:
        raise SystemExit(f"amp_patch is built against the torch it runs with, and {error}: {ADVICE}") from error

    cuda_sources = sorted(glob("csrc/*.cu"))
    nvcc = cpp_extension.CUDA_HOME is not None and shutil.which("nvcc", path=f"{cpp_extension.CUDA_HOME}/bin")
    with_cuda = bool(cuda_sources) and (FORCE_CUDA or bool(torch.version.cuda and nvcc))
    # Contraction would fuse a*x + b*y into one rounding; the other two change no value and let loops with comparisons
    # become vector code. No -march: one build serves every machine, cpu.cpp chooses at run time.
    exact = ["-O3", "-g0", "-Wall", "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno", "-fopenmp"]
    kind = cpp_extension.CUDAExtension if with_cuda else cpp_extension.CppExtension
    return kind(
        "amp_patch._C",
        sorted(glob("csrc/*.cpp")) + (cuda_sources if with_cuda else []),
        define_macros=[("WITH_CUDA", None)] if with_cuda else [],
        extra_compile_args={"cxx": exact, "nvcc": ["-O3", "--fmad=false", "--expt-relaxed-constexpr"]},
        extra_link_args=["-fopenmp"],
        depends=sorted(glob("csrc/*.h")),
    ), cpp_extension.BuildExtension


EXTENSION, BuildExtension = extension()


class Build(BuildExtension):  # type: ignore[misc, valid-type]
    """A BuildExtension whose failure leaves its reason in amp_patch/_build.py instead of stopping the install."""

    def run(self) -> None:
        target = Path(self.get_ext_fullpath(EXTENSION.name))  # in place if the install is editable
        reason = target.with_name("_build.py")
        for stale in (target, reason):
            stale.unlink(missing_ok=True)
        if NO_EXT:
            return self.give_up(reason, "it was installed with AMP_PATCH_NO_EXT=1")
        try:
            super().run()
        except Exception as error:
            if REQUIRE_EXT:
                raise
            first = next(iter(str(error).splitlines()), "")
            self.give_up(reason, f"its build failed: {type(error).__name__}: {first} (`pip install -v .` shows more)")

    def give_up(self, reason: Path, text: str) -> None:
        self.extensions = []  # later commands must not look for a file that is not there
        reason.parent.mkdir(parents=True, exist_ok=True)
        reason.write_text(f"# Written by setup.py: why there is no amp_patch._C.\nREASON = {text!r}\n")
        self.warn(f"amp_patch._C is left out, {text}; amp_patch will run on plain torch")


setup(ext_modules=[EXTENSION], cmdclass={"build_ext": Build})
