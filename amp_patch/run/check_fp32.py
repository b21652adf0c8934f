"""The part of `check` that says whether `compare` would accept an FP32 script.

An FP32 script uses neither Apex nor torch's mixed precision. The files are parsed, never run, and their imports
are not followed. A training that is built in an imported module is therefore not found.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from amp_patch.run.apex_served import imported
from amp_patch.run.run import notebook_advice
from amp_patch.run.unedited.source import chooses

# A call in the script -> the reason why `compare` refuses it. docs/unedited.md has a table with the ways out.
_REFUSED = {
    "torch.optim.LBFGS": "LBFGS evaluates its closure inside of step(): call initialize, then compare --levels O0,O4",
    "torch.distributed.fsdp.FullyShardedDataParallel": "FullyShardedDataParallel is refused: shard with fully_shard",
    "torch.multiprocessing.spawn": "it trains in child processes: run trains these, compare does not see them",
    "torch.multiprocessing.Process": "it may train in child processes: run trains these, compare does not see them",
}
_LOOPS = {"lightning", "pytorch_lightning", "transformers", "accelerate"}  # libraries with a training loop


@dataclass
class Trained:
    """The parts of an FP32 training that were found in a set of files. A place is "train.py:3".

    Attributes:
        scripts: the files that hold an optimizer, a call of `backward` or an import of a training loop.
        losses: places that call `backward`.
        refused: reason why `compare` would refuse the script -> places of the calls that cause the refusal.
        steps: whether an optimizer of torch.optim or a training loop was found.
        of_ours: whether the files choose their precision by amp_patch or Apex.
    """

    scripts: list[str]
    losses: list[str]
    refused: dict[str, list[str]]
    steps: bool = False
    of_ours: bool = False


def trained(trees: Iterable[tuple[str, ast.AST]]) -> Trained:
    """Search files, or cells of notebooks, for the parts of a training.

    Args:
        trees: (prefix of its places, such as "train.py:", its syntax tree) of each file or cell.
    """
    found = Trained([], [], {})
    for prefix, tree in trees:
        # The name that an import binds -> full name: {"optim": "torch.optim"} for `from torch import optim`.
        names = {clause.bound: clause.to for node in ast.walk(tree) for clause in imported(node)}
        calls = [(_path(node.func, names), node.lineno) for node in ast.walk(tree) if isinstance(node, ast.Call)]
        losses = [f"{prefix}{line}" for path, line in calls if re.fullmatch(r"(torch\.autograd)?\.backward", path)]
        steps = any(_is_optimizer(path) for path, _ in calls)
        steps = steps or any(path.partition(".")[0] in _LOOPS for path in names.values())
        for path, line in calls:
            if path in _REFUSED:
                found.refused.setdefault(_REFUSED[path], []).append(f"{prefix}{line}")
        if (steps or losses) and (file := prefix.partition("[")[0].rstrip(":")) not in found.scripts:
            found.scripts.append(file)
        found.losses += losses
        found.steps, found.of_ours = found.steps or steps, found.of_ours or chooses(tree)
    return found


def _is_optimizer(path: str) -> bool:
    kind = getattr(torch.optim, path.rpartition(".")[2], None) if path.startswith("torch.optim.") else None
    return isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)


def _path(node: ast.AST, names: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Attribute):
        owner = _path(node.value, names)
        return f"{owner}.{node.attr}" if owner else f".{node.attr}"
    return ""


def report(found: Trained) -> Iterator[str]:
    """Yield the lines that say whether `compare` would accept the script.

    If the files contain no training, or choose their precision by amp_patch or Apex, yield nothing.
    """
    if found.of_ours or not found.scripts:
        return
    script = shlex.quote(found.scripts[0]) if len(found.scripts) == 1 else "SCRIPT"
    command = f"python -m amp_patch compare {script}"
    if advice := notebook_advice(found.scripts[0]):
        yield advice
        command = command.replace(".ipynb", ".py")
    if found.refused:
        yield f"an FP32 script, which {command} refuses:"
        for why, places in found.refused.items():
            yield f"  {', '.join(places)}: {why}"
    elif not found.steps:
        yield f"an FP32 script without an optimizer of torch.optim, which {command} needs:"
        yield "  replace its own updates by optimizer = torch.optim.SGD(model.parameters(), lr=lr) and optimizer.step()"
        yield f"  backward: {', '.join(found.losses)}"
    else:
        yield f"an FP32 script: {command} trains it unedited at O0, O1, O2, O4 and O5, and recommends a level"
