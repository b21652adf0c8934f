"""The lines of `info` that say which amp_patch runs.

`python -m` looks in the working directory first, so in the folder of a clone the clone is imported, and not an
installed one.
"""

from __future__ import annotations

from pathlib import Path

_OWN = Path(__file__).resolve().parents[1]
_BUILD = "`pip install --no-build-isolation -e .`"


def package_in_words(package: Path = _OWN) -> str:
    """Return the folder of the package that runs, and whether it is a clone, in the working directory or elsewhere."""
    package = package.resolve()
    if not _is_clone(package):
        return str(package)
    here = " in the working directory, where `python -m` looks first" if package.parent == Path.cwd().resolve() else ""
    return f"{package} (a clone{here})"


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
