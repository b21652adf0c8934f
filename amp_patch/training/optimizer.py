"""The optimizer's side of `initialize` and `restore`: gives an optimizer its generated class, stash and masters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from amp_patch.masters import on_host
from amp_patch.masters.grad_field import drop_gradients
from amp_patch.masters.masters import disconnect
from amp_patch.masters.states import find_by_masters, find_by_params
from amp_patch.model.tensors import cast
from amp_patch.optimizers.common import FusedOptimizer
from amp_patch.policy import LOW_PRECISION, Policy
from amp_patch.support import generated_class
from amp_patch.support.distributed import is_dtensor, stateful
from amp_patch.support.generated_class import Generated
from amp_patch.support.patches import Attempts
from amp_patch.support.quantized import is_quantized
from amp_patch.support.words import of_class
from amp_patch.training import joints
from amp_patch.training.joints import Optimizer
from amp_patch.training.overflow import SCALING, drop_overflowed, read_by_scaler
from amp_patch.training.stash import ATTRIBUTE, Stash, note_sharing, stash_of
from amp_patch.training.step import WHOLE, lead_to_step, step_of
from amp_patch.training.unscale import unscale_pending

_KNOWN_ZERO_GRADS = (torch.optim.Optimizer.zero_grad, FusedOptimizer.zero_grad)  # before any code patches them


class AssignedState:
    """The descriptor of `state`: an assigned dictionary is found by the model's parameters; a read costs nothing."""

    def __set__(self, optimizer: Optimizer, value: Any) -> None:
        vars(optimizer)["state"] = value
        stash = stash_of(optimizer)
        if stash is not None and stash.policy.master_weights:
            find_by_params(optimizer)


class AmpOptimizer(Generated):
    """Base of the generated classes of optimizers: the methods that `initialize` overrides."""

    param_groups: list[dict[str, Any]]
    state: Any
    step: Callable[..., Any]
    strategy: joints.Strategy = WHOLE  # the default of the class; `neighbours.strategy` overrides it for one optimizer
    _step_supports_amp_scaling = property(read_by_scaler, lambda self, value: vars(self).update({SCALING: value}))

    @classmethod
    def _amp_overrides(cls, base: Any, key: tuple[str, ...]) -> dict[str, Any]:
        strategy = next((way for way in joints.ways if way.suits_class(base)), WHOLE)
        overrides = {"step": step_of(base), "strategy": strategy}
        if issubclass(base, torch.optim.Optimizer) and not hasattr(base, "state"):  # not in place of a property
            overrides["state"] = AssignedState()
        for overrides_of in joints.of_state if key else ():
            overrides |= overrides_of(base)
        return overrides

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the masters' gradients as torch's method does, and the low-precision gradients of the model too."""
        stash = stash_of(self)
        known = stash is not None and (
            stash.masters.waiting is not None or getattr(self._amp_base, "zero_grad", None) in _KNOWN_ZERO_GRADS
        )
        at_once = known and not args and not kwargs
        at_once = at_once and getattr(self, "set_grad_none", True)  # an attribute of FusedAdam and FusedSGD
        if stash is None or not at_once:
            super().zero_grad(*args, **kwargs)  # type: ignore[misc]
        if stash is None:
            return
        masters = stash.masters
        if at_once:  # `super().zero_grad()` would materialize each deferred gradient by a read of `.grad`
            if masters.waiting is not None:
                masters.waiting.clear(masters.links.records)
            for group in self.param_groups:
                drop_gradients(group["params"])
        drop_gradients(masters.links.params)
        stash.pending = stash.unscaled = None
        if at_once:
            stash.route_grads()
        else:
            stash.note_gathered()  # with `set_to_none=False` the masters still have gradients, of zeros
        masters.strays.clear()
        masters.cleared += 1
        if masters.aside:
            masters.forget_aside(lambda _: True)
        masters.drop_last()
        stash.clear_found()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the group as torch's method does. If the policy has masters, its low-precision parameters get masters.

        At O1 and O4, low-precision parameters of the training's models are cast to FP32, as `initialize` casts them.
        """
        stash = stash_of(self)
        if stash is not None and stash.enabled:
            added = _new_params(param_group)
            known = stash.masters.of_groups(self.param_groups).params
            if not set(known).isdisjoint(added):
                raise ValueError("add_param_group: some parameters appear in more than one parameter group")
            if stash.policy.master_weights:
                joints.tell(joints.check_group, self, stash, added)
        super().add_param_group(param_group)  # type: ignore[misc]
        if stash is None or not stash.enabled:
            return
        group = self.param_groups[-1]
        stash.masters.changed()
        if stash.policy.patch_torch_functions and stash.policy.cast_model_type is None:
            widen(stash, group["params"])
        if stash.scales_loss:
            drop_gradients(group["params"])  # scaled: an exit unscales only parameters that an optimizer holds
        if stash.policy.master_weights:
            joints.tell(joints.group_gets_masters, self, stash)
            stash.masters.attach(self, group, form=stash.master_form, device=stash.policy.master_device)
            stash.note_gathered()
            stash.masters.keep(stash.master_form)
            joints.tell(joints.regrouped, self)
        joints.tell(joints.group_added, self, stash)
        note_sharing(stash)

    def __getstate__(self) -> dict[str, Any]:
        stash = stash_of(self)
        if stash is not None:
            stash.masters.adopt()  # groups and state hold the masters: without this, a copy would lack edits of weights
        parent = getattr(super(), "__getstate__", None)  # object has one since Python 3.11
        state = dict(vars(self)) if parent is None else parent()
        return state if stash is None else {**state, "_amp_stash": stash}

    def __setstate__(self, state: dict[str, Any]) -> None:
        parent = getattr(super(), "__setstate__", None)
        if parent is None:
            vars(self).update(state)
        else:
            parent(state)
        stash = stash_of(self)
        if stash is not None:
            if stash.policy.master_weights:
                find_by_params(self)
            stash.masters.forget_entries()
            if stash.owner() is None:
                enter_step(self, stash)
                stash.neighbours.siblings.enter(self)
                note_sharing(stash)


