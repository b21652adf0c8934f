"""Builds amp_patch._C, the optional C++ extension. The metadata is in pyproject.toml.

Environment: AMP_PATCH_NO_EXT=1 builds none. AMP_PATCH_REQUIRE_EXT=1 makes a failed build an error (else amp_patch runs
on plain torch and `python -m amp_patch info` tells why; where the CUDA part alone fails, CUDA tensors do). FORCE_CUDA=1
compiles the CUDA kernels without looking for a compiler and a torch for CUDA. CUDA_HOME is CUDA's toolkit (default:
that of the nvcc on PATH). TORCH_CUDA_ARCH_LIST names the GPUs to compile for, as for any extension of torch ("8.0;9.0";
default: those of this machine, and where it has none those of DEFAULT_GPUS that nvcc knows). AMP_PATCH_SANITIZE=1 puts
AddressSanitizer and UBSan into what the C++ compiler makes (`make sanitize`). AMP_PATCH_LOCAL_VERSION=torch2.13 makes
that the version's last part, for wheels that are kept beside each other: 0.4.0+torch2.13.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import warnings
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py


def flag(name: str) -> bool:
    return os.environ.get(name, "0").lower() not in ("", "0", "false", "off", "no")


NO_EXT, REQUIRE_EXT, FORCE_CUDA = flag("AMP_PATCH_NO_EXT"), flag("AMP_PATCH_REQUIRE_EXT"), flag("FORCE_CUDA")
SANITIZE = flag("AMP_PATCH_SANITIZE")
# From Volta, the first with tensor cores, to Hopper; newer GPUs translate the last one's PTX.
DEFAULT_GPUS = ["7.0", "7.5", "8.0", "8.6", "8.9", "9.0"]
if NO_EXT and REQUIRE_EXT:
    raise SystemExit("AMP_PATCH_NO_EXT=1 and AMP_PATCH_REQUIRE_EXT=1 contradict each other: unset one of them.")

# Contraction would fuse a*x + b*y into one rounding; the other two change no value and let loops with comparisons
# become vector code. No -march: one build serves every machine, csrc/kernels/cpu.cpp chooses at run time. Its
# functions over vector registers are all inlined, so that none has an ABI to be warned about: -Wno-psabi.
EXACT = [
    "-O3",
    "-g0",
    "-Wall",
    "-Wno-psabi",
    "-ffp-contract=off",
    "-fno-trapping-math",
    "-fno-math-errno",
    "-fopenmp",
]

# The extension is compiled against the torch that will load it, never against one that a build fetches for itself.
ADVICE = "install torch first, then amp_patch with `pip install --no-build-isolation`"


def sources(suffix: str) -> list[str]:
    """The files of csrc, in all its folders, that end in `suffix`. Object files are in folders of the same names."""
    return sorted(glob(f"csrc/**/*.{suffix}", recursive=True))


def find_toolkit() -> None:
    """Set CUDA_HOME to a folder with CUDA's headers, which that of an nvcc is not where it is a wrapper.

    torch reads it when cpp_extension is imported.
    """
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc", path=f"{named}/bin" if named else None)
    if nvcc is None:
        return
    home = Path(nvcc).parents[1]
    if not is_toolkit(home):
        top = re.search(r"^#\$ TOP=(.+)", said(nvcc, "--dryrun", "-c", "x.cu"), re.MULTILINE)
        home = Path(top[1].strip()).resolve() if top else home
    if is_toolkit(home):
        os.environ["CUDA_HOME"] = str(home)


def is_toolkit(folder: Path) -> bool:
    """Tell whether CUDA's headers are in `folder`, at the place where torch reads them."""
    return (folder / "include" / "cuda_runtime.h").is_file()


def choose_gpus(nvcc: str) -> None:
    """Set TORCH_CUDA_ARCH_LIST where torch would look at this machine's GPUs, and there are none."""
    import torch

    if os.environ.get("TORCH_CUDA_ARCH_LIST") or torch.cuda.device_count():
        return
    known = re.findall(r"compute_(\d+)(\d)\b", said(nvcc, "--list-gpu-arch"))
    gpus = [gpu for gpu in DEFAULT_GPUS if not known or tuple(gpu.split(".")) in known]
    os.environ["TORCH_CUDA_ARCH_LIST"] = ";".join(gpus or DEFAULT_GPUS) + "+PTX"


