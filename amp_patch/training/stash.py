"""The state that amp_patch stores with each optimizer: its stash, and functions over the stashes of a training."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from amp_patch.masters import clipping
from amp_patch.masters.closed_master import Form
from amp_patch.masters.direct_gradients import DirectGradients
from amp_patch.masters.grad_field import own_grad, with_gradient
from amp_patch.masters.gradients import Aside, FoundInf
from amp_patch.masters.of_optimizer import Masters
from amp_patch.model import copies, part_loads
from amp_patch.multi_tensor import inverse_of
from amp_patch.multi_tensor.checks import Number
from amp_patch.policy import LOW_PRECISION, Policy
from amp_patch.support import device_sync
from amp_patch.support.device_sync import DeviceNumbers
from amp_patch.training import joints
from amp_patch.training.loss_scaler import LossScaler

_ATTRIBUTE = "_amp_stash"  # an attribute of optimizers; scripts read it by Apex's name


class Pending:
    """The scale of gradients that a delayed exit of `scale_loss` left scaled on the model, and the scaler it is from.

    Attributes:
        scaling: whether the loss is multiplied.
        checking: whether a gradient that is not finite skips the step.
        updates, edits: the scaler's counts when the gradients were scaled.
        scale: the scale then, FP32, shape [], on the device of the loss; 1 if the loss is not multiplied.
        held_back: whether FSDP modules hold some of the gradients unreduced, where `unscale` cannot read them.
        local: whether the gradients are local to this rank, because a later backward reduces the sum under DDP.
    """

    def __init__(self, scaler: LossScaler) -> None:
        self.scaler = scaler
        self.scaling, self.checking = scaler.scales, scaler.checks
        self.updates, self.edits = scaler.updates, scaler.edits
        # If the level does not scale, the scaler may have a scale other than 1, from a checkpoint of another level.
        self.scale = scaler.scale_tensor.clone() if scaler.scales else torch.ones_like(scaler.scale_tensor)
        self.held_back = self.local = False

    def inverse(self) -> Number | None:
        """Return the factor that unscales the gradients: FP32, shape [], if the loss is scaled.

        If the loss is not scaled, return 1.0 if gradients are checked for overflow, else None.
        """
        if self.scaling:
            return inverse_of(self.scale)
        return 1.0 if self.checking else None

    def has_scale_of(self, scaler: LossScaler) -> bool:
        """Tell whether `scaler` certainly has the gradients' scale still, by its counts on the host; no sync."""
        moved = scaler.dynamic and self.updates != scaler.updates
        return self.scaler is scaler and not moved and self.edits == scaler.edits


class DeviceSkip(NamedTuple):
    """The overflow flags of a step that the device has skipped or taken, while they are copied to the host.

    Attributes:
        scalers: the scalers of the losses whose gradients the step was for.
        flags: one flag for each scaler: not 0 if its loss overflowed.
        overflow: the maximum of `flags`, FP32, shape [], on the device, where the optimizer reads it.
    """

    scalers: list[LossScaler]
    flags: DeviceNumbers
    overflow: Tensor

    def here(self) -> bool:
        """Tell whether the flags have arrived on the host, so that a read of them does not wait."""
        return self.flags.here()


class OfThisProcess:
    """A part of a `Stash` that is neither copied nor pickled: a copied or loaded stash has a new one."""


class Body(Protocol):
    """The attributes of a `ScaledBackward` that the rest of amp_patch uses; described there."""

    optimizers: list[Any]
    scaler: LossScaler
    scale: Tensor
    now: Pending
    checking: bool
    delay_unscale: bool
    failed: bool

    def end_if_left(self) -> bool: ...


no_body: Callable[[], None] = type(None)
body_events = SimpleNamespace(count=0)  # the number of times that a body of any optimizer has begun or ended


