"""What became of one run, in words."""

from __future__ import annotations

import textwrap
import traceback

import torch

from amp_patch.recording.recorder import Recorder
from amp_patch.recording.run import Run


def failure(recorder: Recorder, run: Run, error: BaseException | None) -> str | None:
    """Why a recorded training gave no figures, or ended early, in one line; None if it ended well.

    Args:
        recorder: that has seen it.
        run: what it recorded.
        error: what the script ended with, a SystemExit too.
    """
    if isinstance(error, SystemExit) and error.code in (None, 0):  # the recorder's Enough is one of these
        error = None
    if isinstance(error, KeyboardInterrupt):
        return f"interrupted after {run.steps} steps"
    if isinstance(error, SystemExit):
        how = f"with status {error.code}" if isinstance(error.code, int) else f"saying {_one_line(str(error.code))}"
        return f"the script exited {how}"
    if error is not None:
        words = _one_line(traceback.format_exception_only(type(error), error)[-isinstance(error, SyntaxError)])
        return f"out of memory: {words}" if _is_out_of_memory(error) else words
    if not recorder.enabled:
        return (
            "the script never called amp.initialize (or with enabled=False only, or in a process that it started), so "
            "there is no level to set; call `model, optimizer = amp.initialize(model, optimizer)` after both are made"
        )
    if not recorder.losses:
        return (
            "the script never called amp.scale_loss, so there is no loss to compare; train with "
            "`with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`"
        )
    if not run.steps:
        return "the script never called optimizer.step() on what it gave to amp.initialize: no step was recorded"
    return None


def _one_line(text: str) -> str:
    return textwrap.shorten(text, 300, placeholder=" ...")


def _is_out_of_memory(error: BaseException) -> bool:
    # The allocator of the CPU raises a RuntimeError, in other words on each system.
    words = ("can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(each in str(error) for each in words)
    )
