"""Metadata of a release: the page made of README.md, addresses, and the torch that a build is for."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import versions
from paths import ROOT

from amp_patch import __version__
from amp_patch.multi_tensor import backends

pytestmark = pytest.mark.program

README = (ROOT / "README.md").read_text()
HOME = "https://example.org/someone/amp_patch"


@pytest.fixture(scope="module")
def setup():
    """The names of setup.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setenv("AMP_PATCH_NO_EXT", "1")
        return SimpleNamespace(**runpy.run_path("setup.py"))


def targets(text: str) -> list[str]:
    """Where links and pictures lead, in Markdown and in HTML."""
    return re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'\b(?:href|src|srcset)="([^"]+)"', text)


def test_links_of_the_readme_lead_to_the_tag_from_elsewhere(setup):
    page = setup.long_description(README, HOME, f"v{__version__}")
    ours = {target.removeprefix(HOME) for target in targets(page) if target.startswith(HOME)}
    assert all(re.match("https?:|#", target) for target in targets(page))
    assert f"/blob/v{__version__}/docs/guide.md" in ours
    pictures = {target for target in ours if target.endswith(".svg")}
    assert pictures and all(target.startswith(f"/raw/v{__version__}/docs/") for target in pictures)
    relative = [target for target in targets(README) if not re.match("https?:|#", target)]
    assert ours == {f"/{'raw' if path.endswith('.svg') else 'blob'}/v{__version__}/{path}" for path in relative}


def test_addresses_lead_to_files_of_the_repository(setup):
    urls = setup.project_urls(HOME, "v1")
    assert urls.pop("Repository") == HOME and urls.pop("Issues") == f"{HOME}/issues"
    assert {"Documentation", "Changelog"} <= set(urls)
    for url in urls.values():
        assert (ROOT / url.removeprefix(f"{HOME}/blob/v1/")).is_file()


def test_the_address_is_written_in_one_place_and_cited(setup):
    cited = re.findall(r'^repository-code: "?([^"\n]+)', (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        assert cited == [address for address in [setup.repository()] if address]


def test_metadata_names_each_python_that_is_tested_and_the_oldest_are_tested():
    text = (ROOT / "pyproject.toml").read_text()
    named = set(re.findall(r"Programming Language :: Python :: (3\.\d+)", text))
    assert named == {which.python for which in versions.VERSIONS}
    oldest_torch = re.search(r'dependencies = \["torch>=([\d.]+)"\]', text)[1]
    assert any(which.torch.startswith(f"{oldest_torch}.") for which in versions.VERSIONS)
    assert re.search(r'requires-python = ">=([\d.]+)"', text)[1] in named


def imported(torch_of_build: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What a process says whose amp_patch._C, if it has one, was built with that torch."""
    program = (
        "import sys, types\n"
        f"sys.modules['amp_patch._build'] = types.SimpleNamespace(REASON='', TORCH={torch_of_build!r})\n"
        "from amp_patch import multi_tensor\nprint(multi_tensor.backend())\nprint(multi_tensor.backend_reason())\n"
    )
    inherited = {name: value for name, value in os.environ.items() if name != "AMP_PATCH_BACKEND"}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=ROOT, env={**inherited, **environment}, capture_output=True, text=True)


def test_an_extension_of_another_torch_is_not_loaded_and_says_so_once():
    said = imported("2.5.1+cpu")
    backend, reason = said.stdout.splitlines()
    assert backend == "torch"
    assert reason.startswith(f"amp_patch._C was built with torch 2.5.1+cpu, and this is torch {torch.__version__}: ")
    assert "install the wheel for this torch, or build it with `pip install --no-build-isolation .`" in reason
    assert said.stderr.count(f"RuntimeWarning: amp_patch runs on plain torch: {reason}") == 1


@pytest.mark.parametrize("choice", ["torch", "cpp"])
def test_who_chooses_the_backend_is_not_warned_of_another_torch(choice):
    said = imported("2.5.1", AMP_PATCH_BACKEND=choice)
    assert "RuntimeWarning" not in said.stderr
    if choice == "torch":
        assert said.stdout.splitlines()[0] == "torch"
    else:
        assert "ImportError: AMP_PATCH_BACKEND=cpp, but amp_patch._C was built with torch 2.5.1" in said.stderr


@pytest.mark.parametrize("version", ["", torch.__version__, ".".join([*torch.__version__.split(".")[:2], "99+cu999"])])
def test_patch_releases_and_older_builds_are_tried(monkeypatch, version):
    """What the loader then says is its own."""
    tried = []
    monkeypatch.setitem(sys.modules, "amp_patch._build", SimpleNamespace(REASON="", TORCH=version))
    monkeypatch.setattr(
        backends, "importlib", SimpleNamespace(import_module=lambda name: tried.append(name) or load(name))
    )

    def load(name):
        return sys.modules[name] if name.endswith("_build") else SimpleNamespace(devices=["cpu"])

    assert backends._load()[1] == "amp_patch._C is built for cpu"
    assert tried == ["amp_patch._build", "amp_patch._C"]
