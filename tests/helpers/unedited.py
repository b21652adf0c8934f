"""Scripts that train with torch alone, and the same scripts with the lines of amp_patch from their comments."""

from __future__ import annotations

import textwrap
from typing import Any


def run_source(script: str, **names: Any) -> dict[str, Any]:
    """Run a script; return its namespace."""
    namespace = {"__name__": "__main__", **names}
    exec(compile(textwrap.dedent(script), "train.py", "exec"), namespace)
    return namespace


def edited(script: str) -> str:
    """Return the script with the lines of amp_patch that its comments contain."""
    lines = []
    for line in script.splitlines():
        code, _, comment = line.partition("#")
        indent = code[: len(code) - len(code.lstrip())]
        if code.strip() == "loss.backward()":
            line = f"{indent}with amp.scale_loss(loss, {comment}) as scaled: scaled.backward()"
        elif comment:
            line = indent + comment
        lines.append(line)
    return "\n".join(lines)