def said(*command: str) -> str:
    """Return the output of a command; nothing where it cannot be run."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError:
        return ""
    return run.stdout + run.stderr


def without_torch() -> str:
    """Why torch cannot be imported; "" where it can.

    pip's isolated build hides the packages of the environment that it installs into, and runs on its Python all the
    same: asked outside of pip's environment variables, that Python reports the path of its torch.
    """
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # an environment of torch alone has none
    try:
        import torch as torch
    except ImportError as hidden:
        program = "from importlib import util; spec = util.find_spec('torch'); print(spec.origin if spec else '')"
        ours = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONNOUSERSITE")}
        asked = [sys.executable, "-c", program]
        found = subprocess.run(asked, env=ours, cwd=sys.prefix, capture_output=True, text=True).stdout.strip()
        if not found:
            return f"{hidden} where it was built"
        sys.path.append(str(Path(found).parents[1]))  # last: the build keeps the tools that pip chose
        try:
            import torch as torch
        except ImportError as error:
            return f"{found} cannot be imported where it was built: {error}"
    return ""


def extensions() -> tuple[list[Extension], str, type[build_ext]]:
    """The extension in the forms to try, best first; the parts that the best form lacks, and why; who builds it."""
    if NO_EXT:
        return [], "it was installed with AMP_PATCH_NO_EXT=1", build_ext
    find_toolkit()
    if why := without_torch():
        if REQUIRE_EXT:
            raise SystemExit(f"AMP_PATCH_REQUIRE_EXT=1, but {why}: {ADVICE}")
        return [], f"{why}: {ADVICE}", build_ext
    import torch
    from torch.utils import cpp_extension

    # vptr would ask for the types of torch's classes, which torch's libraries do not all export.
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize=vptr"] if SANITIZE else []
    reports = ["-D_GLIBCXX_ASSERTIONS", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-O2", "-g1"]
    checked = [*sanitizers, *reports] if SANITIZE else []

    def form(kind: type[Extension], cuda_sources: list[str]) -> Extension:
        return kind(
            "amp_patch._C",
            sources("cpp") + cuda_sources,
            define_macros=cuda_macros(cpp_extension.include_paths()) if cuda_sources else [],
            extra_compile_args={
                "cxx": [*EXACT, *checked],
                "nvcc": ["-O3", "--fmad=false", "--expt-relaxed-constexpr", "-Xcompiler", "-fopenmp"],
            },
            extra_link_args=["-fopenmp", *sanitizers],
            depends=sources("h"),
        )

    forms, missing, cuda_sources = [], "", sources("cu")
    if FORCE_CUDA and not cpp_extension.CUDA_HOME:  # a torch without CUDA looks for none
        cpp_extension.CUDA_HOME = os.environ.get("CUDA_HOME")
    home = cpp_extension.CUDA_HOME
    if cuda_sources and (FORCE_CUDA or torch.version.cuda):
        if not FORCE_CUDA and not (home and shutil.which("nvcc", path=f"{home}/bin")):
            where = f"CUDA_HOME={home}" if home else "CUDA_HOME is unset"
            missing = f"no CUDA kernels: torch is for CUDA {torch.version.cuda}, but there is no nvcc ({where})"
        else:
            choose_gpus(f"{home}/bin/nvcc")
            try:
                forms.append(form(cpp_extension.CUDAExtension, cuda_sources))
            except OSError as error:  # torch looks for CUDA_HOME here
                missing = f"no CUDA kernels: {summary(error)}"
        if missing and FORCE_CUDA and REQUIRE_EXT:
            raise SystemExit(missing)
    return [*forms, form(cpp_extension.CppExtension, [])], missing, cpp_extension.BuildExtension


def cuda_macros(headers: list[str]) -> list[tuple[str, str | None]]:
    """Macros of csrc and of torch's `headers` for a build with CUDA."""
    only_for_cuda = "c10/cuda/impl/cuda_cmake_macros.h"  # included unless forbidden; a torch without CUDA has it not
    there = any(Path(folder, only_for_cuda).is_file() for folder in headers)
    return [("WITH_CUDA", None), *([] if there else [("C10_CUDA_NO_CMAKE_CONFIGURE_FILE", None)])]


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
    if shutil.which(command.split()[0]) is None:
        return f"no compiler {command!r}"
    return next(iter(said(*command.split(), "--version").splitlines()), command)


FORMS, MISSING, BuildExtension = extensions()


class Build(BuildExtension):  # type: ignore[misc, valid-type]
    """A BuildExtension whose failure leaves its reason in amp_patch/_build.py instead of stopping the install.

    Where CUDA is the trouble, the extension is built without it. The torch that it was built with is written there too.
    """

    def run(self) -> None:
        target = Path(self.get_ext_fullpath("amp_patch._C"))  # in place if the install is editable
        if not FORMS:
            return leave_out(target.parent, MISSING)
        clear(target.parent)
        print("compiling the C++ extension: 3 to 5 minutes on two cores", file=sys.stderr, flush=True)
        failures = [MISSING] if MISSING else []
        for form in FORMS:
            vars(FORMS[0]).update(vars(form))  # the object that setuptools knows
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
            note(target.parent, failures[-1] if failures else "", str(sys.modules["torch"].__version__))
            if failures:
                say(f"amp_patch._C has {failures[-1]}; amp_patch will run CUDA tensors on plain torch")
            return
        self.extensions = []  # later commands must not look for a file that is not there
        leave_out(target.parent, failures[-1])


