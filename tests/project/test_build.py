"""setup.py: with a compiler, without one, and without the extension; each in a copy of the sources."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from paths import ROOT

pytestmark = pytest.mark.program


@pytest.fixture
def sources(tmp_path):
    """setup.py over a package of one file and an extension that compiles in a second."""
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "amp_patch").mkdir()
    (tmp_path / "amp_patch" / "__init__.py").write_text('__version__ = "1.2.3"\n')
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "small.cpp").write_text(
        "#include <Python.h>\n"
        'static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr};\n'
        "PyMODINIT_FUNC PyInit__C() { return PyModule_Create(&definition); }\n"
    )
    return tmp_path


def run_in(folder, command, **environment):
    switches = ("AMP_PATCH_NO_EXT", "AMP_PATCH_REQUIRE_EXT", "AMP_PATCH_LOCAL_VERSION", "FORCE_CUDA")
    inherited = {name: value for name, value in os.environ.items() if name not in switches}
    return subprocess.run(command, cwd=folder, env={**inherited, **environment}, capture_output=True, text=True)


def build(folder, *arguments, **environment):
    return run_in(folder, [sys.executable, "setup.py", *(arguments or ("build_ext", "--inplace"))], **environment)


def extensions(folder):
    return list((folder / "amp_patch").glob("_C*"))


def noted(folder, name):
    values: dict[str, str] = {}
    exec((folder / "amp_patch" / "_build.py").read_text(), values)
    return values[name]


def reason(folder):
    return noted(folder, "REASON")


COMPILING = "compiling the C++ extension: 3 to 5 minutes on two cores"


def test_a_build_says_that_it_compiles_before_it_does(sources):
    told = build(sources)
    assert told.returncode == 0 and told.stderr.count(COMPILING) == 1, told.stderr
    assert COMPILING not in build(sources, AMP_PATCH_NO_EXT="1").stderr
    (sources / "csrc" / "small.cpp").write_text("#error no")
    assert build(sources, AMP_PATCH_REQUIRE_EXT="1").stderr.lstrip().startswith(COMPILING)


def test_no_ext_leaves_the_reason(sources):
    # -S hides site-packages' .pth files but not torch; a stub that fails proves that torch is not asked for.
    (sources / "torch.py").write_text("raise ImportError('torch was imported')\n")
    result = build(sources, AMP_PATCH_NO_EXT="1", PYTHONPATH=str(sources))
    assert result.returncode == 0, result.stderr
    assert extensions(sources) == []
    assert (reason(sources), noted(sources, "TORCH")) == ("it was installed with AMP_PATCH_NO_EXT=1", "")


def test_no_ext_removes_an_older_extension(sources):
    import sysconfig

    stale = sources / "amp_patch" / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    stale.touch()
    assert build(sources, AMP_PATCH_NO_EXT="1").returncode == 0
    assert not stale.exists()


@pytest.mark.parametrize("required", [False, True])
def test_without_torch_there_is_no_extension_and_the_way_to_one_is_named(sources, required):
    (sources / "torch.py").write_text("raise ImportError(\"No module named 'torch'\")\n")
    (sources / "alone.py").write_text(  # and setup.py, which would ask the Python that is installed for, gets no answer
        "import runpy, subprocess, sys\nsubprocess.run = lambda *_, **__: subprocess.CompletedProcess([], 0, '', '')\n"
        "sys.argv = ['setup.py', 'build_ext', '--inplace']\nrunpy.run_path('setup.py', run_name='__main__')\n"
    )
    result = run_in(sources, [sys.executable, "alone.py"], AMP_PATCH_REQUIRE_EXT=str(int(required)))
    why = "No module named 'torch' where it was built: install torch first, then amp_patch with `pip install"
    if required:
        assert result.returncode != 0
        assert f"AMP_PATCH_REQUIRE_EXT=1, but {why}" in result.stderr
    else:
        assert result.returncode == 0, result.stderr
        assert reason(sources).startswith(why)
        assert f"amp_patch._C is left out, {why}" in result.stdout + result.stderr


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """A folder of wheels with what a build asks pip for, so that pip can fetch nothing else: no torch."""
    folder = tmp_path_factory.mktemp("index")
    wanted = re.findall(r"^requires = \[(.*)\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[0]
    names = [*re.findall(r'"(.*?)"', wanted), "wheel"]
    got = run_in(folder, [sys.executable, "-m", "pip", "download", "-q", "-d", ".", *names])
    if got.returncode:
        pytest.skip(f"pip cannot get {names}: {got.stderr.splitlines()[-1]}")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("torch_is_there", [True, False])
def test_an_isolated_build_is_for_the_torch_beside_pip_and_fetches_none(sources, index, torch_is_there):
    """`pip wheel .` and `pip install .`, without --no-build-isolation."""
    python = sys.executable
    if not torch_is_there:
        run_in(sources, [python, "-m", "venv", "bare"])
        python = str(sources / "bare" / "bin" / "python")
    options = ["--no-deps", "--no-index", "--find-links", str(index), "-w", "wheels"]
    result = run_in(sources, [python, "-m", "pip", "wheel", *options, "."], PIP_FIND_LINKS="", PIP_EXTRA_INDEX_URL="")
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = (sources / "wheels").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(sources / "installed")
    assert len(extensions(sources / "installed")) == torch_is_there
    if torch_is_there:
        import torch

        assert noted(sources / "installed", "TORCH") == torch.__version__
        assert reason(sources / "installed") == ""
    else:  # it serves every torch, Python and machine
        assert wheel.name == "amp_patch-1.2.3-py3-none-any.whl"
        assert reason(sources / "installed").startswith("No module named 'torch' where it was built: ")


@pytest.mark.parametrize(("local", "name"), [("", "1.2.3"), ("torch2.13", "1.2.3+torch2.13"), ("2.13/cpu", None)])
def test_a_wheel_s_name_has_its_torch_and_device(sources, local, name):
    command = [sys.executable, "setup.py", "--version"]
    result = run_in(sources, command, AMP_PATCH_NO_EXT="1", AMP_PATCH_LOCAL_VERSION=local)
    if name is None:
        assert result.returncode != 0 and f"AMP_PATCH_LOCAL_VERSION={local!r}: wanted " in result.stderr
    else:
        assert result.stdout.splitlines()[-1] == name


def test_contradicting_switches_are_refused(sources):
    result = build(sources, AMP_PATCH_NO_EXT="1", AMP_PATCH_REQUIRE_EXT="1")
    assert result.returncode != 0
    assert "contradict each other" in result.stderr


@pytest.mark.slow
def test_a_failed_build_degrades_with_its_reason_and_a_good_one_forgets_it(sources):
    source = sources / "csrc" / "small.cpp"
    good = source.read_text()
    source.write_text("this is not C++\n")
    result = build(sources)
    assert result.returncode == 0, result.stderr
    assert extensions(sources) == []
    assert reason(sources).startswith("its build failed: ")
    assert "\n" not in reason(sources)

    source.write_text(good)
    result = build(sources)
    assert result.returncode == 0, result.stderr
    assert len(extensions(sources)) == 1
    assert reason(sources) == ""

    source.write_text("this is not C++\n")  # and what was built before must not be loaded instead
    assert build(sources).returncode == 0
    assert extensions(sources) == []


@pytest.mark.slow
def test_require_ext_makes_a_failed_build_an_error(sources):
    (sources / "csrc" / "small.cpp").write_text("this is not C++\n")
    result = build(sources, AMP_PATCH_REQUIRE_EXT="1")
    assert result.returncode != 0
    assert not (sources / "amp_patch" / "_build.py").exists()


def build_with_cuda(folder, torch_cuda, nvcc_release, **environment):
    """`build` where torch says that it is for CUDA `torch_cuda`, beside a compiler that says it is `nvcc_release`."""
    (folder / "csrc" / "device.cu").write_text("#error compiled\n")
    home = folder / "cuda"
    (home / "bin").mkdir(parents=True)
    if nvcc_release:
        nvcc = home / "bin" / "nvcc"
        nvcc.write_text(
            f"#!/bin/sh\necho 'Cuda compilation tools, release {nvcc_release}, V{nvcc_release}.1'\n"
            'test "$1" = --version\n'  # and nothing is compiled
        )
        nvcc.chmod(0o755)
    program = (
        "import os, runpy, sys, torch\nfrom torch.utils import cpp_extension\n"
        f"torch.version.cuda, cpp_extension.CUDA_HOME = {torch_cuda!r}, os.environ['CUDA_HOME']\n"
        "sys.argv[0] = 'setup.py'\nrunpy.run_path('setup.py', run_name='__main__')\n"
    )
    (folder / "with_cuda.py").write_text(program)
    switches = ("AMP_PATCH_NO_EXT", "AMP_PATCH_REQUIRE_EXT", "FORCE_CUDA", "CUDA_PATH")
    inherited = {name: value for name, value in os.environ.items() if name not in switches}
    return subprocess.run(
        [sys.executable, "with_cuda.py", "build_ext", "--inplace"],
        cwd=folder,
        env={**inherited, "CUDA_HOME": str(home), **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nvcc_release", "why"),
    [
        ("11.8", "their build failed: RuntimeError: The detected CUDA version (11.8)"),
        ("13.0", "their build failed: "),  # the compiler fails
        (None, "torch is for CUDA 13.0, but there is no nvcc (CUDA_HOME="),
    ],
)
def test_a_cuda_compiler_that_cannot_serve_leaves_the_cpu_kernels_and_is_named(sources, nvcc_release, why):
    result = build_with_cuda(sources, "13.0", nvcc_release, TORCH_CUDA_ARCH_LIST="9.0")
    assert result.returncode == 0, result.stderr
    assert len(extensions(sources)) == 1 and reason(sources).startswith(f"no CUDA kernels: {why}")


@pytest.mark.slow
def test_source_distributions_and_wheels_hold_sources_templates_and_types(sources):
    shutil.copy(ROOT / "MANIFEST.in", sources)
    for name in ("csrc/part.h", "csrc/kernels.cu", "amp_patch/_build.py"):  # the last is of a build in place
        (sources / name).touch()
    templates = Path("amp_patch", "comparison", "templates")
    shutil.copytree(ROOT / templates, sources / templates)
    shutil.copy(ROOT / "amp_patch" / "py.typed", sources / "amp_patch")
    (sources / "amp_patch" / "comparison" / "__init__.py").touch()
    wanted = {path.name for path in (ROOT / templates).iterdir()}
    assert wanted == {"report.html", "report.css"}
    for command in ("sdist", "--formats=tar"), ("build_py", "--build-lib", "built"):  # a wheel holds what that copies
        result = build(sources, *command, AMP_PATCH_NO_EXT="1")
        assert result.returncode == 0, result.stderr
    with tarfile.open(next((sources / "dist").glob("*.tar"))) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {str(templates / name) for name in wanted} | {"amp_patch/py.typed"} <= held
    assert held >= {"setup.py", "csrc/small.cpp", "csrc/part.h", "csrc/kernels.cu"}
    assert "amp_patch/_build.py" not in held
    assert {path.name for path in (sources / "built" / templates).iterdir()} == wanted
    assert (sources / "built" / "amp_patch" / "py.typed").exists()


@pytest.fixture
def toolkit(sources):
    """A toolkit of CUDA 13 whose compiler says what nvcc says, and in another folder a wrapper around it."""
    (sources / "csrc" / "device.cu").touch()
    for folder in ("cuda/bin", "cuda/include", "wrapped/bin"):
        (sources / folder).mkdir(parents=True)
    (sources / "cuda" / "include" / "cuda_runtime.h").touch()
    scripts = {
        "cuda": 'case "$1" in --dryrun) printf "#$ _HERE_=$0\\n#$ TOP=$(dirname "$0")/..\\n" >&2;;\n'
        '--list-gpu-arch) printf "compute_75\\ncompute_80\\ncompute_90\\ncompute_100\\n";; esac\n',
        "wrapped": f'exec {sources}/cuda/bin/nvcc "$@"\n',
    }
    for folder, script in scripts.items():
        nvcc = sources / folder / "bin" / "nvcc"
        nvcc.write_text(f"#!/bin/sh\n{script}")
        nvcc.chmod(0o755)
    return sources


# Return the choices of setup.py for each environment. One new process imports torch once.
CHOSEN = """
import json, os, runpy, sys, torch
torch.cuda.device_count = lambda: 0
for given in json.loads(sys.argv.pop()):
    if os.fork():
        assert os.wait()[1] == 0
        continue
    os.environ.update(given)
    sys.argv = ["setup.py", "--name"]
    runpy.run_path("setup.py", run_name="__main__")
    from torch.utils import cpp_extension as of_torch
    flags = of_torch._get_cuda_arch_flags()
    print(json.dumps([of_torch.CUDA_HOME, os.environ["TORCH_CUDA_ARCH_LIST"], flags]))
    break
