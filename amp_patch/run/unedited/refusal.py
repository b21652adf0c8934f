"""The error for a script that cannot be trained unedited: its message names the lines to add. Refusals by it."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import torch

from amp_patch.support.generated_class import base_class
from amp_patch.support.scripts_line import frames, place

_LINES = """
    from amp_patch import amp
    model, optimizer = amp.initialize(model, optimizer)  # after the line that makes the optimizer
    with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()  # replaces loss.backward()"""

_LIGHTNING_LINES = """
    import os
    from amp_patch.integrations.{package} import OptLevelPrecision
    trainer = Trainer(plugins=OptLevelPrecision(os.environ.get("AMP_PATCH_OPT_LEVEL", "O1")))"""


class ScriptRefused(SystemExit):
    """A script that cannot be trained unedited. As a SystemExit it passes through the script's `except Exception`.

    Args:
        why: the reason, a sentence without a full stop.
        hint: another change that the script needs, printed after the lines if `lines` is None; "" for none.
        line: whether to name the line of the script that is running now.
        lines: the lines to add; None means the calls of `initialize` and `scale_loss`, "" means none.
        then: the instruction in front of the lines.

    Attributes:
        why: the reason, with the script's line.
        way_out: if `lines` was given, the end of the message with the lines to add; otherwise "".
    """

    def __init__(
        self, why: str, hint: str = "", *, line: bool = True, lines: str | None = None, then: str = "Add to it"
    ) -> None:
        self.why = f"{why}{where() if line else ''}"
        if lines is None:
            lines = _lightnings_lines() or _LINES + (f"\n{hint}" if hint else "")
            self.way_out = ""
        else:
            self.way_out = f". {then}{f':{lines}' if lines else ''}"
        way_out = self.way_out or f". {then}:{lines}"
        super().__init__(f"amp_patch: this script cannot be taken unedited: {self.why}{way_out}")


def untrained(optimizers: Sized, initialized: Sized, evaluated: bool, empty: str) -> ScriptRefused:
    """Return the error for a script that has ended without a training.

    Args:
        optimizers: the optimizers that it made.
        initialized: the trainings that amp_patch has begun.
        evaluated: whether it called a module without gradients.
        empty: the loaders without a batch, in words; "" if there are none.
    """
    why, then = "it never called backward() of a loss of its model", "Its training needs loss.backward()"
    if not optimizers:
        why = "it made no optimizer of torch.optim in this process, and called no backward()"
        then = "For inference alone there is no level to compare; amp.initialize(model) takes a model alone"
    elif empty and not initialized:
        why, then = f"no batch came: {empty}", "Give it more samples, or a smaller batch"
    elif not initialized and evaluated:
        why, then = "it called its model without gradients alone, as inference does", "A level is for a training"
    elif not initialized:
        why = "no batch came: it called no module whose parameters an optimizer holds"
        then = "A loader with drop_last has no batch of fewer samples"
    return ScriptRefused(why, line=False, lines="", then=then)


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


def _lightnings_lines() -> str:
    """Return the lines to add if Lightning runs the training; otherwise an empty string."""
    packages = {str(frame.f_globals.get("__name__")).partition(".")[0] for frame in frames()}
    package = next((name for name in ("lightning", "pytorch_lightning") if name in packages), None)
    return "" if package is None else _LIGHTNING_LINES.format(package=package)


def where() -> str:
    """Return " (train.py, line 31)": the innermost running line outside of installed packages and amp_patch.

    "" if there is none.
    """
    found = next(filter(None, (place(frame, frame.f_lineno) for frame in frames())), None)
    return "" if found is None else f" ({found})"