def check_optimizer(optimizer: Optimizer, policy: Policy) -> None:
    """Raise if `initialize` cannot take the innermost optimizer `optimizer`; change nothing.

    Raises:
        TypeError: the object has no `step` and `param_groups`, or no `__dict__`.
        ValueError: a guest (joints.py) refuses it.
    """
    kind = of_class(optimizer)
    if not (callable(getattr(optimizer, "step", None)) and isinstance(getattr(optimizer, "param_groups", None), list)):
        raise TypeError(
            f"initialize: optimizers holds {kind}; wanted a torch.optim.Optimizer, or an object with a list "
            "`param_groups` and a method `step`"
            + (f"; if it is a level, name it: opt_level={optimizer!r}" if isinstance(optimizer, str) else "")
        )
    if not hasattr(optimizer, "__dict__"):
        raise TypeError(
            f"initialize: optimizers holds {kind}, whose __slots__ leave its instances no __dict__ for masters and "
            "loss scale; add '__dict__' and '__weakref__' to its __slots__, or leave these out"
        )
    joints.tell(joints.check_optimizer, optimizer, policy)


def enter_training(
    optimizer: Optimizer, stash: Stash, about_to_be_cast: Collection[Tensor], mixin: type[AmpOptimizer] = AmpOptimizer
) -> None:
    """Give `optimizer` its generated class (with the methods of `mixin`), its stash, and masters for its parameters."""
    if stash.policy.master_weights:
        for group in optimizer.param_groups:
            device = stash.policy.master_device
            stash.masters.attach(optimizer, group, about_to_be_cast, form=stash.master_form, device=device)
        stash.note_gathered()
        joints.tell(joints.regrouped, optimizer)
        for owner in (optimizer, stateful(optimizer)):
            find_by_params(owner, shared=True)
    setattr(optimizer, ATTRIBUTE, stash)
    generated_class.give(optimizer, mixin, () if stash.policy.optimizer_state is None else ("optimizer_state",))
    _lead_scheduler(optimizer)
    enter_step(optimizer, stash)


