"""What became of one run, in words."""

from __future__ import annotations

import textwrap
import traceback

import torch

from amp_patch.lab.recording.recorder import Recorder
from amp_patch.lab.recording.run import EXITED, INTERRUPTED, OUT_OF_MEMORY, Failure, Run
from amp_patch.lab.wording import without_control_codes
from amp_patch.support.scripts_line import place


def failure(recorder: Recorder, run: Run, error: BaseException | None) -> Failure | None:
    """Why a recorded training gave no figures, or ended early; None if it ended well.

    Args:
        recorder: that has seen it.
        run: what it recorded.
        error: what the script ended with, a SystemExit too.
    """
    if isinstance(error, SystemExit) and error.code in (None, 0):  # among them the recorder's Enough
        error = None
    if recorder.has_enough:  # what the script does behind the steps that were asked for is not the level's
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
    if not recorder.losses:
        return Failure(
            "the script never called amp.scale_loss, so there is no loss to compare; train with "
            "`with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`"
        )
    if not run.steps:
        return Failure(
            "the script never called optimizer.step() on what it gave to amp.initialize: no step was recorded"
        )
    return None


def interrupted(run: Run) -> Failure:
    """Of a run that the user's Ctrl-C has ended."""
    return Failure(f"interrupted after {run.steps} steps", INTERRUPTED)


def _one_line(text: str) -> str:
    # Our refusals end with the way out, within 500 characters.
    return textwrap.shorten(without_control_codes(text), 500, placeholder=" ...")


def _where(error: BaseException) -> str:
    """The innermost line of the script's that has raised it; a SyntaxError names its own."""
    if isinstance(error, SyntaxError):
        return ""
    places = [place(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return next(filter(None, reversed(places)), "")


def _is_out_of_memory(error: BaseException) -> bool:
    # The CPU's allocator raises a RuntimeError, whose words differ between systems.
    words = ("can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(each in str(error) for each in words)
    )
