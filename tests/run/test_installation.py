"""The amp_patch that `info` says is in use, inside a clone and outside."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from python_forks import python

from amp_patch.run import installation
from amp_patch.run.installation import Installed, extension_in_words, package_in_words

pytestmark = pytest.mark.program

ROOT = Path(__file__).parents[2]


def clone(folder: Path) -> Path:
    """Make the files that identify a clone. Return its package."""
    for name in ("amp_patch", "csrc/kernels"):
        (folder / name).mkdir(parents=True)
    for name in ("setup.py", "csrc/kernels/cpu.cpp", "amp_patch/__init__.py"):
        (folder / name).touch()
    return (folder / "amp_patch").resolve()


def copy(folder: Path) -> Path:
    (folder / "amp_patch").mkdir(parents=True)
    return (folder / "amp_patch").resolve()


def test_info_names_an_installed_package(tmp_path):
    found = copy(tmp_path)
    assert package_in_words(found, [Installed("1.0", found, False)]) == f"{found} (installed)"
    assert package_in_words(found, [Installed("1.0", found, True)]) == f"{found} (a clone, installed by pip install -e)"


@pytest.mark.parametrize("here", [True, False])
def test_info_warns_of_a_clone_in_front_of_an_installed_package(here, tmp_path, monkeypatch):
    found, other = clone(tmp_path / "clone"), copy(tmp_path / "site")
    monkeypatch.chdir(tmp_path / "clone" if here else tmp_path)
    said = package_in_words(found, [Installed("1.0", other, False)])
    if here:
        assert said.startswith(
            f"{found} (a clone in the working directory, where `python -m` looks first; NOT the inst"
        )
        assert said.endswith(f"installed one: 1.0 in {other} is used in other directories)")
    else:
        assert said == f"{found} (a clone; NOT the installed one: 1.0 in {other} comes later on sys.path)"
    assert package_in_words(found, []).endswith("; none is installed)")


def distribution(site: Path, url: str | None = None, record: bool = True, kind: str = "dist-info") -> None:
    folder = site / f"amp_patch-9.9.{kind}"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: amp_patch\nVersion: 9.9\n")
    (folder / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: amp_patch\nVersion: 9.9\n")
    if record:
        (folder / "RECORD").touch()
    if url is not None:
        (folder / "direct_url.json").write_text(json.dumps({"url": url, "dir_info": {"editable": True}}))


def test_installed_packages_are_read_from_their_records(tmp_path, monkeypatch):
    """A wheel and a clone by `pip install -e` have records. The egg-info of a build has none: it is not installed."""
    monkeypatch.setattr(sys, "path", [str(tmp_path / name) for name in ("wheel", "editable", "left")])
    distribution(tmp_path / "wheel")
    distribution(tmp_path / "editable", url=(tmp_path / "my clone").as_uri())
    distribution(tmp_path / "left", record=False, kind="egg-info")
    assert [*installation._installed()] == [
        Installed("9.9", (tmp_path / "wheel" / "amp_patch").resolve(), False),
        Installed("9.9", (tmp_path / "my clone" / "amp_patch").resolve(), True),
    ]


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


def test_info_names_the_package_that_python_imports(tmp_path):
    """The clone is this one; another is installed in a folder of site-packages."""
    site = tmp_path / "site"
    distribution(site)
    shutil.copytree(ROOT / "amp_patch", site / "amp_patch", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    told = {}
    for name, folder in {"clone": ROOT, "elsewhere": tmp_path}.items():
        run = python("-m", "amp_patch", "info", cwd=folder, env={**os.environ, "PYTHONPATH": str(site)})
        assert run.returncode == 0, run.stderr
        told[name] = next(line for line in run.stdout.splitlines() if line.startswith("package"))
    there = (site / "amp_patch").resolve()
    assert f" {ROOT / 'amp_patch'} (a clone" in told["clone"]
    assert f"9.9 in {there}" in told["clone"]
    assert f" {there} (installed" in told["elsewhere"]
