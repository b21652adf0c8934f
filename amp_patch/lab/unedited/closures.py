"""Optimizers whose closures cannot be called before their step."""

from __future__ import annotations

from typing import Any

import torch

from amp_patch.lab.unedited.refusal import ScriptRefused
from amp_patch.support.generated_class import base_class


def refuse_lbfgs(optimizer: Any) -> None:
    """Raise for LBFGS, which calls its closure again and again."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ScriptRefused(
            "LBFGS evaluates its closure again and again inside of step()",
            "inside of the closure, and compare --levels O0,O4: no other level can train so",
        )


def refuse_unknown_use(optimizer: Any) -> None:
    """Raise unless the optimizer is known to call its closure once, before all else, as torch's do save for LBFGS."""
    refuse_lbfgs(optimizer)
    base = base_class(optimizer)
    if base.__module__.partition(".")[0] != "torch":
        raise ScriptRefused(
            f"step() is given a closure, and what a {base.__name__} does with it is not known",
            "and call what the closure does before step(), and step() without it",
        )
