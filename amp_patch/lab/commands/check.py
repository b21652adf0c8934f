"""`python -m amp_patch check train.py folder`: the names of Apex that files use, and whether amp_patch serves them.

It also lists the names of torch's own mixed precision, each with its name in amp_patch. If the files use neither, it
says whether `compare` would accept them as an FP32 script.

The files are parsed, never run. Names are found in imports under any alias, in `import_module`, `hasattr` and `getattr`
with a string literal, in chains of attributes, in variables that are set to one of these, and in keyword arguments.
Arguments and results of functions are not tracked. An optimizer is often such an argument, so the private names that
Apex puts on optimizers are recognised on any object.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import amp_patch.apex
from amp_patch.lab.commands import apex_surface, check_fp32, no_cuda
from amp_patch.lab.commands.apex_served import (
    CALL,
    DIFFERS,
    ELEMENT,
    EXTENSIONS,
    MISSING,
    SERVED,
    Finding,
    finding,
    imported,
)
from amp_patch.lab.commands.check_run import check_run
from amp_patch.lab.text_table import in_columns

WIDTH = 80
_STATUS_WIDTH = 7  # len("missing"), the longest status


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `check`."""
    parser.add_argument("paths", nargs="+", metavar="path", help="a Python file, a notebook, or a folder of these")
    parser.add_argument("--json", action="store_true", help="print JSON")
    words = "run the first step of a script in FP32 (its arguments follow --), and list the lines that a level breaks"
    parser.add_argument("--run", action="store_true", help=words)
    parser.add_argument("-m", dest="module", action="store_true", help="with --run, path is a module, as in python -m")
    words = "with --run, cpu, mps or xpu: use this device wherever the script asks for CUDA"
    parser.add_argument("--device", type=no_cuda.here, help=words)


def check(args: argparse.Namespace) -> None:
    """list the names of Apex and of torch's mixed precision that files use, without running them; for an FP32 script,
    say whether `compare` accepts it; exit code 1 if a name of Apex is missing, 2 if a file cannot be read"""
    if args.run:
        check_run(args.paths[0], args.paths[1:], args.json, args.device, args.module)
    if args.module:
        print("check: -m names a module to run; add --run", file=sys.stderr)
        sys.exit(2)
    paths = [Path(path) for path in args.paths]
    uses, errors = read(paths)
    findings = [finding(name, places) for name, places in sorted(uses.items())]
    natives = native(paths)
    fp32 = None if findings or natives else check_fp32.trained(_readable(paths))
    if args.json:
        names = {"names": [asdict(found) for found in findings], "native": [asdict(found) for found in natives]}
        script = {} if fp32 is None else {"fp32": asdict(fp32)}
        print(json.dumps({**names, **script, "errors": errors}, indent=2))
    else:
        lines = [] if fp32 is None else [*check_fp32.report(fp32)]
        print("\n".join([*report(findings, errors, quiet=bool(natives)), *native_report(natives), *lines]))
    sys.exit(2 if errors else int(any(found.status == MISSING for found in findings)))


# ---------------------------------------------------------------------------------------------------------------------
# torch's own mixed precision


@dataclass
class Native(Finding):
    """One name of torch's mixed precision that the checked files use.

    Attributes:
        becomes: the name of amp_patch that replaces it; None if the script has to go on using torch's.
        imported: the places that import the name itself, as `from torch.amp import autocast` does.
        in_full: the places that write the name with its module, as `torch.amp.autocast`.
    """

    becomes: str | None
    imported: list[str]
    in_full: list[str]


_NATIVE = {path: row for row in apex_surface.NATIVE for path in row.paths()}
_NATIVE_MODULES = {row.owner for row in apex_surface.NATIVE} - {"torch"}


def native(paths: list[Path]) -> list[Native]:
    """List the names of torch's mixed precision in the files, each with its name in amp_patch."""
    uses, imported, in_full = (read(paths, kind)[0] for kind in (Natives, Imported, InFull))
    found = []
    for name, places in sorted(uses.items()):
        row = _NATIVE.get(name)
        becomes = None if row is not None and row.served_by == "torch" else _ours(name)
        difference = "" if row is None else row.difference
        status = DIFFERS if difference else SERVED
        found.append(Native(name, status, difference, places, becomes, imported.get(name, []), in_full.get(name, [])))
    return found