"""


def chosen(folder, *environments):
    """The toolkit and the GPUs that setup.py compiles for where torch sees no GPU, and torch's flags for these."""
    (folder / "chosen.py").write_text(CHOSEN)
    switches = ("AMP_PATCH_NO_EXT", "AMP_PATCH_REQUIRE_EXT", "CUDA_PATH", "CUDA_HOME", "TORCH_CUDA_ARCH_LIST")
    inherited = {name: value for name, value in os.environ.items() if name not in switches}
    result = subprocess.run(
        [sys.executable, "chosen.py", json.dumps(environments)],
        cwd=folder,
        env={**inherited, "FORCE_CUDA": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    choices = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("[")]
    assert len(choices) == len(environments)
    return choices


def test_a_wrapper_of_nvcc_is_asked_for_its_toolkit(toolkit):
    on_path = [{"PATH": f"{toolkit / nvcc}/bin:{os.environ['PATH']}"} for nvcc in ("wrapped", "cuda")]
    by_cuda_home = [{"CUDA_HOME": str(toolkit / nvcc)} for nvcc in ("wrapped", "cuda")]
    assert [home for home, _, _ in chosen(toolkit, *on_path, *by_cuda_home)] == [str(toolkit / "cuda")] * 4


def test_without_a_gpu_it_is_compiled_for_the_compiler_s_architectures(toolkit):
    """An image is built on a machine without a GPU; torch would raise `IndexError: list index out of range`."""
    home = {"CUDA_HOME": str(toolkit / "cuda")}
    shutil.copytree(toolkit / "cuda", toolkit / "older")
    (toolkit / "older" / "bin" / "nvcc").write_text("#!/bin/sh\nexit 1\n")  # of a release that has no such list
    (_, gpus, flags), asked, older = chosen(
        toolkit, home, {**home, "TORCH_CUDA_ARCH_LIST": "8.6"}, {"CUDA_HOME": str(toolkit / "older")}
    )
    assert gpus == "7.5;8.0;9.0+PTX"
    assert "-gencode=arch=compute_90,code=compute_90" in flags and len(flags) == 4
    assert asked[1] == "8.6"
    assert older[1] == "7.0;7.5;8.0;8.6;8.9;9.0+PTX"
