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
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from amp_patch.run import apex_served, apex_surface, no_cuda
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
    """list the names of Apex and of torch's mixed precision that files use, without running them; exit code 1 if a name
    of Apex is missing, 2 if a file cannot be read"""
    if args.run:
        check_run(args.paths[0], args.paths[1:], args.json, args.device, args.module, args.after)
    if args.module:
        print("check: -m names a module to run; add --run", file=sys.stderr)
        sys.exit(2)
    paths = [Path(path) for path in args.paths]
    uses, errors = read(paths)
    findings = [finding(name, places) for name, places in sorted(uses.items())]
    natives = native(paths)
    if args.json:
        names = {"names": [asdict(found) for found in findings], "native": [asdict(found) for found in natives]}
        print(json.dumps({**names, "errors": errors}, indent=2))
    else:
        print("\n".join([*report(findings, errors, quiet=bool(natives)), *native_report(natives)]))
    sys.exit(2 if errors else int(any(found.status == MISSING for found in findings)))


# ---------------------------------------------------------------------------------------------------------------------
# torch's own mixed precision


@dataclass
class Native(Finding):
    """One name of torch's mixed precision that the checked files use.

    Attributes:
        becomes: the name of amp_patch that replaces it; None if the script has to go on using torch's.
    """

    becomes: str | None


def native(paths: list[Path]) -> list[Native]:
    """List the names of torch's mixed precision in the files, each with its name in amp_patch."""
    found = []
    for name, places in sorted(read(paths, Natives)[0].items()):
        stays = re.fullmatch(apex_surface.STAYS, name)
        difference = apex_surface.STAYS_TORCHS if stays else apex_surface.NATIVE.get(name.rpartition(".")[2], "")
        becomes = None if stays else "amp_patch" + name.removeprefix("torch")
        found.append(Native(name, DIFFERS if difference else SERVED, difference, places, becomes))
    return found


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

    @staticmethod
    def follows(path: str) -> bool:
        """Return whether a full name begins with a package that has names of this kind."""
        return re.fullmatch(apex_served.PACKAGES, path.partition(".")[0]) is not None

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
        path = path.removesuffix(apex_served.ELEMENT)
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

    @staticmethod
    def follows(path: str) -> bool:
        return path.partition(".")[0] == "torch"

    @staticmethod
    def knows(path: str) -> bool:
        owner, _, name = path.rpartition(".")
        modules = apex_surface.NATIVE_MODULES
        listed = owner in ("torch", *modules) and name in apex_surface.NATIVE
        return listed or path.removesuffix(".*") in modules or re.fullmatch(apex_surface.STAYS, path) is not None

    def uses(self, tree: ast.AST) -> Iterator[tuple[str, int]]:
        return ((name, line) for name, line in super().uses(tree) if self.knows(name))


def _arguments(called: str, call: ast.Call) -> Iterator[tuple[str, int]]:
    """Yield (name, line) of each keyword argument of `initialize` that amp_patch's lacks or takes differently."""
    for keyword in call.keywords if called == "apex.amp.initialize" else ():
        name = f"{called}{apex_served.CALL}.{keyword.arg}"
        if keyword.arg is not None and finding(name, []).status != SERVED:
            yield name, keyword.value.lineno


# ---------------------------------------------------------------------------------------------------------------------
# The report


def report(findings: list[Finding], errors: list[str], quiet: bool = False) -> Iterator[str]:
    """Yield the lines of the report on Apex: missing names first, then names with differences, then the others.

    If there are no names, the report is one line that says so, or with `quiet` nothing.
    """
    statuses = [found.status for found in findings]
    for found in sorted(findings, key=lambda found: (MISSING, DIFFERS, SERVED).index(found.status)):
        yield from _lines(found)
    for error in errors:
        yield from _wrapped(error, "  ")
    missing, differs = statuses.count(MISSING), statuses.count(DIFFERS)
    if findings:
        served = f"{len(findings) - missing} served, {differs} of them with differences"
        yield f"{len(findings)} names of Apex: {served}, {missing} missing"
    elif not quiet:
        yield "no names of Apex; for an FP32 script, check --run names the lines that a level would break"


def native_report(natives: list[Native]) -> Iterator[str]:
    """Yield the report on torch's mixed precision: lines for each name, then the edit that moves them to amp_patch."""
    for found in natives:
        yield from _lines(found)
    if natives:
        told = f"{len(natives)} names of torch's mixed precision: the script can stay as it is"
        if moved := [found for found in natives if found.becomes is not None]:
            names = ", ".join(f"{found.name} ({_places(found.places)})" for found in moved)
            told += f"; to use amp_patch's, write amp_patch for torch in these names, where a line has it: {names}"
        yield from _wrapped(told, "  ")


def _lines(found: Finding) -> Iterator[str]:
    yield from _wrapped(f"{found.status:7}  {found.name}  {_places(found.places)}", _INDENT)
    if found.note:
        yield from _wrapped(_INDENT + found.note, _INDENT)


def _places(places: list[str], most: int = 4) -> str:
    return ", ".join(places[:most]) + (f" and {len(places) - most} more" if len(places) > most else "")


def _wrapped(text: str, later: str) -> list[str]:
    return textwrap.wrap(text, 80, subsequent_indent=later, break_long_words=False, break_on_hyphens=False)
