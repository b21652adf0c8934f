"""`python -m amp_patch check train.py folder`: the names of Apex that files use, and whether amp_patch serves them.

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
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from amp_patch.run import apex_served, no_cuda
from amp_patch.run.apex_served import DIFFERS, MISSING, SERVED, Finding, finding, imported
from amp_patch.run.check_run import check_run

_INDENT = 11 * " "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `check`."""
    parser.add_argument("paths", nargs="+", metavar="path", help="a Python file, a notebook, or a folder of these")
    parser.add_argument("--json", action="store_true", help="print JSON")
    words = "run the first step of a script in FP32 (its arguments follow --), and list the lines that a level breaks"
    parser.add_argument("--run", action="store_true", help=words)
    parser.add_argument("-m", dest="module", action="store_true", help="with --run, path is a module, as in python -m")
    words = "with --run, measure the levels after this many steps, not in the first one"
    parser.add_argument("--after", type=int, default=0, metavar="STEPS", help=words)
    words = "with --run, cpu, mps or xpu: use this device wherever the script asks for CUDA"
    parser.add_argument("--device", type=no_cuda.here, help=words)


def check(args: argparse.Namespace) -> None:
    """list the names of Apex that files use, without running them; exit code 1 if one is missing, 2 if a file cannot be
    read"""
    if args.run:
        check_run(args.paths[0], args.paths[1:], args.json, args.device, args.module, args.after)
    if args.module:
        print("check: -m names a module to run; add --run", file=sys.stderr)
        sys.exit(2)
    uses, errors = read([Path(path) for path in args.paths])
    findings = [finding(name, places) for name, places in sorted(uses.items())]
    if args.json:
        print(json.dumps({"names": [asdict(found) for found in findings], "errors": errors}, indent=2))
    else:
        print("\n".join(report(findings, errors)))
    sys.exit(2 if errors else int(any(found.status == MISSING for found in findings)))


# ---------------------------------------------------------------------------------------------------------------------
# The names that a file uses


def read(paths: list[Path]) -> tuple[dict[str, list[str]], list[str]]:
    """Find Apex's names in files.

    Returns:
        used: {full name: the places of its uses, as "train.py:3"}.
        errors: a message for each file that cannot be read or parsed.
    """
    uses: dict[str, list[str]] = {}
    errors = []
    for path in _files(paths):
        try:
            trees = list(_trees(path))
            names = Names()
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


def _unreadable(path: Path, error: Exception) -> str:
    if isinstance(error, SyntaxError):
        return f"{path}:{error.lineno or 0}: not Python 3 (2to3 converts Python 2): {error.msg}"
    return f"{path}: {getattr(error, 'strerror', None) or error}"


class Names:
    """The names that one file, or notebook, binds to objects of Apex. Scopes are ignored: a file is one namespace."""

    def __init__(self) -> None:
        self.paths: dict[str, str] = {}  # a name of the file -> the full name of the object of Apex
        self.others: set[str] = set()  # names that are also bound to other objects, for example in an `except` branch

    def collect(self, tree: ast.AST) -> None:
        """Record the names that `tree` binds to objects of Apex, by imports and by assignments to variables."""
        for node in ast.walk(tree):
            for clause in imported(node):
                if _is_of_apex(clause.to):
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
            if owner is None and node.attr in apex_served.privates():
                owner = apex_served.OPTIMIZER
            return None if owner is None else f"{owner}.{node.attr}"
        if isinstance(node, ast.Subscript):
            owner = self.path(node.value)
            return None if owner is None else owner + apex_served.ELEMENT
        if isinstance(node, ast.Call):
            called = getattr(node.func, "id", getattr(node.func, "attr", ""))
            words = [arg.value if isinstance(arg, ast.Constant) else None for arg in node.args]
            if called in ("import_module", "__import__") and words and isinstance(words[0], str):
                return words[0] if _is_of_apex(words[0]) else None
            if called in ("getattr", "hasattr") and len(words) > 1 and isinstance(words[1], str):
                return self.path(ast.Attribute(node.args[0], words[1], ast.Load()))
        return None

    def uses(self, tree: ast.AST) -> Iterator[tuple[str, int]]:
        """Yield (full name, line) of each use of an object of Apex in `tree`."""
        for clause in imported(tree):
            if _is_of_apex(clause.asked):
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
        path = path.removesuffix(apex_served.ELEMENT)
        # A name that is not served is reported only if the script needs it. A script that asks first (`hasattr`, or
        # `getattr` with a default), only writes it, or also binds the root name to another package, may not need it.
        written = isinstance(getattr(tree, "ctx", None), ast.Store)
        asks = isinstance(root, ast.Call) and (getattr(root.func, "id", "") == "hasattr" or len(root.args) == 3)
        if finding(path, []).status != MISSING or not (asks or written or getattr(root, "id", "") in self.others):
            yield path, tree.lineno  # type: ignore[attr-defined]
        if not isinstance(root, ast.Name):
            for child in ast.iter_child_nodes(root):
                yield from self.uses(child)


def _is_of_apex(path: str) -> bool:
    """Return whether a full name begins with a package of Apex."""
    return re.fullmatch(apex_served.PACKAGES, path.partition(".")[0]) is not None


def _arguments(called: str, call: ast.Call) -> Iterator[tuple[str, int]]:
    """Yield (name, line) of each keyword argument of `initialize` that amp_patch's lacks or takes differently."""
    for keyword in call.keywords if called == "apex.amp.initialize" else ():
        name = f"{called}{apex_served.CALL}.{keyword.arg}"
        if keyword.arg is not None and finding(name, []).status != SERVED:
            yield name, keyword.value.lineno


# ---------------------------------------------------------------------------------------------------------------------
# The report


def report(findings: list[Finding], errors: list[str]) -> Iterator[str]:
    """Yield the lines of the report: missing names first, then names with differences, then the others."""
    statuses = [found.status for found in findings]
    for found in sorted(findings, key=lambda found: (MISSING, DIFFERS, SERVED).index(found.status)):
        yield from _lines(found)
    for error in errors:
        yield from _wrapped(error, "  ")
    missing, differs = statuses.count(MISSING), statuses.count(DIFFERS)
    if findings:
        served = f"{len(findings) - missing} served, {differs} of them with differences"
        yield f"{len(findings)} names of Apex: {served}, {missing} missing"
    else:
        yield "no names of Apex; for an FP32 script, check --run names the lines that a level would break"


def _lines(found: Finding) -> Iterator[str]:
    yield from _wrapped(f"{found.status:7}  {found.name}  {_places(found.places)}", _INDENT)
    if found.note:
        yield from _wrapped(_INDENT + found.note, _INDENT)


def _places(places: list[str], most: int = 4) -> str:
    return ", ".join(places[:most]) + (f" and {len(places) - most} more" if len(places) > most else "")


def _wrapped(text: str, later: str) -> list[str]:
    return textwrap.wrap(text, 80, subsequent_indent=later, break_long_words=False, break_on_hyphens=False)
