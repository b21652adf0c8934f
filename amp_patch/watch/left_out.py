"""Warnings about code that writes cast weights, other than the optimizers given to `initialize`.

Two cases are detected. An optimizer that was not given to `initialize` steps cast weights without FP32 masters and
without a loss scale. An average of other weights (EMA) that is kept in low precision stops moving, because its small
updates are rounded away. Global step hooks of torch.optim look for both while a training has cast weights.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from amp_patch.masters.masters import link_of
from amp_patch.model.of_model import followed_policy
from amp_patch.support.compiled import not_traced
from amp_patch.support.generated_class import base_class
from amp_patch.support.patches import Installation, Patches
from amp_patch.support.scripts_line import warn
from amp_patch.training.innermost import innermost
from amp_patch.training.stash import stash_of
from amp_patch.training.training import Training
from amp_patch.watch.averages import averages_in

_installation = Installation()
_models = weakref.WeakSet[nn.Module]()  # the cast models
_looking: list[Any] = []  # the handle of the hook before steps
_seen = weakref.WeakSet[Any]()  # optimizers already checked for being left out
_watches = weakref.WeakKeyDictionary[Any, "_Watch"]()


def watch(training: Training, models: list[nn.Module], targets: list[Any]) -> None:
    """Register hooks that warn at a step if other code than the optimizers `targets` has written weights of `models`.

    The models have just entered `training`, whose optimizers are `targets`. Only cast weights are watched. If the
    training's policy casts no weights, do nothing.
    """
    policy = training.policy
    low = policy.cast_model_type
    if low is None:
        return
    if policy.master_weights:
        _models.update(models)
    owned = {id(p) for target in targets for group in target.param_groups for p in group["params"]}
    trained = {id(p) for model in models for p in model.parameters() if id(p) in owned or link_of(p) is not None}
    averages = averages_in(models, trained)
    found = {name: module for module, name in averages.items() if all(p.dtype is low for p in module.parameters())}
    _seen.clear()
    for target in targets:
        _watches.pop(target, None)
        if found:
            _watches[target] = _Watch(found, low)
    if found or policy.master_weights:
        _installation.install(_hook)


def _hook(patches: Patches) -> None:
    patches.on_remove(register_optimizer_step_post_hook(_step_ends).remove)
    patches.on_remove(_look_no_more)
    for table in (_models, _seen, _watches):
        patches.on_remove(table.clear)


def _look_no_more() -> None:
    while _looking:
        _looking.pop().remove()


@not_traced
def _step_begins(optimizer: Any, *_: Any) -> None:
    known = _watches.get(optimizer)
    if known is None:
        return
    if modules := known.look():
        _watches.clear()
        warn(
            f"initialize: the weights of {modules} are {known.dtype}, no optimizer holds them, and they are written "
            "between steps: an average of weights with a decay near 1 stands still in low precision. "
            f"initialize(..., keep_fp32={modules}) keeps them FP32"
        )


@not_traced
def _step_ends(optimizer: Any, *_: Any) -> None:
    if _watches and not _looking:
        # Registered here and not in `watch`, which an unedited script may call while torch iterates over these hooks.
        _looking.append(register_optimizer_step_pre_hook(_step_begins))
    if optimizer not in _seen and optimizer not in _watches:
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
            _watches.clear()  # without this, its steps would be reported as an average's writes
            name, level = base_class(optimizer).__name__, policy.opt_level
            warn(
                f"initialize: this {name} was not given to initialize(), which cast the {base_class(model).__name__} "
                f"that it steps to {policy.cast_model_type} at {level}: small updates are rounded away without FP32 "
                "masters, and small gradients without a loss scale. Write `model, optimizer = amp.initialize(model, "
                f"optimizer, opt_level={level!r})` and `with amp.scale_loss(loss, optimizer) as scaled_loss: "
                "scaled_loss.backward()`"
            )
            return


class _Watch:
    """Detection of averages: modules that look like one (`averages_in`), and are written between the steps.

    One write may be a load or an initialization. So a module is taken for an average if it was written before two
    successive steps, and no optimizer holds its weights.
    """

    def __init__(self, modules: dict[str, nn.Module], dtype: torch.dtype) -> None:
        self.modules, self.dtype = weakref.WeakValueDictionary(modules), dtype
        self.state, self.written = self._state(), set[str]()

    def look(self) -> list[str]:
        """Return the names of the modules that were written before this step and before the last one."""
        now = self._state()
        written = {name for name, state in now.items() if state != self.state.get(name)}
        twice, self.state, self.written = written & self.written, now, written
        if not twice:
            return []
        held = {id(p) for each in (*_watches, *_seen) for group in each.param_groups for p in group["params"]}
        stepped = {id(p) for module in self.modules.values() for p in module.parameters() if link_of(p) is not None}
        return [n for n in sorted(twice) if (held | stepped).isdisjoint(map(id, self.modules[n].parameters()))]

    def _state(self) -> dict[str, list[tuple[int, int]]]:
        """Return {name of a module: (version counter, data pointer) of each weight}.

        A write into a weight changes the counter, an assignment `weight.data = value` changes the pointer.
        """
        return {
            name: [(0 if p.is_inference() else p._version, p.data_ptr()) for p in module.parameters()]
            for name, module in self.modules.items()
        }
