"""What cannot be trained at another level unedited: one message, which names the lines to add."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

from amp_patch.support.scripts_line import place

_LINES = """
    from amp_patch import amp
    model, optimizer = amp.initialize(model, optimizer)  # behind the line that makes the optimizer
    with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()  # in place of loss.backward()"""

_LIGHTNING_LINES = """
    import os
    from amp_patch.integrations.{package} import OptLevelPrecision
    trainer = Trainer(plugins=OptLevelPrecision(os.environ.get("AMP_PATCH_OPT_LEVEL", "O1")))"""


class ScriptRefused(SystemExit):
    """A script that cannot be taken as it is. To Python an exit with the message, which the script's `except` lets by.

    Args:
        why: what the script does, as a sentence without its end.
        hint: what else to change beside adding the lines.
        line: whether the line of the script's that runs now is the one to name.
        lines: to add, in place of those that call `initialize`; "" for none.
        then: what to do, in front of the lines.

    Attributes:
        why: as above, with the line.
        way_out: the rest of the message, where that is no call of `initialize`; else empty.
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
        told = self.way_out or f". {then}:{lines}"
        super().__init__(f"amp_patch: this script cannot be taken unedited: {self.why}{told}")


def _lightnings_lines() -> str:
    """The lines for a script whose training Lightning runs now; empty where it does not."""
    packages = {str(frame.f_globals.get("__name__")).partition(".")[0] for frame in frames()}
    package = next((name for name in ("lightning", "pytorch_lightning") if name in packages), None)
    return "" if package is None else _LIGHTNING_LINES.format(package=package)


def where() -> str:
    """ " (train.py, line 31)": the innermost line that is neither an installed package's nor ours; empty if none."""
    found = next(filter(None, (place(frame, frame.f_lineno) for frame in frames())), None)
    return "" if found is None else f" ({found})"


def frames() -> Iterator[FrameType]:
    """The frames of this thread, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
