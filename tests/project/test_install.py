"""README's lines in bare environments, one for each Python that is here; wheel and source archive.

The Python that runs the tests gets the release of torch that it has, and builds the extension, by `make test-release`.
For the others PyPI's torch would bring CUDA's libraries, some 3 GB: AMP_PATCH_INSTALL_TORCH=1 asks for them. Without,
these install amp_patch alone, and every file is compiled.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
import versions
from paths import ROOT

from amp_patch import __version__

pytestmark = pytest.mark.slow
RUNNING = ".".join(map(str, sys.version_info[:2]))
README = re.search(r"^To use it,.*\n\n((?: {4}.+\n)+)", (ROOT / "README.md").read_text(), re.MULTILINE)
LINES = [line.partition("#")[0].strip() for line in README[1].splitlines()] if README else []


def interpreters() -> dict[str, str]:
    """Of each version that metadata names the first that is there: the running one, pyenv's, those on PATH."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    folders = [Path(sys.base_prefix, "bin"), *sorted(pyenv.glob("versions/*/bin"))]
    # Not pyenv's shims, which are there for versions that none has chosen.
    folders += [Path(folder) for folder in os.get_exec_path() if Path(folder) != pyenv / "shims"]
    names = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    found = {name: [folder / f"python{name}" for folder in folders] for name in names}
    there = {name: [str(path) for path in paths if os.access(path, os.X_OK)] for name, paths in found.items()}
    return {name: paths[0] for name, paths in there.items() if paths}


PYTHONS = interpreters()
WITH_TORCH = [name for name in PYTHONS if name == RUNNING or os.environ.get("AMP_PATCH_INSTALL_TORCH")]


class Environment:
    """A bare environment of one Python."""

    def __init__(self, name: str, folder: Path) -> None:
        self.bin = folder / "bare" / "bin"
        made = subprocess.run([PYTHONS[name], "-m", "venv", str(folder / "bare")], capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"{PYTHONS[name]} makes no environments: {made.stdout.splitlines()[-1:]}")

    def run(self, line: str, folder: Path, ok: bool = True, **environment: str) -> str:
        """Run a shell line in the environment; return its output. With `ok` it must succeed."""
        hidden = ("PYTHONPATH", "VIRTUAL_ENV", "AMP_PATCH_NO_EXT", "AMP_PATCH_BACKEND", "AMP_PATCH_LOCAL_VERSION")
        inherited = {name: value for name, value in os.environ.items() if name not in hidden}
        path = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            line, shell=True, cwd=folder, env={**inherited, "PATH": path, **environment}, capture_output=True, text=True
        )
        assert not ok or done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive, made where torch cannot be imported."""
    folder = tmp_path_factory.mktemp("archive")
    shutil.copytree(ROOT, folder / "amp_patch", ignore=versions.NOT_COPIED)
    (folder / "amp_patch" / "torch.py").write_text("raise ImportError('hidden')\n")
    make = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", make], cwd=folder / "amp_patch", check=True, capture_output=True)
    (made,) = folder.glob("*.tar.gz")
    assert made.name == f"amp_patch-{__version__}.tar.gz"
    return made


TRAIN = """
import torch
from amp_patch import amp, multi_tensor

model = torch.nn.Linear(8, 4)
model, optimizer = amp.initialize(model, torch.optim.AdamW(model.parameters()), opt_level="O2", verbosity=0)
before = [parameter.clone() for parameter in model.parameters()]
with amp.scale_loss(model(torch.randn(2, 8)).square().mean() / 64, optimizer) as scaled_loss:  # nothing overflows
    scaled_loss.backward()
optimizer.step()
assert not any(map(torch.equal, before, model.parameters()))
print(multi_tensor.backend())
"""


@pytest.mark.release
@pytest.mark.parametrize("name", WITH_TORCH)
def test_readme_s_lines_install_it_with_its_extension(name, archive, tmp_path):
    """Where the archive was unpacked, which holds what a clone does, in a folder of a clone's name."""
    environment = Environment(name, tmp_path)
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    # The folder that `git clone` makes: Python must not take it for the package where the last line runs.
    sources = (tmp_path / archive.name.removesuffix(".tar.gz")).rename(tmp_path / "amp_patch")
    release = torch.__version__.partition("+")[0]
    assert LINES == ["pip install torch numpy", "pip install .", "cd .. && python -m amp_patch info"]
    environment.run(LINES[0].replace("torch", f"torch=={release}"), sources)
    # No CUDA_HOME: the kernels for GPUs take a quarter of an hour to compile.
    environment.run(LINES[1], sources, AMP_PATCH_REQUIRE_EXT="1", CUDA_HOME=os.devnull)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert re.search(r"^kernels +cpp: amp_patch\._C is built for cpu", environment.run(LINES[2], sources), re.MULTILINE)
    assert "No broken requirements found." in environment.run("pip check", elsewhere)
    (elsewhere / "train.py").write_text(TRAIN)
    assert "cpp" in environment.run("python -W error::RuntimeWarning train.py", elsewhere).splitlines()


@pytest.mark.parametrize("name", PYTHONS)
def test_without_torch_archive_and_wheel_are_installed_and_every_file_compiles(name, archive, tmp_path):
    environment = Environment(name, tmp_path)
    said = environment.run(f"pip wheel -v --no-deps --no-cache-dir -w . {archive}", tmp_path)
    assert "amp_patch._C is left out, No module named 'torch' where it was built: install torch first" in said
    assert [wheel.name for wheel in tmp_path.glob("*.whl")] == [f"amp_patch-{__version__}-py3-none-any.whl"]
    environment.run("pip install --no-index --no-deps --find-links . amp_patch", tmp_path)
    (package,) = environment.bin.parent.glob("lib/python*/site-packages/amp_patch")
    environment.run(f"python -W error -m compileall -q -f {package}", tmp_path)
    assert (package / "comparison" / "templates" / "report.html").is_file()
    assert "requires torch, which is not installed" in environment.run("pip check", tmp_path, ok=False)
    refusal = environment.run("python -c 'import amp_patch'", tmp_path, ok=False).splitlines()[-1]
    assert refusal.startswith("ModuleNotFoundError: amp_patch: there is no torch in this Python (")
    assert "`pip install torch numpy`" in refusal
    shown = environment.run("pip show amp_patch", tmp_path)
    assert f"Version: {__version__}\n" in shown and "License: BSD-3-Clause\n" in shown
