"""README.md, the other pages of the top level and docs: links and files that they name are there, their Python runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT
from torch import nn

from amp_patch import __version__, amp, apex

TOP = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY")]
PAGES = [*TOP, *sorted((ROOT / "docs").glob("*.md"))]

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def without_code(text: str) -> str:
    """Return the text without fenced and indented blocks, and without inline code."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", lambda code: "x" * len(code[0]), re.sub(r"^ {4}.*$", "", text, flags=re.MULTILINE))


def anchors(page: Path) -> set[str]:
    """GitHub's name of each heading: lower case, spaces become hyphens, punctuation goes."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE)


@each_page
def test_each_relative_link_and_anchor_resolves(page):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_the_index_has_each_page_and_the_readme_has_the_index():
    def linked(page: Path) -> set[Path]:
        return {(page.parent / path).resolve() for path in re.findall(r"\]\(([\w./-]+\.md)", page.read_text())}

    index = ROOT / "docs" / "README.md"
    assert index in linked(ROOT / "README.md")
    assert set(PAGES) - {index} <= linked(index)


@each_page
def test_each_source_that_a_page_names_exists(page):
    """Named by its path in the repository, in amp_patch/, in tests/ or in its folder's row; `path/*.py` is any such.

    Headers of torch and files of the packages whose models docs/models.md has are not ours.
    """
    text = page.read_text()
    others = "torch ATen c10 diffusers timm torch_geometric torchvision transformers x_transformers"
    foreign = "|".join(f"{name}/" for name in others.split())
    named = re.findall(rf"(?<![\w./-])(?!{foreign})((?:[\w*-]+/)+[\w*-]+\.(?:py|sh|h|cpp|cu|toml))\b", text)
    for folder, files in re.findall(r"^\| `((?:\w+/)+)` \| (.*) \|$", text, re.MULTILINE):
        named += [folder + name for name in re.findall(r"`(\w+\.py)`", files)]
    bases = (ROOT, ROOT / "amp_patch", ROOT / "tests")
    missing = [path for path in named if not any(any(base.glob(path)) for base in bases)]
    assert missing == []


@pytest.mark.parametrize(("name", "lines"), [("README.md", 130), ("CONTRIBUTING.md", 55)])
def test_the_first_pages_are_read_in_a_minute(name, lines):
    assert len((ROOT / name).read_text().splitlines()) <= lines


def test_the_floors_of_the_architecture_equal_lint_s():
    contract = re.search(r"^layers = \[.*?\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
    floors = re.findall(r"^\| (\d+) \| (.*?) \|", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    held = [set(re.findall(r"\w+", line)) for line in re.findall(r'"(.*)"', contract[1])]
    assert [set(re.findall(r"\w+", wings)) for _, wings in floors] == held
    assert [int(floor) for floor, _ in floors] == list(range(len(held), 0, -1))


LISTED = {path.parent.name for path in (ROOT / "amp_patch").glob("*/__init__.py")} - {"apex", "cpu", "cuda"}


@pytest.mark.parametrize("wing", sorted(LISTED))
def test_each_folder_lists_its_files(wing):
    """apex/ has the layout of Apex's package."""
    for folder in (path.parent for path in (ROOT / "amp_patch" / wing).rglob("__init__.py")):
        listed = re.findall(r"^- `([\w./]+)`: ", (folder / "__init__.py").read_text(), re.MULTILINE)
        held = {f"{path.name}/" if path.is_dir() else path.name for path in folder.iterdir()}
        held -= {"__init__.py", "__pycache__/", "templates/"}
        assert sorted(listed) == sorted(held)


@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)], ids=lambda page: page.name)
def test_the_python_of_a_page_runs_and_prints_its_output(page, tmp_path, monkeypatch, capsys):
    """The blocks run in order, in one namespace with the names that the pages expect from the reader's script."""
    monkeypatch.chdir(tmp_path)  # some write files
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if page.name not in ("torch-amp.md", "oneflow.md"):  # these show scripts without a level
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    names: dict[str, Any] = {
        "amp": amp,
        "torch": torch,
        "model": model,
        "optimizer": optimizer,
        "loss_fn": nn.functional.cross_entropy,
        "inputs": torch.randn(32, 8),
        "targets": torch.randint(0, 4, (32,)),
    }
    try:
        for block in python_blocks(page):
            exec(compile(block, page.name, "exec"), names)
            printed = capsys.readouterr().out.splitlines()
            assert [
                said for said in re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE) if said not in printed
            ] == []
    finally:
        apex.uninstall()


def test_one_version_is_named_everywhere():
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1].startswith(f"{__version__}\n")