@dataclass
class BackwardState(OfThisProcess):
    """The part of a stash that the bodies of one iteration share, from the first body to the step after the last.

    Attributes:
        body: returns the running body of `scale_loss` of this optimizer; None if there is none. It is a weak reference,
            so that a body is freed, and ended, if no code can end it any more.
        failed: whether an exception has ended this optimizer's newest body.
        other_open_bodies: id of each running body of the training's other optimizers -> whether its exit checks
            gradients.
        ended: `body_events.count` at the end of this optimizer's last body; before its first body, the count when this
            object was made.
        cleared: the number of calls of the optimizer's `zero_grad`.
        aside: id(param) -> the unscaled gradient of a parameter without a master that `begin` has set aside for the
            time of a body. After a delayed exit it has only the elements that scaling would make infinite or NaN; they
            are added after the sum is unscaled.
        direct: the gradients that a running body's backward leaves on the masters themselves.
        direct_found: the overflow flags of such gradients of delayed exits, until an exit unscales the model's.
        first_unscaled_grad: a weak reference to the first of the gradients that exits have unscaled for the next step;
            None if there is no such gradient.
        strays: ids of the parameters with masters that got gradients from the backward of another optimizer's loss.
        is_seen: whether a warning about this optimizer's first gradients was given, or ruled out (`slips.py`).
    """

    body: Callable[[], Body | None] = no_body
    failed: bool = False
    other_open_bodies: dict[int, bool] = field(default_factory=dict)
    ended: int = field(default_factory=lambda: body_events.count)
    cleared: int = 0
    aside: dict[int, Aside] = field(default_factory=dict)
    direct: DirectGradients | None = None
    direct_found: FoundInf = field(default_factory=dict)
    first_unscaled_grad: Callable[[], Tensor | None] | None = None
    strays: set[int] = field(default_factory=set)
    is_seen: bool = False


class Siblings(list[weakref.ref[Any]]):
    """Weak references to the optimizers of one training, in one list that all their stashes share.

    A copy or a pickle of the list is empty. Optimizers that are copied together share the new list, and each copy adds
    itself to it.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Siblings, ()

    def enter(self, optimizer: Any) -> None:
        """Add `optimizer`, unless the list has it."""
        if all(known() is not optimizer for known in self):
            self.append(weakref.ref(optimizer))


@dataclass(eq=False)
class Neighbours(OfThisProcess):
    """References from an optimizer to other objects of its training, and tables of its parameters by their id.

    References to optimizers, models and modules are weak. A copy or a pickle of the stash gets a new object
    of this class, which has only `siblings`, `unowned` and `cast_weights` from the original.

    Attributes:
        owner: the optimizer itself.
        siblings: all optimizers of the training, `owner` included.
        sharing: all optimizers of the training but `owner` that hold parameters of `owner`.
        models: the models of the training that have parameters of this optimizer.
        cast_weights: in a copy, one cast parameter of each copied model, since a copy has no `models`.
        sharded: the FSDP modules of this optimizer's parameters.
        unowned: the models' trainable parameters that no optimizer holds.
        undo: called when the optimizer leaves its training: they remove hooks, and restore the classes of wrappers.
        process_group: the group that reduces overflow flags; None: no explicit reduction.
        names: id(param) -> its qualified name, for messages.
        stepped: id(master) -> the number of state entries after the last step that the host knows was taken.
        has_stepped: whether the optimizer has taken a step outside of any capture.
        strategy: the strategy of this optimizer's steps; None: the strategy of the optimizer's class.
        before_backward, before_step: called with optimizer and stash before each `scale_loss` and each step.
    """

    owner: weakref.ref[Any] | None = None
    siblings: Siblings = field(default_factory=Siblings)
    sharing: list[weakref.ref[Any]] = field(default_factory=list)
    models: list[weakref.ref[nn.Module]] = field(default_factory=list)
    cast_weights: list[weakref.ref[Tensor]] = field(default_factory=list)
    sharded: list[weakref.ref[Any]] = field(default_factory=list)
    unowned: list[Tensor] = field(default_factory=list)
    undo: list[Callable[[], Any]] = field(default_factory=list)
    process_group: Any = None
    names: dict[int, str] = field(default_factory=dict)
    stepped: dict[int, int] = field(default_factory=dict)
    has_stepped: bool = False
    strategy: joints.Strategy | None = None
    before_backward: list[Callable[[Any, Stash], None]] = field(default_factory=list)
    before_step: list[Callable[[Any, Stash], None]] = field(default_factory=list)

    @property
    def owns_all(self) -> bool:
        """Tell whether the optimizer is the training's only one, and holds all trainable parameters."""
        return len(self.siblings) == 1 and not self.unowned