def _ours(name: str) -> str:
    return "amp_patch" + name.removeprefix("torch")


# ---------------------------------------------------------------------------------------------------------------------
# The names that a file uses


def read(paths: list[Path], kind: type[Names] | None = None) -> tuple[dict[str, list[str]], list[str]]:
    """Find the names in files that the class `kind` recognises; if `kind` is None, Apex's names (`Names`).

    Returns:
        used: {full name: the places of its uses, as "train.py:3"}.
        errors: a message for each file that cannot be read or parsed.
    """
    uses: dict[str, list[str]] = {}
    errors = []
    for path in _files(paths):
        try:
            trees = list(_trees(path))
            names = (kind or Names)()
            for _, tree in trees:
                names.collect(tree)
            for prefix, tree in trees:
                for name, line in names.uses(tree):
                    places = uses.setdefault(name, [])
                    if (place := f"{prefix}{line}") not in places:
                        places.append(place)
        except (OSError, SyntaxError, ValueError) as error:
            errors.append(_unreadable(path, error))
    return uses, errors


def _files(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        for found in sorted(path.rglob("*")):
            hidden = any(part.startswith(".") or part == "site-packages" for part in found.relative_to(path).parts)
            if found.suffix in (".py", ".ipynb") and found.is_file() and not hidden:
                yield found


def _readable(paths: list[Path]) -> Iterator[tuple[str, ast.AST]]:
    """Yield (prefix of places, syntax tree) as `_trees`, for all files. A file that cannot be parsed is skipped."""
    for path in _files(paths):
        with suppress(OSError, SyntaxError, ValueError):
            yield from _trees(path)


def _trees(path: Path) -> Iterator[tuple[str, ast.AST]]:
    """Yield (prefix of places, syntax tree) of a Python file, or of each code cell of a notebook.

    A prefix is "a.py:" for a file, and "b.ipynb[2]:" for a cell.
    """
    if path.suffix != ".ipynb":
        yield f"{path}:", _parsed(path.read_bytes(), path)
        return
    cells = json.loads(path.read_text(encoding="utf-8")).get("cells", [])
    for number, cell in enumerate(cells, 1):
        if cell.get("cell_type") == "code":
            source = "".join(cell.get("source", ""))
            if not source.startswith("%%"):  # a cell magic: the cell may hold another language
                # A shell line or line magic becomes `pass`. Deleting it could leave a block without a statement.
                source = re.sub(r"^(\s*)[%!].*", r"\1pass", source, flags=re.MULTILINE)
                yield f"{path}[{number}]:", _parsed(source, path)


def _parsed(source: str | bytes, path: Path) -> ast.AST:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SyntaxWarning: invalid escapes in the script
        return ast.parse(source, str(path))


PYTHON2 = re.compile(r"^\s*(print\s+[^=(\s]|except\s[^:(]+,\s*\w+\s*:|raise\s+\w+\s*,|exec\s+[\"'])")


def _unreadable(path: Path, error: Exception) -> str:
    if isinstance(error, SyntaxError):
        line = error.text or ""
        way_out = "; it looks like Python 2: convert it first, for example with 2to3" if PYTHON2.match(line) else ""
        return f"{path}:{error.lineno or 0}: not Python 3: {error.msg}{way_out}"
    return f"{path}: {getattr(error, 'strerror', None) or error}"


def _is_apex(path: str) -> bool:
    first = path.partition(".")[0]
    return first in ("apex", *amp_patch.apex.TOP_LEVEL) or EXTENSIONS.match(first) is not None


class Names:
    """The names that one file, or notebook, binds to objects of Apex. Scopes are ignored: a file is one namespace."""

    follows = staticmethod(_is_apex)  # whether a full name begins with a package that has names of this kind
    own = apex_surface.names_of(apex_surface.OPTIMIZER)  # attributes that are recognised on any object

    @staticmethod
    def knows(path: str) -> bool:
        """Return whether amp_patch serves this full name."""
        return finding(path, []).status != MISSING

    def __init__(self) -> None:
        self.paths: dict[str, str] = {}  # a name of the file -> the full name of the object of Apex
        self.others: set[str] = set()  # names that are also bound to other objects, for example in an `except` branch

    def collect(self, tree: ast.AST) -> None:
        """Record the names that `tree` binds to objects of Apex, by imports and by assignments to variables."""
        for node in ast.walk(tree):
            for clause in imported(node):
                if self.follows(clause.to):
                    self.paths[clause.bound] = clause.to
                else:
                    self.others.add(clause.bound)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Name):
                path = self.path(node.value)
                if path is not None:
                    self.paths.setdefault(target.id, path)
                elif not isinstance(node.value, ast.Constant):  # `amp = None`
                    self.others.add(target.id)

    def path(self, node: ast.AST) -> str | None:
        """Return the full name of the object of Apex that an expression evaluates to; None for other objects."""
        if isinstance(node, ast.Name):
            return self.paths.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.path(node.value)
            if owner is None and node.attr in self.own:
                owner = apex_surface.OPTIMIZER
            return None if owner is None else f"{owner}.{node.attr}"
        if isinstance(node, ast.Subscript):
            owner = self.path(node.value)
            return None if owner is None else owner + ELEMENT
        if isinstance(node, ast.Call):
            called = getattr(node.func, "id", getattr(node.func, "attr", ""))
            words = [arg.value if isinstance(arg, ast.Constant) else None for arg in node.args]
            if called in ("import_module", "__import__") and words and isinstance(words[0], str):
                return words[0] if self.follows(words[0]) else None
            if called in ("getattr", "hasattr") and len(words) > 1 and isinstance(words[1], str):
                return self.path(ast.Attribute(node.args[0], words[1], ast.Load()))
        return None

    def uses(self, tree: ast.AST) -> Iterator[tuple[str, int]]:
        """Yield (full name, line) of each use of an object of Apex in `tree`."""
        for clause in imported(tree):
            if self.follows(clause.asked):
                yield clause.asked, tree.lineno  # type: ignore[attr-defined]
        if isinstance(tree, ast.Call) and (called := self.path(tree.func)) is not None:
            yield from _arguments(called, tree)
        path = self.path(tree)
        if path is None or (isinstance(tree, ast.Name) and isinstance(tree.ctx, ast.Store)):
            for child in ast.iter_child_nodes(tree):
                yield from self.uses(child)
            return
        root: ast.AST = tree
        while isinstance(root, (ast.Attribute, ast.Subscript)):
            if isinstance(root, ast.Subscript):
                yield from self.uses(root.slice)
            root = root.value
        path = path.removesuffix(ELEMENT)
        # A name that is not served is reported only if the script needs it. A script that asks first (`hasattr`, or
        # `getattr` with a default), only writes it, or also binds the root name to another package, may not need it.
        written = isinstance(getattr(tree, "ctx", None), ast.Store)
        asks = isinstance(root, ast.Call) and (getattr(root.func, "id", "") == "hasattr" or len(root.args) == 3)
        if self.knows(path) or not (asks or written or getattr(root, "id", "") in self.others):
            yield path, tree.lineno  # type: ignore[attr-defined]
        if not isinstance(root, ast.Name):
            for child in ast.iter_child_nodes(root):
                yield from self.uses(child)


