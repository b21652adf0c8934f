"""Warnings about code that writes cast weights, other than the optimizers given to `initialize`.

Two cases are detected. An optimizer that was not given to `initialize` steps cast weights without FP32 masters and
without a loss scale. An average of other weights (EMA) that is kept in low precision stops moving, because its small
updates are rounded away. Global step hooks of torch.optim look for both while a training has cast weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from amp_patch.masters.masters import link_of
from amp_patch.model.of_model import followed_policy
from amp_patch.support.compiled import not_traced
from amp_patch.support.device_sync import is_capturing
from amp_patch.support.generated_class import base_class
from amp_patch.support.patches import Installation, Patches
from amp_patch.support.scripts_line import warn
from amp_patch.training.innermost import innermost
from amp_patch.training.stash import stash_of
from amp_patch.training.training import Training

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
    low, found = policy.cast_model_type, []
    if low is None:
        return
    owned = {id(p) for target in targets for group in target.param_groups for p in group["params"]}
    for model in models:
        weights = [p for p in model.parameters() if p.dtype is low and id(p) not in owned and link_of(p) is None]
        found += weights
        if weights or policy.master_weights:
            _models.add(model)
    _seen.clear()
    for target in targets:
        _watches.pop(target, None)
        if found:
            _watches[target] = _Watch(models, found)
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
        _warn_of_averages(modules, known.dtype)
    elif known.looks_left <= 0:
        _watches.clear()


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
    """Detection of averages: modules whose weights are written between the steps of an optimizer.

    One write may be a load or an initialization. So weights are taken for an average if they were written before two
    successive steps, and are close to other weights of the models. A frozen module that is loaded before each step is
    not close.
    """

    def __init__(self, models: list[nn.Module], weights: list[nn.Parameter]) -> None:
        self.models = [weakref.ref(model) for model in models]
        self.weights, self.dtype = [weakref.ref(weight) for weight in weights], weights[0].dtype
        self.state, self.written = _state_of(weights), set[int]()
        self.looks_left = 4  # how many more times values may be compared, since each time syncs with the device

    def look(self) -> list[str]:
        """Return the names of the modules that are averages: weights written before this step and before the last one.

        While a CUDA graph is captured, return no name.
        """
        if is_capturing():
            return []
        weights = [weight for ref in self.weights if (weight := ref()) is not None]
        now = _state_of(weights)
        if now == self.state and not self.written:
            return []
        written = {key for key in now if self.state.get(key, now[key]) != now[key]}
        twice, self.state, self.written = written & self.written, now, written
        if twice:  # not weights that an optimizer steps: at O3 unfrozen ones have no master
            twice -= {id(p) for each in (*_watches, *_seen) for group in each.param_groups for p in group["params"]}
            twice -= {id(weight) for weight in weights if link_of(weight) is not None}
        self.looks_left -= bool(twice)
        models = [model for ref in self.models if twice and (model := ref()) is not None]
        others = [_sample(p) for model in models for p in model.parameters() if id(p) not in now]
        found = [(name, model.get_submodule(name)) for model in models for name in _outermost(model, twice)]
        return [name for name, module in found if _is_average(list(map(_sample, module.parameters())), others)]


def _state_of(weights: Iterable[Tensor]) -> dict[int, tuple[int, int]]:
    """Return {id of a weight: (version counter, data pointer)}.

    A write into the weight changes the counter, an assignment `weight.data = value` changes the pointer.
    """
    return {id(w): (0 if w.is_inference() else w._version, w.data_ptr()) for w in weights}


def _sample(weight: Tensor) -> tuple[torch.Size, Tensor]:
    return weight.shape, weight.detach().reshape(-1)[:256].to("cpu", torch.float32)


def _is_average(weights: list[tuple[torch.Size, Tensor]], others: list[tuple[torch.Size, Tensor]]) -> bool:
    """Tell whether each of `weights` is close to one of `others`, and at least one of them is no exact copy.

    Both lists have (shape, the first 256 elements) for each parameter, as `_sample` returns them.
    """
    distances = [
        min(
            (float((one - other).norm() / other.norm().clamp(min=1e-9)) for s, other in others if s == shape),
            default=2.0,
        )
        for shape, one in weights
    ]
    return 0 < max(distances) < 0.5


def _outermost(model: nn.Module, weights: Container[int]) -> list[str]:
    """Return the names of the outermost modules inside `model` all of whose parameters are in `weights` (ids)."""
    found: list[str] = []
    for name, module in model.named_modules():
        inside = [id(param) for param in module.parameters()]
        outer = not any(name.startswith(f"{each}.") for each in found)
        if name and outer and inside and all(key in weights for key in inside):
            found.append(name)
    return found


def _warn_of_averages(modules: list[str], dtype: torch.dtype) -> None:
    warn(
        f"initialize: the weights of {modules} are {dtype}, no optimizer holds them, and they are written between "
        "steps: an average of weights with a decay near 1 stands still in low precision. "
        f"initialize(..., keep_fp32={modules}) keeps them FP32"
    )
