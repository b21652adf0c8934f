"""The step of optimizers at O0, where the policy changes nothing: they keep their class, and torch's hooks are enough.

Trainings at O0 have no masters and no loss scale. The hooks disable the casts of other trainings during the step. They
also call the functions of `joints.captured` in a capture, and `consume` after the step.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch

from amp_patch.casts import regions, thread_state
from amp_patch.casts import state as casts_state
from amp_patch.support import device_sync
from amp_patch.support.compiled import not_traced
from amp_patch.training import joints
from amp_patch.training.joints import Optimizer
from amp_patch.training.stash import Stash, stash_of
from amp_patch.training.step import consume
from amp_patch.training.unscale import unscale_pending


class _HookedStep:
    """A step between its pre-hook and its post-hook.

    After an exception in the step torch does not call the post-hook. Then the next pre-hook replaces this object.

    Attributes:
        frame: the frame of the outermost call of `step`. If `step` calls its parent's, torch calls hooks around both.
        depth: the number of running calls of `step`.
        no_casts: the region without casts; None if no casts act.
    """

    def __init__(self, frame: FrameType) -> None:
        self.frame, self.depth = frame, 1
        self.no_casts: regions.region | None = None


def hook(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Register hooks that do around a step at O0 what `Step` does at other levels; return functions to remove them."""
    return [optimizer.register_step_pre_hook(_before).remove, optimizer.register_step_post_hook(_after).remove]


@not_traced
def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    stash = stash_of(optimizer)
    if stash is None or not stash.enabled:
        return None
    if isinstance(stash.step, _HookedStep) and thread_state.is_running(stash.step.frame):
        stash.step.depth += 1
        return None
    step = stash.step = _HookedStep(sys._getframe(1))
    if device_sync.is_capturing():
        joints.tell(joints.captured, optimizer, stash)
    unscale_pending(optimizer)
    stash.last_skipped = False
    if casts_state.current() is None:
        return None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    watched = None if closure is None else regions.as_now(closure)
    step.no_casts = regions.region(None)
    step.no_casts.call = step.frame
    step.no_casts.__enter__()
    if watched is None:
        return None
    return ((args[0], watched, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": watched})


@not_traced
def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    stash: Stash | None = stash_of(optimizer)
    if stash is None or not isinstance(step := stash.step, _HookedStep):
        return
    step.depth -= 1
    if step.depth > 0:
        return
    if step.no_casts is not None:
        step.no_casts.__exit__(None, None, None)
    consume(stash)
    if not device_sync.is_capturing():
        stash.neighbours.has_stepped = True
    stash.step = None
