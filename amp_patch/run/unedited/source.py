"""Detection of scripts that choose their precision by amp_patch or Apex."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from typing import Any

_OURS = ("amp_patch", "apex")
# Modules and names of amp_patch and Apex by which a script chooses its precision.
_CHOICES = {"fp16_utils", "integrations", "graph", "initialize", "init", "scale_loss", "autocast", "GradScaler", "*"}


def chooses_its_level(main: Any) -> bool:
    """Return whether the script, the module `main`, trains with amp_patch or Apex, and so chooses its level itself.

    `UneditedScript` does not train such a script.
    """
    lines = linecache.getlines(getattr(main, "__file__", None) or "", vars(main)) if main is not None else []
    try:
        return chooses(ast.parse("".join(lines)))
    except SyntaxError:
        return False


def chooses(tree: ast.AST) -> bool:
    """Return whether code names `initialize` or another part of amp_patch or Apex that chooses the precision.

    An import for other parts (`amp.log`, SyncBatchNorm, FusedAdam) chooses none.
    """
    imported = [(bound, path) for node in ast.walk(tree) for bound, path in _imports(node) if path[0] in _OURS]
    ours = {bound for bound, _ in imported}
    return any(not _CHOICES.isdisjoint(path) for _, path in imported) or any(
        isinstance(node, ast.Attribute) and node.attr in _CHOICES and _root(node) in ours for node in ast.walk(tree)
    )


def _imports(node: ast.AST) -> Iterator[tuple[str, list[str]]]:
    """Yield (name that is bound, parts of the imported path) for each clause of an import statement."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.asname or alias.name.partition(".")[0], alias.name.split(".")
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        for alias in node.names:
            yield alias.asname or alias.name, [*node.module.split("."), alias.name]


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
