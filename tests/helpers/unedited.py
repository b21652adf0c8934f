"""Scripts that train with torch alone, and the same with the lines of ours that their comments have."""

from __future__ import annotations

import textwrap
from typing import Any


def run_source(script: str, **names: Any) -> dict[str, Any]:
    """What the script leaves in its namespace."""
    namespace = {"__name__": "__main__", **names}
    exec(compile(textwrap.dedent(script), "train.py", "exec"), namespace)
    return namespace


def edited(script: str) -> str:
    """The script with the lines of ours that its comments have."""
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
