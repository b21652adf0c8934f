"""examples/which_level.ipynb: its cells run in order, what they show can be shown, and it is kept without outputs."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
from paths import EXAMPLES

NOTEBOOK = json.loads((EXAMPLES / "which_level.ipynb").read_text())
CELLS = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def run_cell(cell: str, names: dict[str, Any]) -> Any:
    """Execute a cell as a notebook does: where its last statement is an expression, the value is what is shown."""
    *before, last = (body := ast.parse(cell)).body
    shown = isinstance(last, ast.Expr) and not (isinstance(last.value, ast.Call) and "print(" in ast.unparse(last))
    body.body = before if shown else [*before, last]
    exec(compile(body, "which_level.ipynb", "exec"), names)
    return eval(compile(ast.Expression(last.value), "which_level.ipynb", "eval"), names) if shown else None


def test_it_is_kept_as_it_comes_from_an_editor_without_outputs():
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    for cell in NOTEBOOK["cells"]:
        assert cell.get("outputs", []) == [] and cell.get("execution_count") is None
    ids = [cell["id"] for cell in NOTEBOOK["cells"]]
    assert len(ids) == len(set(ids))


@pytest.mark.slow
def test_its_cells_run_and_show_their_results(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    shown = [value for cell in CELLS if (value := run_cell(cell, names)) is not None]
    assert [type(value).__name__ for value in shown] == ["Compared", "Inspection", "Explanation"]
    for value in shown:
        page = value._repr_html_() if hasattr(value, "_repr_html_") else None
        assert page or repr(value)
    compared = shown[0]
    assert [level.level for level in compared.levels] == ["O0", "O1", "O4"]
    assert all(len(level.final) == 3 and not level.failed for level in compared.levels)
    assert all(level.verdict.kind != "differs" for level in compared.levels)
    assert list(tmp_path.iterdir()) == []
