"""Builds amp_patch._C, the optional C++ extension. The metadata is in pyproject.toml.

Environment: AMP_PATCH_NO_EXT=1 builds none. AMP_PATCH_REQUIRE_EXT=1 makes a failed build an error (else amp_patch runs
on plain torch and `python -m amp_patch info` tells why; where the CUDA part alone fails, CUDA tensors do). FORCE_CUDA=1
compiles the CUDA kernels without looking for a compiler and a torch for CUDA. TORCH_CUDA_ARCH_LIST names the GPUs to
compile for, as for any extension of torch ("8.0;9.0"; default: those of this machine). AMP_PATCH_SANITIZE=1 puts
AddressSanitizer and UBSan into what the C++ compiler makes (`make sanitize`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


def flag(name: str) -> bool:
    return os.environ.get(name, "0").lower() not in ("", "0", "false", "off", "no")


NO_EXT, REQUIRE_EXT, FORCE_CUDA = flag("AMP_PATCH_NO_EXT"), flag("AMP_PATCH_REQUIRE_EXT"), flag("FORCE_CUDA")
SANITIZE = flag("AMP_PATCH_SANITIZE")
if NO_EXT and REQUIRE_EXT:
    raise SystemExit("AMP_PATCH_NO_EXT=1 and AMP_PATCH_REQUIRE_EXT=1 contradict each other: unset one of them.")

# The extension must be compiled against the torch that will load it, so an isolated build cannot help.
ADVICE = "install torch first, then `pip install --no-build-isolation .` (or AMP_PATCH_NO_EXT=1 to do without _C)."


def sources(suffix: str) -> list[str]:
    """The files of csrc, in all its folders, that end in `suffix`. Object files lie in folders of the same names."""
    return sorted(glob(f"csrc/**/*.{suffix}", recursive=True))


def extensions() -> tuple[list[Extension], str, type[build_ext]]:
    """The extension in the forms to try, best first; why the best is without CUDA, if that is odd; who builds it."""
    if NO_EXT:
        return [Extension("amp_patch._C", [])], "", build_ext
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError as error:
        raise SystemExit(f"amp_patch is built against the torch it runs with, and {error}: {ADVICE}") from error

    # Contraction would fuse a*x + b*y into one rounding; the other two change no value and let loops with comparisons
    # become vector code. No -march: one build serves every machine, csrc/kernels/cpu.cpp chooses at run time. Its
    # functions over vector registers are all inlined, so that none has an ABI to be warned about: -Wno-psabi.
    exact = [
        "-O3",
        "-g0",
        "-Wall",
        "-Wno-psabi",
        "-ffp-contract=off",
        "-fno-trapping-math",
        "-fno-math-errno",
        "-fopenmp",
    ]
    # vptr would ask for the types of torch's classes, which torch's libraries do not all export.
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize=vptr"] if SANITIZE else []
    reports = ["-D_GLIBCXX_ASSERTIONS", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-O2", "-g1"]
    checked = [*sanitizers, *reports] if SANITIZE else []

    def form(kind: type[Extension], cuda_sources: list[str]) -> Extension:
        return kind(
            "amp_patch._C",
            sources("cpp") + cuda_sources,
            define_macros=[("WITH_CUDA", None)] if cuda_sources else [],
            extra_compile_args={
                "cxx": [*exact, *checked],
                "nvcc": ["-O3", "--fmad=false", "--expt-relaxed-constexpr", "-Xcompiler", "-fopenmp"],
            },
            extra_link_args=["-fopenmp", *sanitizers],
            depends=sources("h"),
        )

    forms, missing, cuda_sources = [], "", sources("cu")
    home = cpp_extension.CUDA_HOME
    if cuda_sources and (FORCE_CUDA or torch.version.cuda):
        if not FORCE_CUDA and not (home and shutil.which("nvcc", path=f"{home}/bin")):
            where = f"CUDA_HOME={home}" if home else "CUDA_HOME is unset"
            missing = f"no CUDA kernels: torch is for CUDA {torch.version.cuda}, but there is no nvcc ({where})"
        else:
            try:
                forms.append(form(cpp_extension.CUDAExtension, cuda_sources))
            except OSError as error:  # torch looks for CUDA_HOME here
                missing = f"no CUDA kernels: {summary(error)}"
        if missing and FORCE_CUDA and REQUIRE_EXT:
            raise SystemExit(missing)
    return [*forms, form(cpp_extension.CppExtension, [])], missing, cpp_extension.BuildExtension


def summary(error: Exception) -> str:
    """The error in one line."""
    text = str(error)
    if len(error.args) > 1 and isinstance(error.args[0], str) and "%s" in error.args[0]:
        text = error.args[0] % error.args[1:]  # torch hands over the CUDA mismatch unformatted
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}"


def compiler_name() -> str:
    """The C++ compiler's own name and version, for messages."""
    command = os.environ.get("CXX") or "c++"
    try:
        run = subprocess.run([*command.split(), "--version"], capture_output=True, text=True)
    except OSError:
        return f"no compiler {command!r}"
    return next(iter((run.stdout or run.stderr).splitlines()), command)


FORMS, MISSING, BuildExtension = extensions()
EXTENSION = FORMS[0]


class Build(BuildExtension):  # type: ignore[misc, valid-type]
    """A BuildExtension whose failure leaves its reason in amp_patch/_build.py instead of stopping the install.

    Where CUDA is the trouble, the extension is built without it.
    """

    def run(self) -> None:
        target = Path(self.get_ext_fullpath(EXTENSION.name))  # in place if the install is editable
        reason = target.with_name("_build.py")
        for stale in (target, reason):
            stale.unlink(missing_ok=True)
        if NO_EXT:
            return self.give_up(reason, "it was installed with AMP_PATCH_NO_EXT=1")
        failures = [MISSING] if MISSING else []
        for form in FORMS:
            vars(EXTENSION).update(vars(form))  # the object that setuptools knows
            inplace, compiler = self.inplace, self.compiler
            try:
                super().run()
            except Exception as error:
                if REQUIRE_EXT:
                    raise
                self.inplace, self.compiler = inplace, compiler  # run() had changed both
                kind = "no CUDA kernels: their build" if form is not FORMS[-1] else "its build"
                failures.append(f"{kind} failed: {summary(error)} ({compiler_name()}; `pip install -v .` shows more)")
                continue
            if failures:
                self.note(reason, failures[-1])
                self.warn(f"amp_patch._C has {failures[-1]}; amp_patch will run CUDA tensors on plain torch")
            return
        self.give_up(reason, failures[-1])

    def give_up(self, reason: Path, text: str) -> None:
        self.extensions = []  # later commands must not look for a file that is not there
        self.note(reason, text)
        self.warn(f"amp_patch._C is left out, {text}; amp_patch will run on plain torch")

    def note(self, reason: Path, text: str) -> None:
        reason.parent.mkdir(parents=True, exist_ok=True)
        reason.write_text(f"# Written by setup.py: what amp_patch._C lacks, or why it is absent.\nREASON = {text!r}\n")


setup(ext_modules=[EXTENSION], cmdclass={"build_ext": Build})
