"""Cast weights that no optimizer of `initialize` holds, and warnings of what writes them nevertheless.

An optimizer that went through no `initialize` steps them without FP32 masters and without a loss scale. An average of
other weights hardly moves in low precision. A hook of torch's on all optimizers looks for both, as long as there are
trainings with such weights.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from amp_patch.masters.masters import link_of
from amp_patch.model.state import followed_policy
from amp_patch.support.compiled import not_traced
from amp_patch.support.generated_class import base_class
from amp_patch.support.patches import Installation, Patches
from amp_patch.support.scripts_line import stacklevel
from amp_patch.training.stash import stash_of
from amp_patch.training.training import Training

_installation = Installation()
_models = weakref.WeakSet[nn.Module]()  # those that have such weights
_seen = weakref.WeakSet[Any]()  # optimizers without a stash that were looked at
_watches = weakref.WeakKeyDictionary[Any, "_Watch"]()


def watch(training: Training, models: list[nn.Module], targets: list[Any]) -> None:
    """Look at each step for writes into cast weights of `models`, which have just entered a training of `targets`."""
    low, found = training.policy.cast_model_type, []
    if low is None:
        return
    owned = {id(p) for target in targets for group in target.param_groups for p in group["params"]}
    for model in models:
        weights = [p for p in model.parameters() if p.dtype is low and id(p) not in owned and link_of(p) is None]
        found += weights
        if weights:
            _models.add(model)
    _seen.clear()
    for target in targets:
        _watches.pop(target, None)
        if found:
            _watches[target] = _Watch(models, found)
    if found:
        _installation.install(_hook)


def _hook(patches: Patches) -> None:
    patches.on_remove(register_optimizer_step_pre_hook(_step_begins).remove)
    for table in (_models, _seen, _watches):
        patches.on_remove(table.clear)


@not_traced
def _step_begins(optimizer: Any, *_: Any) -> None:
    known = _watches.get(optimizer)
    if known is not None:
        if modules := known.look():
            _watches.clear()
            _warn_of_averages(modules, known.dtype)
    elif optimizer not in _seen:
        _seen.add(optimizer)
        if stash_of(optimizer) is None:
            _warn_if_left_out(optimizer)


def _warn_if_left_out(optimizer: Any) -> None:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for model in list(_models):
        policy = followed_policy(model)
        if policy is None or not policy.master_weights:  # O3 steps low-precision weights by design
            continue
        if any(id(p) in held and p.dtype is policy.cast_model_type and link_of(p) is None for p in model.parameters()):
            _watches.clear()  # its steps would look like an average's
            name, level = base_class(optimizer).__name__, policy.opt_level
            warnings.warn(
                f"initialize: this {name} was not given to initialize(), which cast the {base_class(model).__name__} "
                f"that it steps to {policy.cast_model_type} at {level}: small updates are rounded away without FP32 "
                "masters, and small gradients without a loss scale. Write `model, optimizer = amp.initialize(model, "
                f"optimizer, opt_level={level!r})` and `with amp.scale_loss(loss, optimizer) as scaled_loss: "
                "scaled_loss.backward()`",
                stacklevel=stacklevel(),
            )
            return


class _Watch:
    """Looks at weights when an optimizer's step begins, for those that are written between its steps.

    One write may be a load or an initialization. An average is written before each step.
    """

    def __init__(self, models: list[nn.Module], weights: list[nn.Parameter]) -> None:
        self.models = [weakref.ref(model) for model in models]
        self.weights, self.dtype = weights, weights[0].dtype
        self.state, self.written = _state_of(weights), set[int]()

    def look(self) -> list[str]:
        """The names of the modules all of whose weights were written before this step and before the last one."""
        now = _state_of(self.weights)
        if now == self.state and not self.written:
            return []
        changed = zip(self.weights, self.state, now, strict=True)
        written = {id(weight) for weight, before, after in changed if before != after and link_of(weight) is None}
        twice, self.state, self.written = written & self.written, now, written
        if twice:  # at O3 a thawed weight has no master that would tell
            twice -= {id(p) for each in (*_watches, *_seen) for group in each.param_groups for p in group["params"]}
        return [name for ref in self.models if (model := ref()) is not None for name in _outermost(model, twice)]


def _state_of(weights: Iterable[Tensor]) -> list[tuple[int, int]]:
    """What a write changes: the version counter, or the memory, by `param.data = value`."""
    return [(0 if weight.is_inference() else weight._version, weight.data_ptr()) for weight in weights]


def _outermost(model: nn.Module, weights: Container[int]) -> list[str]:
    """The names of the outermost modules inside `model` that have no other parameters than `weights` (ids)."""
    found: list[str] = []
    for name, module in model.named_modules():
        inside = [id(param) for param in module.parameters()]
        outer = not any(name.startswith(f"{each}.") for each in found)
        if name and outer and inside and all(key in weights for key in inside):
            found.append(name)
    return found


def _warn_of_averages(modules: list[str], dtype: torch.dtype) -> None:
    warnings.warn(
        f"initialize: the weights of {modules} are {dtype}, no optimizer holds them, and they are written between "
        "steps: an average of weights with a decay near 1 stands still in low precision. "
        f"initialize(..., keep_fp32={modules}) keeps them FP32",
        stacklevel=stacklevel(),
    )
