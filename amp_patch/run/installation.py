"""The lines of `info` that say which amp_patch runs: an installed one, or a clone that shadows it.

`python -m` looks in the working directory first, so in the folder of a clone the clone is imported.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import url2pathname

_NAME = "amp_patch"
_OWN = Path(__file__).resolve().parents[1]
_BUILD = "`pip install --no-build-isolation -e .`"


class Installed(NamedTuple):
    """An amp_patch that pip has installed."""

    version: str
    package: Path  # the folder of the package, which is in a clone if `editable`
    editable: bool  # installed by `pip install -e`


def package_in_words(package: Path = _OWN, installed: list[Installed] | None = None) -> str:
    """Say which amp_patch runs: its folder, and whether the folder is installed, a clone or a copy.

    If amp_patch is installed in another folder too, the words name that folder.

    Args:
        package: the folder; default: the folder of this file's package.
        installed: the installations of pip; default: all on this Python's sys.path.
    """
    package = package.resolve()
    installed = [*_installed()] if installed is None else installed
    same = [each for each in installed if each.package == package]
    others = [each for each in installed if each.package != package]
    elsewhere = ", ".join(f"{each.version} in {each.package}" for each in others)
    if same:
        kind = "a clone, installed by pip install -e" if same[0].editable else "installed"
        return f"{package} ({kind}{f'; another: {elsewhere}' if elsewhere else ''})"
    kind, first = "a clone" if _is_clone(package) else "a copy", "comes later on sys.path"
    if package.parent == Path.cwd().resolve():
        kind, first = f"{kind} in the working directory, where `python -m` looks first", "is used in other directories"
    rest = f"NOT the installed one: {elsewhere} {first}" if elsewhere else "none is installed"
    return f"{package} ({kind}; {rest})"


def extension_in_words(package: Path = _OWN) -> str:
    """Return the path of the compiled extension; in a clone also whether a source file is newer. "none" without one."""
    file = next(iter(sorted(each for each in package.glob("_C.*") if each.suffix in (".so", ".pyd"))), None)
    if file is None:
        return "none"
    if not _is_clone(package):
        return str(file)
    sources = [each for each in (package.parent / "csrc").rglob("*") if each.is_file()]
    newest = max(sources, key=lambda each: each.stat().st_mtime, default=None)
    if newest is None or newest.stat().st_mtime <= file.stat().st_mtime:
        return f"{file}, newer than its sources"
    changed = newest.relative_to(package.parent).as_posix()
    return f"{file}, OLDER than its sources ({changed}): build it with {_BUILD}"


def _is_clone(package: Path) -> bool:
    return (package.parent / "csrc").is_dir() and (package.parent / "setup.py").is_file()


def _installed() -> Iterator[Installed]:
    for found in importlib.metadata.distributions(name=_NAME):
        if found.read_text("RECORD") is None:
            continue  # an .egg-info that a build left in a clone: nothing is installed
        origin = json.loads(found.read_text("direct_url.json") or "{}")
        editable = bool(origin.get("dir_info", {}).get("editable"))
        folder = Path(url2pathname(urlsplit(origin["url"]).path)) if editable else Path(str(found.locate_file("")))
        yield Installed(found.version, (folder / _NAME).resolve(), editable)