def _lead_scheduler(optimizer: Optimizer) -> None:
    """Redirect the `step` that a scheduler has stored in the instance to the optimizer's present class.

    The scheduler's wrapper has captured the `step` of the earlier class. Without this, `optimizer.step()` would run
    the `step` of the earlier class.
    """
    captured: Any = vars(optimizer).get("step")
    if getattr(captured, "_wrapped_by_lr_sched", False) and "func" in captured.__code__.co_freevars:
        captured.__closure__[captured.__code__.co_freevars.index("func")].cell_contents = type(optimizer).step


def enter_step(optimizer: Optimizer, stash: Stash) -> None:
    """Bind `stash` to `optimizer`, and make the calls of `optimizer.step` run `Step`.

    If the policy has masters and a strategy takes deferred gradients, gradients are deferred from now on. Otherwise
    each exit of `scale_loss` makes them FP32.
    """
    joints.tell(joints.enter_optimizer, optimizer, stash)
    if stash.policy.master_weights and any(way.knows(optimizer, stash) for way in joints.ways):
        stash.masters.let_gradients_wait()
    lead_to_step(optimizer)


def restore(optimizer: Optimizer, *, recast_state: bool = True) -> None:
    """Undo `enter_training`: gradients, groups, class and stash of `optimizer` are as without amp_patch.

    If `recast_state`, also remove the parameters' masters, and cast the optimizer's state to the parameters' present
    dtypes. Otherwise the parameters stay linked to their masters, and the state keeps its dtypes.
    """
    stash = stash_of(optimizer)
    if stash is None:
        return
    attempt = Attempts()
    attempt(unscale_pending, optimizer)
    attempt(drop_overflowed, optimizer, stash)
    for leave in joints.leave_optimizer:
        attempt(leave, optimizer, stash)
    for undo in stash.neighbours.undo:
        attempt(undo)
    params = stash.masters.links.params
    attempt(stash.masters.detach, optimizer)
    attempt(joints.tell, joints.regrouped, optimizer)
    for owner in (optimizer, stateful(optimizer)):
        find_by_masters(owner)
    if isinstance(optimizer, Generated):
        attempt(generated_class.take, optimizer)
        attempt(_lead_scheduler, optimizer)
    delattr(optimizer, ATTRIBUTE)
    if recast_state:
        for param in params:
            disconnect(param)
        attempt(state_follows_params, optimizer)
    attempt.finish()


def state_follows_params(optimizer: Optimizer) -> None:
    """Cast the optimizer's state to the dtypes of the tensors that it steps, by torch's rules for loading a state.

    Where masters are or were on the host, the state also moves to the device of these tensors.
    """
    holder = stateful(optimizer)

    def follows(value: Any, param: Tensor) -> bool:
        is_of_elements = isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0
        if on_host.used and is_of_elements and value.device != param.device:
            return False
        return not is_of_elements or value.dtype is param.dtype

    if getattr(holder, "state", None) and not all(
        follows(value, param)
        for param, state in holder.state.items()
        if isinstance(param, Tensor) and isinstance(state, dict)
        for value in state.values()
    ):
        holder.load_state_dict(holder.state_dict())


def widen(stash: Stash, params: Iterable[Any]) -> None:
    """Cast to FP32 the low-precision trainable parameters of `params` that are in the training's models.

    A layer or an adapter that user code added to a model after `initialize` has such parameters.
    """
    inside = {param for model in stash.neighbours.siblings.alive_models() for param in model.parameters()}
    low = [
        p
        for p in params
        if p in inside and p.requires_grad and p.dtype in LOW_PRECISION and not (is_quantized(p) or is_dtensor(p))
    ]
    cast(low, torch.float32)
    joints.tell(joints.retyped, set(low))


def _new_params(param_group: Any) -> list[Tensor]:
    """Return the parameters of a group before `add_param_group`; replace an iterator in the group by a list.

    If the group is malformed, the result is empty, and torch raises the error.
    """
    params = param_group.get("params") if isinstance(param_group, dict) else None
    if isinstance(params, Iterator):
        params = param_group["params"] = list(params)
    given = params if isinstance(params, list | tuple) else [params]
    unnamed = [p[-1] if isinstance(p, tuple) and p else p for p in given]  # torch takes (name, parameter) too
    return [p for p in unnamed if isinstance(p, Tensor)]
