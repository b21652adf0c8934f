"""Refusals of optimizers whose closure cannot be run before `step()`, as a level requires."""

from __future__ import annotations

from typing import Any

import torch

from amp_patch.run.unedited.refusal import ScriptRefused
from amp_patch.support.generated_class import base_class


def refuse_lbfgs(optimizer: Any) -> None:
    """Raise ScriptRefused if the optimizer is LBFGS, which calls its closure several times in one step."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ScriptRefused(
            "LBFGS evaluates its closure several times inside of step()",
            "inside of the closure, and compare --levels O0,O4: no other level can train with LBFGS",
        )


def refuse_unknown_use(optimizer: Any) -> None:
    """Raise ScriptRefused for an optimizer that may call its closure other than once, at the beginning of `step()`.

    All optimizers of torch except LBFGS call it once at the beginning. It is unknown for all others.
    """
    refuse_lbfgs(optimizer)
    base = base_class(optimizer)
    if base.__module__.partition(".")[0] != "torch":
        raise ScriptRefused(
            f"step() is given a closure, and it is not known when {base.__name__} calls it",
            "and run the body of the closure before step(), which is then called without it",
        )