class BuildPython(build_py):
    """Run build_py; without an extension to build, it leaves the reason that Build would."""

    def run(self) -> None:
        super().run()
        if not FORMS:
            in_place = getattr(self, "editable_mode", False)
            leave_out(Path("." if in_place else self.build_lib, "amp_patch"), MISSING)


def clear(package: Path) -> None:
    """Remove what an earlier build for this Python has left in the package."""
    for stale in (f"_C{sysconfig.get_config_var('EXT_SUFFIX')}", "_build.py"):
        (package / stale).unlink(missing_ok=True)


def leave_out(package: Path, reason: str) -> None:
    clear(package)
    note(package, reason)
    say(f"amp_patch._C is left out, {reason}; amp_patch will run on plain torch")


def say(text: str) -> None:
    """As a warning of Python's: pip 26 prints those of a build that went well, and nothing else of it."""
    warnings.warn(text, stacklevel=2)


def note(package: Path, reason: str, torch: str = "") -> None:
    """Write amp_patch/_build.py."""
    said = "# Written by setup.py: what amp_patch._C lacks, or why it is absent; the torch that it was built with."
    package.mkdir(parents=True, exist_ok=True)
    (package / "_build.py").write_text(f"{said}\nREASON = {reason!r}\nTORCH = {torch!r}\n")


def version() -> str:
    """Return the version of amp_patch/__init__.py, with the local part that the environment asks for."""
    public = re.search(r'^__version__ = "(.+)"', Path("amp_patch", "__init__.py").read_text(), re.MULTILINE)[1]
    local = os.environ.get("AMP_PATCH_LOCAL_VERSION", "")
    if local and not re.fullmatch(r"[a-z0-9]+([._-][a-z0-9]+)*", local, re.IGNORECASE):
        raise SystemExit(f"AMP_PATCH_LOCAL_VERSION={local!r}: wanted letters and digits, dots between, as torch2.13")
    return f"{public}+{local}" if local else public


def repository() -> str:
    """The address in pyproject.toml; "" where the owner has given none."""
    given = re.search(r'^repository = "(.*)"', Path("pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    return given[1].rstrip("/") if given else ""


def long_description(text: str, base: str, tag: str) -> str:
    """README.md's text as a page outside of the repository: relative links and pictures lead to the repository's `tag`.

    Without a repository's address links become their words, and pictures go.
    """

    def markdown(link: re.Match[str]) -> str:
        code, picture, words, path = link.groups()
        if code:
            return code
        if not base:
            return "" if picture else words
        return f"{picture}[{words}]({base}/{'raw' if picture else 'blob'}/{tag}/{path})"

    def html(attribute: re.Match[str]) -> str:
        name, path = attribute.groups()
        return f'{name}="{base}/{"blob" if name == "href" else "raw"}/{tag}/{path}"'

    elsewhere = r"(?!(?:[a-z]+:|#))"
    if not base:
        text = re.sub(r"<picture>.*?</picture>|<img [^>]*>", "", text, flags=re.DOTALL)
    code = r"^```.*?^```|`[^`\n]*`"
    text = re.sub(rf"({code})|(!?)\[([^\]]*)\]\({elsewhere}([^)\s]+)\)", markdown, text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(rf'\b(href|src|srcset)="{elsewhere}([^"]+)"', html, text)


def project_urls(base: str, tag: str) -> dict[str, str]:
    """Links for `pip show --verbose` and PyPI's margin; nothing without a repository's address."""
    pages = {
        "Documentation": f"blob/{tag}/docs/README.md",
        "Changelog": f"blob/{tag}/CHANGELOG.md",
        "Issues": "issues",
        "Security": f"blob/{tag}/SECURITY.md",
    }
    return {"Repository": base, **{name: f"{base}/{path}" for name, path in pages.items()}} if base else {}


# The licence is here because pyproject.toml has no form for it that setuptools takes before and after its release 77;
# version, page and addresses, because each is made of something.
if __name__ == "__main__":
    TAG = f"v{version().partition('+')[0]}"
    setup(
        version=version(),
        license="BSD-3-Clause",
        long_description=long_description(Path("README.md").read_text(encoding="utf-8"), repository(), TAG),
        long_description_content_type="text/markdown",
        project_urls=project_urls(repository(), TAG),
        ext_modules=FORMS[:1],
        cmdclass={"build_ext": Build, "build_py": BuildPython},
    )
