"""Detection of scripts that choose their precision by amp_patch or Apex."""

from __future__ import annotations

import ast
import linecache
from typing import Any

from amp_patch.run.apex_served import imported

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
    clauses = (clause for node in ast.walk(tree) for clause in imported(node))
    ours = [(clause.bound, path) for clause in clauses if (path := clause.asked.split("."))[0] in _OURS]
    names = {bound for bound, _ in ours}
    return any(not _CHOICES.isdisjoint(path) for _, path in ours) or any(
        isinstance(node, ast.Attribute) and node.attr in _CHOICES and _root(node) in names for node in ast.walk(tree)
    )


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
