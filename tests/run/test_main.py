"""`python -m amp_patch info`: the first lines of a bug report."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from paths import ROOT
from python_forks import python

import amp_patch
from amp_patch import multi_tensor
from amp_patch.__main__ import main
from amp_patch.casts import wrappers as cast_wrappers
from amp_patch.run.installation import extension_in_words, package_in_words


def rows(printed: str) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in printed.splitlines())


def test_info_names_versions_kernels_and_devices(capsys):
    main(["info"])
    printed = rows(capsys.readouterr().out)
    assert printed["amp_patch"] == amp_patch.__version__
    assert printed["torch"] == torch.__version__
    assert printed["kernels"] == f"{multi_tensor.backend()}: {multi_tensor.backend_reason()}"
    assert torch.backends.cpu.get_cpu_capability() in printed["devices"]
    assert printed["devices"].count("cuda:") == torch.cuda.device_count()


def test_info_says_why_the_kernels_are_plain_torch(capsys):
    with multi_tensor.use_backend("torch"):
        main(["info"])
        reason = multi_tensor.backend_reason()
    assert rows(capsys.readouterr().out)["kernels"] == f"torch: {reason}"


WORDS = {torch.float16: ("float16", "FP16"), torch.bfloat16: ("bfloat16", "BF16")}


@pytest.mark.parametrize(
    ("arithmetic", "expected"),
    [(True, "auto is native, this CPU has {} arithmetic"), (False, "auto is emulate, this CPU has no {} arithmetic")],
)
@pytest.mark.parametrize("dtype", WORDS, ids=str)
def test_info_says_how_a_type_runs_on_this_cpu(dtype, arithmetic, expected, capsys, monkeypatch):
    monkeypatch.setattr("amp_patch.run.machine.has_arithmetic", lambda dtype: arithmetic)
    main(["info"])
    row, name = WORDS[dtype]
    assert rows(capsys.readouterr().out)[row] == expected.format(name)


def test_info_names_the_backend_of_the_casts(wrappers, capsys):
    main(["info"])
    assert rows(capsys.readouterr().out)["casts"].startswith(f"{cast_wrappers.backend()}: ")
    assert cast_wrappers.backend() == wrappers


@pytest.mark.parametrize("arguments", [[], ["inform"]], ids=["none", "unknown"])
def test_an_unknown_subcommand_shows_the_usage(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "python -m amp_patch" in capsys.readouterr().err


def test_python_dash_m_prints_all_rows_of_info():
    run = subprocess.run([sys.executable, "-W", "error", "-m", "amp_patch", "info"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    assert set(rows(run.stdout)) == {
        "amp_patch",
        "package",
        "extension",
        "torch",
        "python",
        "kernels",
        "casts",
        "devices",
        "bfloat16",
        "float16",
    }


@pytest.mark.parametrize("command", [["-m", "amp_patch", "info"], ["-m", "amp_patch"], ["-c", "import amp_patch"]])
def test_a_missing_torch_is_named_with_the_command_to_install_it(command, tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    run = subprocess.run(
        [sys.executable, *command], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert run.returncode == 1 and "pip install torch" in run.stderr and sys.executable in run.stderr
    assert ("Traceback" in run.stderr) is (command[0] == "-c")


def test_a_torch_that_is_broken_shows_its_own_error(tmp_path):
    (tmp_path / "torch.py").write_text("import a_part_of_torch_that_is_missing")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    command = [sys.executable, "-m", "amp_patch", "info"]
    run = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert run.returncode == 1 and "No module named 'a_part_of_torch_that_is_missing'" in run.stderr


@pytest.mark.parametrize("command", [["amp_patch", "compare", "train.py"], ["package_that_imports_it", "compare"]])
def test_an_import_prints_nothing(command, tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit(3)")
    (tmp_path / "package_that_imports_it").mkdir()
    (tmp_path / "package_that_imports_it" / "__init__.py").write_text("import amp_patch")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    python = [sys.executable, "-m", *command]
    run = subprocess.run(python, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (3, "")


# ---------------------------------------------------------------------------------------------------------------------
# The amp_patch that `info` says is in use, inside a clone and outside


def clone(folder: Path) -> Path:
    """Make the files that identify a clone. Return its package."""
    for name in ("amp_patch", "csrc/kernels"):
        (folder / name).mkdir(parents=True)
    for name in ("setup.py", "csrc/kernels/cpu.cpp", "amp_patch/__init__.py"):
        (folder / name).touch()
    return (folder / "amp_patch").resolve()


def test_info_names_a_clone_and_whether_the_working_directory_is_its(tmp_path, monkeypatch):
    found, site = clone(tmp_path / "clone"), (tmp_path / "site" / "amp_patch").resolve()
    site.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert (package_in_words(found), package_in_words(site)) == (f"{found} (a clone)", str(site))
    monkeypatch.chdir(tmp_path / "clone")
    assert package_in_words(found) == f"{found} (a clone in the working directory, where `python -m` looks first)"


def test_info_warns_of_an_extension_older_than_its_sources(tmp_path):
    package = clone(tmp_path)
    assert extension_in_words(package) == "none"
    file, source = package / "_C.cpython.so", tmp_path / "csrc" / "kernels" / "cpu.cpp"
    file.touch()
    os.utime(source, (1000, 1000))
    assert extension_in_words(package) == f"{file}, newer than its sources"
    os.utime(file, (999, 999))
    said = extension_in_words(package)
    assert said.startswith(f"{file}, OLDER than its sources (csrc/kernels/cpu.cpp): build it with `pip install")
    shutil.rmtree(tmp_path / "csrc")
    assert extension_in_words(package) == str(file)


@pytest.mark.program
def test_info_names_the_package_that_python_imports(tmp_path):
    """In its folder the clone is this one; elsewhere it is the package on PYTHONPATH."""
    site = tmp_path / "site"
    shutil.copytree(ROOT / "amp_patch", site / "amp_patch", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    told = {}
    for name, folder in {"clone": ROOT, "elsewhere": tmp_path}.items():
        run = python("-m", "amp_patch", "info", cwd=folder, env={**os.environ, "PYTHONPATH": str(site)})
        assert run.returncode == 0, run.stderr
        told[name] = next(line for line in run.stdout.splitlines() if line.startswith("package"))
    assert f" {ROOT / 'amp_patch'} (a clone" in told["clone"]
    assert told["elsewhere"].endswith(f" {(site / 'amp_patch').resolve()}")
