"""A warning about optimizers that were not given to `initialize`, and step cast weights.

They step without FP32 masters and without a loss scale. A global step hook of torch.optim looks for them while a
training has cast weights.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from amp_patch.model.of_model import followed_policy
from amp_patch.support.compiled import not_traced
from amp_patch.support.generated_class import base_class
from amp_patch.support.patches import Installation, Patches
from amp_patch.support.scripts_line import warn
from amp_patch.training.innermost import innermost
from amp_patch.training.stash import stash_of
from amp_patch.training.training import Training

_installation = Installation()
_models = weakref.WeakSet[nn.Module]()  # the cast models
_seen = weakref.WeakSet[Any]()  # optimizers already checked for being left out


def watch(training: Training, models: list[nn.Module], targets: list[Any]) -> None:
    """Register a hook that warns at a step if an optimizer other than `targets` steps weights of `models`.

    The models have just entered `training`, whose optimizers are `targets`. Only cast weights with masters are watched.
    """
    if training.policy.cast_model_type is not None:
        _seen.clear()
        if training.policy.master_weights:
            _models.update(models)
            _installation.install(_hook)


def _hook(patches: Patches) -> None:
    patches.on_remove(register_optimizer_step_post_hook(_step_ends).remove)
    for table in (_models, _seen):
        patches.on_remove(table.clear)


@not_traced
def _step_ends(optimizer: Any, *_: Any) -> None:
    if optimizer not in _seen:
        _seen.add(optimizer)
        if stash_of(innermost(optimizer)) is None:
            _warn_if_left_out(optimizer)


def _warn_if_left_out(optimizer: Any) -> None:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for model in list(_models):
        policy = followed_policy(model)
        if policy is None or not policy.master_weights:  # O3 steps low-precision weights by design
            continue
        if any(id(p) in held and p.dtype is policy.cast_model_type for p in model.parameters()):
            name, level = base_class(optimizer).__name__, policy.opt_level
            warn(
                f"initialize: this {name} was not given to initialize(), which cast the {base_class(model).__name__} "
                f"that it steps to {policy.cast_model_type} at {level}: small updates are rounded away without FP32 "
                "masters, and small gradients without a loss scale. Write `model, optimizer = amp.initialize(model, "
                f"optimizer, opt_level={level!r})` and `with amp.scale_loss(loss, optimizer) as scaled_loss: "
                "scaled_loss.backward()`"
            )
            return
