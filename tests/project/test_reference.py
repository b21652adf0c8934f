"""docs/reference.md lists every public name and every environment variable that the package reads."""

from __future__ import annotations

import re

from paths import ROOT

import amp_patch

TEXT = (ROOT / "docs" / "reference.md").read_text()
INTERNAL = {"AMP_PATCH_GUARD"}  # set by amp_patch for a process of its own


def section(heading: str) -> str:
    return TEXT.split(f"## {heading}\n")[1].split("\n## ")[0]


def test_the_reference_lists_exactly_the_public_names():
    cells = re.findall(r"^\| (`.*?) \|", section("Public names"), re.MULTILINE)
    listed = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(listed) == sorted(amp_patch.__all__)


def test_the_reference_lists_exactly_the_variables_that_the_package_reads():
    listed = re.findall(r"^\| `(AMP_PATCH_\w+)` \|", section("Environment variables"), re.MULTILINE)
    sources = "\n".join(path.read_text() for path in (ROOT / "amp_patch").rglob("*.py"))
    read = set(re.findall(r'"(AMP_PATCH_[A-Z0-9_]+)"', sources)) - INTERNAL
    assert len(listed) == len(set(listed)) and set(listed) == read
