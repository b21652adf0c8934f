"""What `check` says of a script in FP32, which knows neither Apex nor torch's mixed precision: would `compare` take it?

Files are read, not run, and what they import is not: what is not seen here may be there all the same.
"""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

# What a script has -> why it is not compared as it is. docs/unedited.md has the table with the ways out.
_REFUSED = {
    "torch.optim.LBFGS": "LBFGS evaluates its closure inside of step(): compare --levels O0,O4, with lines of ours",
    "torch.distributed.fsdp.FullyShardedDataParallel": "FullyShardedDataParallel is refused: shard with fully_shard",
    "torch.multiprocessing.spawn": "it trains in processes of its own; run trains them, compare does not see them",
    "torch.multiprocessing.Process": "it may train in processes of its own; run trains them, compare does not see them",
}
_LOOPS = {
    "lightning": "Lightning's", "pytorch_lightning": "Lightning's", "transformers": "transformers'",
    "accelerate": "accelerate's",
}  # fmt: skip
_OURS = ("amp_patch", "apex")


@dataclass
class Trained:
    """What a set of files has of a training in FP32.

    Attributes:
        scripts: the files that train, as far as they show it.
        optimizers: name -> places.
        losses: places of calls of `backward`.
        refused: why `compare` does not take it as it is -> places.
        loops: whose training loop it uses.
        of_ours: whether it imports amp_patch, or Apex.
    """

    scripts: list[str]
    optimizers: dict[str, list[str]]
    losses: list[str]
    refused: dict[str, list[str]]
    loops: list[str]
    of_ours: bool = False

    def size(self) -> int:
        """How many places of a training were found."""
        return len(self.losses) + sum(map(len, self.optimizers.values())) + len(self.loops)


def trained(trees: Iterable[tuple[str, ast.AST]]) -> Trained:
    """What these files, or cells, have: how their lines are called, and their syntax trees."""
    found = Trained([], {}, [], {}, [])
    for prefix, tree in trees:
        before, names = found.size(), _bound(tree, found)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                _note_call(_path(node.func, names), node, f"{prefix}{node.lineno}", found)
        file = prefix.partition("[")[0].rstrip(":")
        if found.size() != before and file not in found.scripts:
            found.scripts.append(file)
    return found


def _bound(tree: ast.AST, found: Trained) -> dict[str, str]:
    """The names that import statements bind, and to what."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    roots = [path.partition(".")[0] for path in names.values()]
    found.of_ours = found.of_ours or any(root in _OURS for root in roots)
    found.loops += [whose for root, whose in _LOOPS.items() if root in roots and whose not in found.loops]
    return names


def _path(node: ast.AST, names: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Attribute):
        owner = _path(node.value, names)
        return f"{owner}.{node.attr}" if owner else f".{node.attr}"
    return ""


def _note_call(path: str, call: ast.Call, place: str, found: Trained) -> None:
    if path in _REFUSED:
        found.refused.setdefault(_REFUSED[path], []).append(place)
    owner, _, name = path.rpartition(".")
    kind = getattr(torch.optim, name, None) if owner.startswith("torch.optim") else None
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
        found.optimizers.setdefault(name, []).append(place)
    if name == "backward" and (not owner or owner == "torch.autograd"):
        found.losses.append(place)


def report(found: Trained) -> Iterator[str]:
    """What `compare` would do with the script; nothing where there is no training."""
    if found.of_ours or not found.scripts:
        return
    script = shlex.quote(found.scripts[0]) if len(found.scripts) == 1 else "SCRIPT"
    command = f"python -m amp_patch compare {script}"
    if found.refused:
        yield f"an FP32 script, which {command} does not take as it is:"
        for why, places in found.refused.items():
            yield f"  {', '.join(places)}: {why}"
    elif found.losses and not (found.optimizers or found.loops):
        yield f"an FP32 script. Here is no optimizer of torch.optim, which {command} wants:"
        yield "  in place of updates by hand, optimizer = torch.optim.SGD(model.parameters(), lr=lr), and its step()"
    else:
        yield f"an FP32 script: {command} trains it as it is, at O0, O1, O2, O4 and O5, and says which to use"
    for name, places in found.optimizers.items():
        yield f"  optimizer {name}: {', '.join(places)}"
    if found.losses:
        yield f"  backward: {', '.join(found.losses)}"
    if found.loops:
        yield f"  the loop is {' and '.join(found.loops)}"
