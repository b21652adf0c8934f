"""Parameters that came frozen in low precision, without a master, and may be trained later.

`watch` subscribes to the backwards, steps and loads of an optimizer that holds some; no other optimizer is asked.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from amp_patch.model import incoming
from amp_patch.support.generated_class import base_class
from amp_patch.training import joints
from amp_patch.training.stash import Neighbours, Stash, known_stash, note_sharing, siblings


def watch(optimizer: Any, stash: Stash) -> None:
    """Have `take` called before each backward and `refuse` before each step once there is a reason; idempotent."""
    if stash.policy.master_weights or stash.policy.patch_torch_functions:
        stash.masters.found_bare = partial(_subscribe, stash.neighbours)  # not the stash, which holds the masters
        if stash.masters.of_groups(optimizer.param_groups).bare:
            _subscribe(stash.neighbours)


def _subscribe(around: Neighbours) -> None:
    if take not in around.before_backward:
        around.before_backward.append(take)
        around.before_step.append(refuse)
        optimizer = None if around.owner is None else around.owner()
        if isinstance(optimizer, torch.optim.Optimizer):
            around.handles += _load_in_fp32(optimizer)


def _load_in_fp32(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Keep the loaded state of such parameters FP32, by hooks: torch casts it to their type, which no master takes."""
    loaded: list[tuple[Tensor, Any]] = []

    def before(optimizer: Any, state_dict: Any) -> None:
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        params = [param for group in optimizer.param_groups for param in group["params"]]
        stash = known_stash(optimizer)
        bare = stash.masters.of_groups(optimizer.param_groups).bare
        wanted = {id(p) for p in bare if stash.policy.master_weights or incoming.type_of(p) is not None}
        found = zip(params, map(state_dict["state"].get, saved), strict=False)  # torch refuses other lengths
        loaded[:] = [(param, state) for param, state in found if id(param) in wanted and isinstance(state, dict)]

    def after(optimizer: Any) -> None:
        for param, state in loaded:
            now = optimizer.state.get(param, {})
            for name in now.keys() & state.keys():
                if isinstance(now[name], Tensor) and now[name].dtype is param.dtype:
                    now[name] = state[name].to(param.device, torch.float32)
        loaded.clear()

    return [
        optimizer.register_load_state_dict_pre_hook(before),
        optimizer.register_load_state_dict_post_hook(after),
    ]


def take(optimizer: Any, stash: Stash) -> None:
    """Make the masters of low-precision parameters that were frozen, and are no more.

    Raises:
        RuntimeError: as `refuse`, where the level has no masters.
    """
    bare = stash.masters.of_groups(optimizer.param_groups).bare
    if not any(param.requires_grad for param in bare):
        return
    if not stash.policy.master_weights:
        refuse(optimizer, stash)
        return
    for group in optimizer.param_groups:
        stash.masters.attach(optimizer, group, form=stash.master_form)
    stash.note_gathered()
    stash.masters.keep(stash.master_form)
    joints.tell(joints.regrouped, optimizer)
    note_sharing([other for other, _ in siblings(stash)])


def refuse(optimizer: Any, stash: Stash) -> None:
    """Raise if such a parameter is trained by now without the FP32 values of its level."""
    policy = stash.policy
    bare = stash.masters.of_groups(optimizer.param_groups).bare
    thawed = next((p for p in bare if p.requires_grad and incoming.type_of(p) is not None), None)
    if thawed is None:
        return
    way = "call scale_loss for its loss" if policy.master_weights else "call initialize() again, then step"
    name = stash.neighbours.names.get(id(thawed), "of a later group")
    raise RuntimeError(
        f"{base_class(optimizer).__name__}: parameter {name!r} came "
        f"frozen in {thawed.dtype} and requires a gradient since; opt_level {policy.opt_level!r} trains FP32 values, "
        f"of which it has none: {way}"
    )
