"""The failure of a run in words."""

from __future__ import annotations

import textwrap
import traceback

import torch

from amp_patch.diagnose.recording.recorder import Recorder
from amp_patch.diagnose.recording.run import EXITED, INTERRUPTED, OUT_OF_MEMORY, UNTRAINED, Failure, Run
from amp_patch.diagnose.wording import without_control_codes
from amp_patch.support.scripts_line import place


def failure(recorder: Recorder, run: Run, error: BaseException | None) -> Failure | None:
    """Return why a recorded training gave no figures or ended early; None if it ended well.

    Args:
        recorder: the recorder of the training.
        run: the record of the training.
        error: the exception that ended the script, for example a SystemExit; None if there was none.
    """
    if isinstance(error, SystemExit) and error.code in (None, 0):  # the recorder's Enough is one of these
        error = None
    if recorder.has_enough:  # errors after the last step that was asked for do not count against the level
        return None
    if isinstance(error, KeyboardInterrupt):
        return interrupted(run)
    if isinstance(error, SystemExit):
        if isinstance(error.code, int):
            return Failure(f"the script exited with status {error.code}", EXITED, _where(error))
        return Failure(f"the script exited saying {_one_line(str(error.code))}", where=_where(error))
    if error is not None:
        words = _one_line(traceback.format_exception_only(type(error), error)[-isinstance(error, SyntaxError)])
        if _is_out_of_memory(error):
            return Failure(f"out of memory: {words}", OUT_OF_MEMORY, _where(error))
        return Failure(words, where=_where(error))
    if not recorder.enabled:
        return Failure(
            "the script never called amp.initialize (or with enabled=False only, or in a process that it started), so "
            "there is no level to set; call `model, optimizer = amp.initialize(model, optimizer)` after both are made"
        )
    if not recorder.losses and recorder.is_in_a_step:
        return Failure(
            "the script never called amp.scale_loss, so there is no loss to compare; train with "
            "`with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`",
            UNTRAINED,
        )
    if not recorder.losses and recorder.evaluated:
        return Failure("the script calls its model without gradients alone, as inference does: no training", UNTRAINED)
    if not recorder.losses:
        return Failure(
            "no batch came: the script never called the model that it gave to amp.initialize, as with a loader with "
            "drop_last over fewer samples than a batch",
            UNTRAINED,
        )
    if not run.steps:
        return Failure("the script never called step() of the optimizer that it trains: no step was made", UNTRAINED)
    return None


def interrupted(run: Run) -> Failure:
    """Return the failure of a run that the user ended with Ctrl-C."""
    return Failure(f"interrupted after {run.steps} steps", INTERRUPTED)


def _one_line(text: str) -> str:
    # 500 characters hold the whole of our own errors, which end with the way out.
    return textwrap.shorten(without_control_codes(text), 500, placeholder=" ...")


def _where(error: BaseException) -> str:
    """Return the innermost line of the script in the traceback; "" for a SyntaxError, whose message has its line."""
    if isinstance(error, SyntaxError):
        return ""
    places = [place(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return next(filter(None, reversed(places)), "")


def _is_out_of_memory(error: BaseException) -> bool:
    # The CPU's allocator raises a RuntimeError, with a text that differs between systems.
    words = ("can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(each in str(error) for each in words)
    )
