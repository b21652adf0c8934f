"""What cannot be trained at another level unedited: one message, which names the lines to add."""

from __future__ import annotations

import os
import sys

_NOT_THE_USERS = ("torch", __name__.partition(".")[0], "runpy", "importlib", "contextlib")

_LINES = """
    from amp_patch import amp
    model, optimizer = amp.initialize(model, optimizer)  # behind the line that makes the optimizer
    with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()  # in place of loss.backward()"""

_LIGHTNING_LINES = """
    import os
    from amp_patch.integrations.{package} import OptLevelPrecision
    trainer = Trainer(plugins=OptLevelPrecision(os.environ.get("AMP_PATCH_OPT_LEVEL", "O1")))"""


class Refused(SystemExit):
    """A script that cannot be taken as it is. To Python an exit with the message, which the script's `except` lets by.

    Args:
        why: what the script does, as a sentence without its end.
        hint: what else to change beside adding the lines.
        line: whether the line of the script's that runs now is the one to name.
    """

    def __init__(self, why: str, hint: str = "", *, line: bool = True) -> None:
        self.why = f"{why}{_where() if line else ''}"
        hint = f"\n{hint}" if hint else ""
        super().__init__(f"amp_patch: this script cannot be taken unedited: {self.why}. Add to it:{_lines()}{hint}")


def _lines() -> str:
    for package, module in ("lightning", "lightning.pytorch.trainer"), ("pytorch_lightning", "pytorch_lightning"):
        if module in sys.modules:
            return _LIGHTNING_LINES.format(package=package)
    return _LINES


def _where() -> str:
    """ " (train.py, line 31)": the innermost line that is neither torch's nor ours; empty where there is none."""
    frame = sys._getframe(2)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _NOT_THE_USERS:
        frame = frame.f_back
    if str(frame.f_globals.get("__name__")).partition(".")[0] in _NOT_THE_USERS:
        return ""
    return f" ({os.path.basename(frame.f_code.co_filename)}, line {frame.f_lineno})"
