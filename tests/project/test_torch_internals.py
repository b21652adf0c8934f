"""Private names of torch that amp_patch uses: docs/torch-internals.md lists them, and this torch has them."""

from __future__ import annotations

import ast
import importlib.util
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "amp_patch"
TABLE = (ROOT / "docs" / "torch-internals.md").read_text()
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


class Name(NamedTuple):
    path: str  # dotted, or a header of torch's
    bound: str  # "", or "from" or "to"
    version: tuple[int, ...]

    def is_of(self, version: tuple[int, ...]) -> bool:
        return not self.bound or (version >= self.version if self.bound == "from" else version <= self.version)


class Row(NamedTuple):
    names: list[Name]
    wings: list[str]
    tests: list[str]
    history: str


def row(line: str) -> Row:
    names, wings, tests, history = (cell.strip() for cell in line.split("|")[1:-1])
    found = re.findall(r"`([^`]+)`(?: \((from|to) (\d+)\.(\d+)\))?", names)
    read = [Name(path, bound, (int(major or 0), int(minor or 0))) for path, bound, major, minor in found]
    return Row(read, *(re.findall(r"`([^`]+)`", cell) for cell in (wings, tests)), history)


READ = [row(line) for line in TABLE.splitlines() if line.startswith("| `")]
HEADERS = [row for row in READ if "/" in row.names[0].path]
ROWS = [row for row in READ if row not in HEADERS]
NAMES = [pytest.param(name, row, id=name.path) for row in ROWS for name in row.names]

# Private names of Python's and of Apex's. (Ours are those that the package itself defines, or that begin with _amp.)
OTHERS = {
    *("_GeneratorContextManager", "_Pickler", "_args_from_interpreter_flags", "_asdict", "_getframe", "_reconstruct"),
    *("_current_frames", "_process_optimizer", "_run_module_as_main", "_target"),
    "_cuda",  # names of Apex's extensions end so
    "_hf_peft_config_loaded",  # of transformers
}
# Ours, though an object of torch's has an attribute of the same name.
OURS_TOO = {"_base", "_device", "_native", "_print", "_verbose", "_warn"}

PRIVATE = re.compile(r"(?<![\w.])_[a-zA-Z]\w*")
DOTTED = re.compile(r"torch(?:\.[a-zA-Z]\w*)*\._[a-zA-Z]\w*(?:\.\w+)*")


@pytest.fixture(scope="module")
def owners() -> dict[str, Any]:
    """The objects of torch's that the table's names begin at."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # distributed.optim comes with the deprecated torch.jit in some
        late = "torch.nn.attention.varlen"  # whose import makes torch.ops.torch_attn
        if importlib.util.find_spec(late):
            importlib.import_module(late)
        zero = importlib.import_module("torch.distributed.optim").ZeroRedundancyOptimizer
    return {
        "Autocast": torch.autocast("cpu"),
        "BatchNorm": nn.BatchNorm1d(1),
        "GradScaler": torch.amp.GradScaler("cpu"),
        "Module": model,
        "Node": torch.ones(1, requires_grad=True).exp().grad_fn,
        "Optimizer": optimizer,
        "RNN": nn.LSTM(1, 1),
        "Scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "SpectralNorm": nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)).parametrizations.weight[0],
        "Tensor": torch.ones(1),
        "ZeroRedundancyOptimizer": zero,
        "torch": torch,
    }


def resolve(path: str, owners: dict[str, Any]) -> Any:
    first, *parts = path.split(".")
    found, at = owners[first], first
    for part in parts:
        at += f".{part}"
        # As a module first: torch.optim has no attribute `optimizer`.
        try:
            found = importlib.import_module(at) if at.startswith("torch.") else getattr(found, part)
        except ImportError:
            found = getattr(found, part)
    return found


def defined(tree: ast.AST) -> Iterator[str]:
    """The names that a file of ours gives something."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.arg, ast.keyword)):
            yield node.arg or ""
        elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
            yield node.attr if isinstance(node, ast.Attribute) else node.id


def documentation(tree: ast.AST) -> set[int]:
    """The ids of the docstrings in `tree`."""
    bodies = (getattr(node, "body", None) for node in ast.walk(tree))
    first = (body[0] for body in bodies if isinstance(body, list) and body)
    return {id(node.value) for node in first if isinstance(node, ast.Expr)}