class Natives(Names):
    """The names that one file, or notebook, binds to objects of torch's mixed precision."""

    own = frozenset[str]()

    @staticmethod
    def follows(path: str) -> bool:
        return path.partition(".")[0] == "torch"

    @staticmethod
    def knows(path: str) -> bool:
        return path in _NATIVE or path.removesuffix(".*") in _NATIVE_MODULES

    def uses(self, tree: ast.AST) -> Iterator[tuple[str, int]]:
        return ((name, line) for name, line in super().uses(tree) if self.knows(name))


class Imported(Natives):
    """Finds names of torch's mixed precision that imports bind directly: `from torch.cuda.amp import autocast`.

    `import torch.cuda.amp` is left out, because it binds only `torch`.
    """

    def uses(self, tree: ast.AST) -> Iterator[tuple[str, int]]:
        for clause in imported(tree):
            if clause.to == clause.asked and self.knows(clause.asked):
                yield clause.asked, tree.lineno  # type: ignore[attr-defined]
        for child in ast.iter_child_nodes(tree):
            yield from self.uses(child)


class InFull(Natives):
    """Finds names of torch's mixed precision that code writes out: `torch.cuda.amp.autocast`."""

    def collect(self, tree: ast.AST) -> None:
        super().collect(tree)
        self.paths = {bound: to for bound, to in self.paths.items() if to in ("torch", "torch.cuda", "torch.cpu")}

    def uses(self, tree: ast.AST) -> Iterator[tuple[str, int]]:
        return iter(()) if isinstance(tree, (ast.Import, ast.ImportFrom)) else super().uses(tree)