@dataclass
class Stash:
    """The state of one optimizer in amp_patch, stored as `optimizer._amp_stash`.

    The fields are pickled and copied with the optimizer, except for three: a copy or a pickle gets a new `backward`
    and new `neighbours`, and its `step` is None.

    Attributes:
        policy: the policy of the optimizer's training.
        scalers: one `LossScaler` for each `loss_id` of that training, shared by its optimizers.
        enabled: False after `initialize(enabled=False)`. If so, amp_patch changes no call.
        masters: the pairs of parameters and masters.
        pending: the scale of the gradients on the model after a delayed exit (`delay_unscale=True`); None otherwise.
        found: (scaler, overflow flag on the device) for each scaler that a backward since the last step has used.
        gathered: whether a backward has made gradients for this optimizer since the last step.
        bodies: the number of bodies of `scale_loss` that have begun.
        last_skipped: whether the newest step with an outcome known to the host was skipped.
        device_skips: the steps after that one, skipped or taken on the device: the host has not read their flags.
        wrapped: whether a wrapper around the optimizer may read gradients after its step.
        two_passes: whether a wrapper such as SAM moves weights between backward and step.
        backward: the state of the running iteration's backward passes.
        step: the running `Step`, at O0 the `_HookedStep` of `untouched.py`; None between steps.
        fp32_state: the models' parameters whose state stays FP32 where the optimizer's state is in eight bits.
        neighbours: references to models, sibling optimizers, wrappers and hooks, and tables by id (see `Neighbours`).
    """

    policy: Policy
    scalers: list[LossScaler]
    enabled: bool = True
    masters: Masters = field(default_factory=Masters)
    pending: Pending | None = None
    found: list[tuple[LossScaler, Tensor]] = field(default_factory=list)
    gathered: bool = False
    bodies: int = 0
    last_skipped: bool = False
    device_skips: list[DeviceSkip] = field(default_factory=list)
    wrapped: bool = False
    two_passes: bool = False
    backward: BackwardState = field(default_factory=BackwardState)
    step: object = field(default=None, compare=False)
    fp32_state: list[Tensor] = field(default_factory=list, compare=False)
    neighbours: Neighbours = field(default_factory=Neighbours)

    @property
    def step_skipped(self) -> bool:
        """Tell whether the last `optimizer.step()` was skipped because of an overflow.

        Syncs with the device only if the optimizer skips there (`skips_on_device`).
        """
        self.collect_device_skips(wait=True)
        return self.last_skipped

    @step_skipped.setter
    def step_skipped(self, skipped: bool) -> None:
        self.collect_device_skips(wait=True)
        self.last_skipped = skipped

    def collect_device_skips(self, *, wait: bool = False) -> None:
        """Read the flags of `device_skips` that have arrived; if `wait`, read all of them, which syncs.

        While a CUDA graph is captured the host cannot read flags, so this does nothing.
        """
        if not self.device_skips or device_sync.is_capturing():
            return
        while self.device_skips and (wait or self.device_skips[0].here()):
            skip = self.device_skips.pop(0)
            skipping = overflowed(skip.scalers, skip.flags.read())
            self.last_skipped = bool(skipping)
            for scaler in skipping:
                scaler.skipped(lambda: "not known, the step was skipped on the device")

    @property
    def scales_loss(self) -> bool:
        """Tell whether any loss of the training is multiplied."""
        return any(scaler.scales for scaler in self.scalers)

    @property
    def checks_gradients(self) -> bool:
        """Tell whether any loss of the training checks gradients, so that a step may be skipped."""
        return any(scaler.checks for scaler in self.scalers)

    @property
    def master_form(self) -> Form | None:
        """The compressed form of the masters of bfloat16 weights; None: plain FP32."""
        form_of = joints.forms.get(self.policy.master_weights)
        return None if form_of is None else form_of(self.scalers[0].beside)

    @property
    def unobserved(self) -> bool:
        """Tell whether only this optimizer reads its masters' gradients: no wrapper or other optimizer does."""
        return not (self.wrapped or self.two_passes or self.neighbours.sharing)

    def name_of(self, master: Tensor, group: int, position: int) -> str:
        """Return the qualified name of the parameter of `master`, which is there in the groups, for messages."""
        return self.neighbours.names.get(id(self.masters.param_of(master)), f"group {group}, parameter {position}")

    def __getstate__(self) -> dict[str, Any]:
        self.collect_device_skips(wait=True)
        state = {name: value for name, value in vars(self).items() if not isinstance(value, OfThisProcess)}
        owner = None if self.neighbours.owner is None else self.neighbours.owner()
        params = [] if owner is None else [param for param, _ in self.masters.pairs(owner.param_groups)]
        narrow = [param for param in params if param.dtype in LOW_PRECISION]
        # `copies.narrow` finds a model by any one of its cast parameters, and the optimizer may hold none of them.
        known = [param for ref in self.neighbours.cast_weights if (param := ref()) is not None]
        for model in [model for ref in self.neighbours.models if (model := ref()) is not None]:
            known += [param for param in model.parameters() if param.dtype in LOW_PRECISION][:1]
        copied_with = (self.neighbours.siblings, self.neighbours.unowned, known)
        return {**state, "step": None, "narrow": narrow + known, "copied_with": copied_with}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        siblings, unowned, *known = state.pop("copied_with", (Siblings(), []))  # older pickles have these two
        if narrowed := copies.narrow(state.pop("narrow", ())):
            joints.tell(joints.retyped, set(map(id, narrowed)))
        vars(self).update({"fp32_state": [], **state})  # older pickles have none
        for part in fields(self):
            if isinstance(part.default_factory, type) and issubclass(part.default_factory, OfThisProcess):
                setattr(self, part.name, part.default_factory())
        self.neighbours.siblings, self.neighbours.unowned = siblings, unowned
        self.neighbours.cast_weights = [weakref.ref(param) for params in known for param in params]
        if (form := self.master_form) is not None:
            self.masters.keep(form)
        if self.policy.master_weights:
            clipping.install()  # in the process that loads a pickle, nothing has installed it yet
            part_loads.install()
            joints.tell(joints.unpickled)

    def note_gathered(self) -> None:
        """Set `gathered` if any master has a gradient, so that `param.grad` returns it (`route_grads`)."""
        self.gathered = self.gathered or bool(with_gradient(self.masters.links.masters))
        self.route_grads()

    def route_grads(self) -> None:
        """Set which gradient `param.grad` returns (`GradRoute`): the scaled one, the master's, or the last step's."""
        scaled = self.pending is not None or self.backward.body() is not None
        for route in self.masters.routes:
            route.to_masters, route.scaled = self.gathered and not scaled, scaled

    def forget_cleared(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Drop the set-aside gradients of parameters whose `grad` user code has cleared since the delayed exit."""
        taken = self.backward.aside
        if taken:
            there = {id(param) for param, _ in pairs if own_grad(param) is not None}
            self.backward.aside = {key: aside for key, aside in taken.items() if key in there}

    def clear_found(self) -> None:
        """Clear `found`, because the gradients were cleared: the next step is not skipped for an overflow in them.

        If `two_passes`, leave `found` as it is: the first pass has moved the weights by the gradients that overflowed.
        """
        if not self.two_passes:
            self.found.clear()
            self.backward.direct_found.clear()

    def note_found(self, scaler: LossScaler, found_inf: Tensor) -> None:
        """Record for the next step the overflow flag of a backward of `scaler`'s loss; the maximum of several flags."""
        for index, (known, earlier) in enumerate(self.found):
            if known is scaler:
                self.found[index] = (scaler, torch.maximum(earlier, found_inf.to(earlier.device)))
                return
        self.found.append((scaler, found_inf))


def distinct_pairs(optimizers: Sequence[Any]) -> Sequence[tuple[Tensor, Tensor]]:
    """Return one (param, master) for each parameter of `optimizers`, also if several hold it."""
    if len(optimizers) == 1:
        return known_stash(optimizers[0]).masters.of_groups(optimizers[0].param_groups).distinct
    return list(
        {
            id(param): (param, master)
            for optimizer in optimizers
            for param, master in known_stash(optimizer).masters.pairs(optimizer.param_groups)
        }.values()
    )


def note_sharing(stash: Stash) -> None:
    """Store in `sharing` of each of the training's stashes the other optimizers that hold parameters of its own."""
    held = [(o, known, {id(p) for p, _ in known.masters.pairs(o.param_groups)}) for o, known in siblings(stash)]
    for optimizer, known, own in held:
        others = [other for other, _, params in held if other is not optimizer and not own.isdisjoint(params)]
        known.neighbours.sharing = [weakref.ref(other) for other in others]


def siblings(stash: Stash) -> list[tuple[Any, Stash]]:
    """Return (optimizer, stash) for each optimizer that is still in the training; the optimizer of `stash` included."""
    return _still_in_training(stash.neighbours.siblings)


def sharing(stash: Stash) -> list[tuple[Any, Stash]]:
    """Return (optimizer, stash) for each other optimizer of the training that shares a parameter with `stash`'s."""
    return _still_in_training(stash.neighbours.sharing) if stash.neighbours.sharing else []


def _still_in_training(refs: list[weakref.ref[Any]]) -> list[tuple[Any, Stash]]:
    alive = [optimizer for ref in refs if (optimizer := ref()) is not None]
    return [(optimizer, known) for optimizer in alive if (known := stash_of(optimizer)) is not None]


def overflowed(scalers: list[LossScaler], flags: list[float]) -> list[LossScaler]:
    """Return the scalers whose flag is not 0. Call `stepped` of all other scalers: their losses allow the step."""
    for scaler, flag in zip(scalers, flags, strict=True):
        if not flag:
            scaler.stepped()
    return [scaler for scaler, flag in zip(scalers, flags, strict=True) if flag]


def stash_of(optimizer: Any) -> Stash | None:
    """Return the stash of `optimizer`; None if it did not go through `initialize`."""
    return getattr(optimizer, _ATTRIBUTE, None)


def known_stash(optimizer: Any) -> Stash:
    """Return the stash of `optimizer`, which went through `initialize`; AttributeError otherwise."""
    stash: Stash = getattr(optimizer, _ATTRIBUTE)
    return stash


def enabled_stash(optimizer: Any) -> Stash | None:
    """Return the stash of an optimizer whose training is enabled; None if it has no stash, or another optimizer's.

    A shallow copy, and the inner optimizer of a ZeroRedundancyOptimizer, have the stash of another optimizer.
    """
    stash = stash_of(optimizer)
    if not isinstance(stash, Stash) or not stash.enabled or (owner := stash.neighbours.owner) is None:
        return None
    return stash if owner() is optimizer else None


def give_stash(optimizer: Any, stash: Stash) -> None:
    """Store `stash` as the stash of `optimizer`, replacing any other."""
    setattr(optimizer, _ATTRIBUTE, stash)


def take_stash(optimizer: Any) -> None:
    """Remove the stash of `optimizer`."""
    delattr(optimizer, _ATTRIBUTE)


def name_parameters(stash: Stash, models: list[nn.Module]) -> None:
    """Store the qualified names of the models' parameters in the stash, for messages."""
    for index, model in enumerate(models):
        prefix = f"models[{index}]." if len(models) > 1 else ""
        for name, param in model.named_parameters():
            stash.neighbours.names.setdefault(id(param), prefix + name)