def read(tree: ast.AST) -> Iterator[str]:
    """The private names that a file reads, in code and in strings; those in modules of torch's with their path."""
    docstrings = documentation(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield from PRIVATE.findall(node.attr)
        elif isinstance(node, ast.Import):
            yield from DOTTED.findall(" ".join(alias.name for alias in node.names))
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from DOTTED.findall(" ".join(f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield from DOTTED.findall(node.value)
            yield from PRIVATE.findall(node.value)


class Uses(NamedTuple):
    """The private names of torch's that amp_patch reads, each with the wings that do."""

    certain: dict[str, set[str]]
    likely: dict[str, set[str]]  # names that ours have too, which may be meant


@pytest.fixture(scope="module")
def uses(owners: dict[str, Any]) -> Uses:
    trees = {path.relative_to(PACKAGE): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    ours = {name for tree in trees.values() for name in defined(tree)} | OTHERS
    found = Uses({}, {})
    for path, tree in trees.items():
        for name in read(tree):
            if name in OURS_TOO or name.startswith("_amp"):
                continue
            if name not in ours:
                kind = found.certain
            elif any(hasattr(owner, name) for owner in owners.values()):
                kind = found.likely
            else:
                continue
            kind.setdefault(name, set()).add(path.parts[0].removesuffix(".py"))
    return found


def covers(name: str, used: str) -> bool:
    """Tell whether the table's `name` covers a name in a file: an attribute, or a dotted path of torch."""
    if name.endswith(".*"):
        return f"{used}.".startswith(name[:-1])
    if name.endswith("*"):
        return used.startswith(name[:-1].rpartition(".")[2])
    return f"{name}.".startswith(f"{used}.") if "." in used else used in name.split(".")


def test_every_private_name_of_torch_s_is_in_the_table(uses: Uses) -> None:
    names = [name.path for row in ROWS for name in row.names]
    found = {**uses.certain, **uses.likely}
    missing = {used: wings for used, wings in found.items() if not any(covers(name, used) for name in names)}
    assert not missing, "list them in docs/torch-internals.md, with a test that fails where torch changes them"


@pytest.mark.parametrize("row", [pytest.param(row, id=row.names[0].path) for row in ROWS])
def test_the_table_says_who_uses_them_and_which_tests_say_so(row: Row, uses: Uses) -> None:
    def wings(kind: dict[str, set[str]]) -> set[str]:
        some = set()
        for used, found in kind.items():
            # torch._C alone says nothing: half of the wings have it.
            if used not in ("_C", "torch._C") and any(covers(name.path, used) for name in row.names):
                some |= found
        return some

    assert wings(uses.certain) <= set(row.wings) <= wings(uses.certain) | wings(uses.likely)
    for test in row.tests:
        file, _, function = test.partition("::")
        assert f"def {function}(" in (ROOT / file).read_text() if function else (ROOT / file).exists()
    assert row.tests, "which tests fail where torch changes these?"


@pytest.mark.parametrize(("name", "row"), NAMES)
def test_this_torch_has_it(name: Name, row: Row, owners: dict[str, Any]) -> None:
    if name.path.endswith("*") or name.path.partition(".")[0] not in owners:
        return  # of a kind, or of objects that may lack it
    try:
        resolve(name.path, owners)
    except AttributeError:
        has = False
    else:
        has = True
    assert has or not name.is_of(VERSION), (
        f"torch {torch.__version__} lacks {name.path}, on which {', '.join(row.wings)} lean: "
        f"run {', '.join(row.tests)}, mend what they say, "
        f"and note this torch in docs/torch-internals.md ({row.history})"
    )


def test_the_headers_of_torch_s_inside_are_in_the_table() -> None:
    sources = [path for kind in ("*.h", "*.cpp", "*.cu") for path in (ROOT / "csrc").rglob(kind)]
    found = {name for path in sources for name in re.findall(r"#include <(.*)>", path.read_text())}
    inside = {name for name in found if name.startswith("torch/csrc/") or "/impl/" in name or "TLS" in name}
    listed = {f"{name.path}.h" for row in HEADERS for name in row.names}
    assert inside == listed, "docs/torch-internals.md has them"


@pytest.mark.parametrize("name", [name.path for row in HEADERS for name in row.names])
def test_this_torch_has_the_header(name: str) -> None:
    header = Path(torch.__file__).parent / "include" / f"{name}.h"
    assert header.exists(), f"torch {torch.__version__} has no <{name}.h>"