def _arguments(called: str, call: ast.Call) -> Iterator[tuple[str, int]]:
    """Yield (name, line) of each keyword argument that apex_surface.py lists, or that amp_patch's function lacks."""
    owner = called + CALL
    listed = apex_surface.names_of(owner)
    for keyword in call.keywords if listed else ():
        name = f"{owner}.{keyword.arg}"
        if keyword.arg in listed or (keyword.arg is not None and finding(name, []).status == MISSING):
            yield name, keyword.value.lineno


# ---------------------------------------------------------------------------------------------------------------------
# The report


def report(findings: list[Finding], errors: list[str], quiet: bool = False) -> Iterator[str]:
    """Yield the lines of the report on Apex: missing names first, then names with differences, then the others.

    If there are no names, the report is "no names of Apex", or with `quiet` nothing.
    """
    column = _column(findings)
    for status in MISSING, DIFFERS, SERVED:
        for found in findings:
            if found.status == status:
                yield from _lines(found, column)
    for error in errors:
        yield from _wrapped(error, "", "  ")
    counts = [sum(found.status == status for found in findings) for status in (SERVED, DIFFERS, MISSING)]
    if findings:
        yield "{} names of Apex: {} served, {} of them with differences, {} missing".format(
            len(findings), counts[0] + counts[1], *counts[1:]
        )
    elif not quiet:
        yield "no names of Apex"


def native_report(natives: list[Native]) -> Iterator[str]:
    """Yield the report on torch's mixed precision: a line for each name, then all edits that move it to amp_patch."""
    column = _column(natives)
    for found in natives:
        yield from _lines(found, column)
    if natives:
        words = [f"{len(natives)} names of torch's mixed precision: the script can stay as it is"]
        imports: dict[str, list[str]] = {}
        for found in natives:
            if found.becomes is not None and found.imported:
                module, _, name = found.becomes.rpartition(".")
                imports.setdefault(module, []).append(name)
        if imports:
            lines = [f"from {module} import {', '.join(names)}" for module, names in imports.items()]
            words.append(f"to use amp_patch's, change the imports to: {', and '.join(lines)}")
        for found in natives:
            if found.becomes is not None and found.in_full:
                words.append(f"change {found.name} to {found.becomes}: {_places(found.in_full)}")
        yield from _wrapped("; ".join(words), "", "  ")


def _column(findings: Sequence[Finding]) -> int:
    """Return the width of the column of names: the longest, but at most 42, so that the places of use start near."""
    return min(max((len(found.name) for found in findings), default=0), 42)


def _lines(found: Finding, column: int) -> Iterator[str]:
    places, widths = _places(found.places), (_STATUS_WIDTH, column, 0)
    (line,) = in_columns([(found.status, found.name, places)], widths=widths)
    if len(line) > WIDTH:
        yield from in_columns([(found.status, found.name)], widths=widths)
        yield from _wrapped(places, 11 * " ", 11 * " ")
    else:
        yield line
    if found.note:
        yield from _wrapped(found.note, 11 * " ", 11 * " ")


def _places(places: list[str], most: int = 4) -> str:
    """Format places: "a.py:1, 5, b.py:3 and 4 more". Successive places of one file name the file once."""
    shown, last = "", ""
    for place in places[:most]:
        file, _, line = place.rpartition(":")
        shown += f"{', ' if shown else ''}{line if file == last else place}"
        last = file
    return shown + (f" and {len(places) - most} more" if len(places) > most else "")


def _wrapped(text: str, first: str, later: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )
