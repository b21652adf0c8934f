"""Rules on the sources without a linter: tensors with a dtype and device, asserts without effects, short files."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "amp_patch"
FILES = sorted(PACKAGE.rglob("*.py"))
LONGEST = 450  # lines

# torch's functions whose tensors are of torch.set_default_dtype, and of torch.set_default_device, unless told.
FACTORIES = {
    *("zeros", "ones", "full", "empty", "tensor", "as_tensor", "asarray", "scalar_tensor", "empty_strided", "eye"),
    *("empty_permuted", "arange", "linspace", "logspace", "range", "rand", "randn", "randint", "randperm", "normal"),
    *("Tensor", "complex", "polar", "hann_window", "tril_indices", "triu_indices", "sparse_coo_tensor"),
}
_DEFAULT = "torch.get_default_dtype()"  # a module's weights, which have it as those of torch's own modules do


def made_by_default(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield calls of torch's factories without an explicit dtype or device."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        if ast.unparse(call.func.value) != "torch" or call.func.attr not in FACTORIES:
            continue
        told = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        if "dtype" not in told or ("device" not in told and told["dtype"] != _DEFAULT):
            yield call


_HARMLESS = {"isinstance", "len", "callable", "hasattr", "all", "any", "type"}
_OF_NAMES = (
    *(ast.BoolOp, ast.UnaryOp, ast.Compare, ast.Constant, ast.Name, ast.Tuple, ast.GeneratorExp, ast.comprehension),
    *(ast.boolop, ast.unaryop, ast.cmpop, ast.expr_context),
)
_LIVE = {"grad", "data"}  # properties that make what they give


def does_something(statement: ast.Assert) -> bool:
    """Tell whether the assert has a side effect, which `python -O` would omit."""
    for node in ast.walk(statement.test):
        if isinstance(node, ast.Attribute):
            if node.attr in _LIVE:
                return True
        elif isinstance(node, ast.Call):
            if not isinstance(node.func, ast.Name) or node.func.id not in _HARMLESS:
                return True
        elif not isinstance(node, _OF_NAMES):
            return True
    return False


def asserts(tree: ast.AST) -> Iterator[ast.Assert]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Assert) and does_something(node))


def found(rule: Callable[[ast.AST], Iterator[ast.expr] | Iterator[ast.stmt]]) -> list[str]:
    return [
        f"{path.relative_to(PACKAGE.parent)}:{node.lineno}: {ast.unparse(node)}"
        for path in FILES
        for node in rule(ast.parse(path.read_text()))
    ]


def test_each_tensor_is_made_of_a_type_and_on_a_device_that_are_written_down():
    assert not found(made_by_default)


def test_objects_made_in_a_default_are_found():
    bad = "torch.zeros(()), torch.zeros((), device=device), torch.as_tensor(x, device=d).float()"
    good = "torch.zeros((), dtype=d, device=d), torch.empty(3, dtype=torch.get_default_dtype()), torch.empty_like(x)"
    assert len(list(made_by_default(ast.parse(bad)))) == 3 and not list(made_by_default(ast.parse(good)))


def test_no_assert_does_anything():
    assert not found(asserts)


def test_asserts_with_a_side_effect_are_found():
    bad = "assert m.grad is None; assert m[0].low; assert self.load(); assert (x := 3) > 2; assert all(f(x) for x in y)"
    good = "assert a.b is not None and isinstance(m, M), 'why'; assert all(isinstance(x, int) for x in y) and len(a)"
    assert len(list(asserts(ast.parse(bad)))) == 5 and not list(asserts(ast.parse(good)))


@pytest.mark.parametrize("folder", ["amp_patch", "tests", "benchmarks", "examples"])
def test_no_file_is_longer_than_one_reads_at_a_time(folder):
    lengths = {path: len(path.read_text().splitlines()) for path in (PACKAGE.parent / folder).rglob("*.py")}
    assert {path.name: length for path, length in lengths.items() if length > LONGEST} == {}
