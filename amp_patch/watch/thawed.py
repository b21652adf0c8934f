"""Parameters that were frozen at `initialize` and are unfrozen later.

If an optimizer holds such a parameter, it is in low precision without a master. `watch` hooks the backwards, steps and
loads of that optimizer and the loads of models, and makes the master. If no optimizer holds it, `watch_unowned`
has its gradients unscaled.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.masters.grad_field import own_grad
from amp_patch.model import incoming
from amp_patch.model.tensors import before_load
from amp_patch.policy import LOW_PRECISION
from amp_patch.support.generated_class import base_class
from amp_patch.support.quantized import is_quantized
from amp_patch.training import joints
from amp_patch.training.optimizer import widen
from amp_patch.training.stash import Neighbours, Stash, enabled_stash, known_stash, note_sharing
from amp_patch.training.training import Training, all_optimizers


def watch(optimizer: Any, stash: Stash) -> None:
    """Register `make_masters` for each backward and `refuse_thawed` for each step of `optimizer`; idempotent.

    Both are registered when the optimizer's groups first hold a low-precision parameter without a master: now or later.
    """
    if stash.policy.master_weights or stash.policy.patch_torch_functions:
        subscribe = partial(_subscribe, weakref.ref(optimizer), stash.neighbours)  # the whole stash would make a cycle
        stash.masters.found_bare = subscribe
        if stash.masters.of_groups(optimizer.param_groups).bare:
            subscribe()


_watched = weakref.WeakKeyDictionary[Neighbours, weakref.ref[Any]]()


def _subscribe(ref: weakref.ref[Any], around: Neighbours) -> None:
    _watched[around] = ref
    if make_masters not in around.before_backward:
        around.before_backward.append(make_masters)
        around.before_step.append(refuse_thawed)
        if isinstance(optimizer := ref(), torch.optim.Optimizer):
            around.undo += _load_in_fp32(optimizer)


def _load_in_fp32(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Register hooks that keep the state of parameters without masters FP32 at a load; return functions to remove them.

    Without these hooks, torch would cast the state to the low-precision type of the parameters.
    """
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
        optimizer.register_load_state_dict_pre_hook(before).remove,
        optimizer.register_load_state_dict_post_hook(after).remove,
    ]


def make_masters(optimizer: Any, stash: Stash) -> None:
    """Make masters for low-precision parameters of `optimizer` that have been unfrozen, if the level has masters.

    Raises:
        RuntimeError: the level has no masters, and `refuse_thawed` raises.
    """
    bare = stash.masters.of_groups(optimizer.param_groups).bare
    if not any(param.requires_grad for param in bare):
        return
    if not stash.policy.master_weights:
        refuse_thawed(optimizer, stash)
        return
    for group in optimizer.param_groups:
        stash.masters.attach(optimizer, group, form=stash.master_form)
    stash.note_gathered()
    stash.masters.keep(stash.master_form)
    joints.tell(joints.regrouped, optimizer)
    note_sharing(stash)


def _before_load(model: nn.Module) -> None:
    """Make FP32 values for parameters of `model` that have been unfrozen: without them, a load would round the file's.

    At O2 and O5 they get masters. At O1 and O4 they become FP32.
    """
    inside = set(map(id, model.parameters()))
    for ref in list(_watched.values()):
        optimizer: Any = ref()
        if (stash := enabled_stash(optimizer)) is None:
            continue
        bare = stash.masters.of_groups(optimizer.param_groups).bare
        if any(param.requires_grad and id(param) in inside for param in bare):
            if stash.policy.master_weights:
                make_masters(optimizer, stash)
            else:
                widen(stash, bare)


before_load.append(_before_load)


def refuse_thawed(optimizer: Any, stash: Stash) -> None:
    """Raise if a parameter that was frozen in low precision would be trained now: it has no FP32 value.

    A parameter that came in low precision is refused as soon as it requires a gradient. If the level has masters, any
    other parameter is refused if it has a gradient: without one, the step does not change it.
    """
    policy = stash.policy
    bare = stash.masters.of_groups(optimizer.param_groups).bare

    def is_trained(param: Tensor) -> bool:
        if param.dtype not in LOW_PRECISION:  # a load has made it FP32
            return False
        if param.requires_grad and incoming.type_of(param) is not None:
            return True
        return bool(policy.master_weights) and own_grad(param) is not None and not is_quantized(param)

    thawed = next(filter(is_trained, bare), None)
    if thawed is None:
        return
    way = "call scale_loss for its loss" if policy.master_weights else "call initialize() again, then step"
    name = stash.names().get(thawed, "of a later group")
    verb = "requires" if thawed.requires_grad else "has"
    raise RuntimeError(
        f"{base_class(optimizer).__name__}: parameter {name!r} came "
        f"frozen in {thawed.dtype} and {verb} a gradient now; opt_level {policy.opt_level!r} trains FP32 values, "
        f"but this parameter has none: {way}"
    )


# ----------------------------------------------------------------------------------------------------------------------
# In no optimizer


def watch_unowned(training: Training, models: list[nn.Module], targets: list[Any]) -> None:
    """Register a search for parameters that user code unfreezes: frozen ones of `models` that no optimizer holds.

    The search runs before each backward. A parameter that it finds becomes unowned: the exit of `scale_loss` unscales
    the parameter's gradient.

    Args:
        targets: the optimizers of `training`, which has just been entered.
    """

    def find(optimizer: Any, stash: Stash) -> None:
        if found := [param for ref in frozen if (param := ref()) is not None and param.requires_grad]:
            frozen[:] = [ref for ref in frozen if (param := ref()) is not None and not param.requires_grad]
            held = _held(all_optimizers())
            stash.neighbours.siblings.unowned += [param for param in found if id(param) not in held]

    own = _held(targets)
    every: dict[int, Tensor] = {id(p): p for model in models for p in model.parameters() if not p.requires_grad}
    frozen = [weakref.ref(param) for key, param in every.items() if key not in own]
    for stash in map(known_stash, targets) if frozen else ():
        stash.neighbours.before_backward.append(find)


def _held(optimizers: list[Any]) -> set[int]:
    """Return the ids of the models' parameters that `optimizers` hold, themselves or through masters."""
    return {id(p) for each in optimizers for p, _ in known_stash(each).masters.pairs(each.param_groups)}
