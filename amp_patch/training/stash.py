"""The state that amp_patch stores with each optimizer: its stash, and functions over the stashes of a training."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol, SupportsIndex

import torch
from torch import Tensor, nn

from amp_patch.masters import clipping, on_host
from amp_patch.masters.closed_master import Form
from amp_patch.masters.grad_field import own_grad, with_gradient
from amp_patch.masters.gradients import FoundInf, Groups
from amp_patch.masters.of_optimizer import GroupParams, Masters
from amp_patch.masters.record import Record
from amp_patch.model import copies, part_loads
from amp_patch.multi_tensor import inverse_of
from amp_patch.multi_tensor.checks import Number
from amp_patch.policy import LOW_PRECISION, Policy
from amp_patch.support import device_sync, fsdp
from amp_patch.support.device_sync import DeviceNumbers
from amp_patch.training import joints
from amp_patch.training.joints import Optimizer
from amp_patch.training.loss_scaler import LossScaler

ATTRIBUTE = "_amp_stash"  # an attribute of optimizers; scripts read it by Apex's name


class Pending:
    """The scale of gradients that a delayed exit of `scale_loss` left scaled on the model, and the scaler it is from.

    Attributes:
        scaling: whether the loss is multiplied.
        checking: whether a gradient that is not finite skips the step.
        updates, edits: the scaler's counts when the gradients were scaled.
        scale: the scale then, FP32, shape [], on the device of the loss; 1 if the loss is not multiplied.
        found: the overflow flags of gradients that backward has left on masters themselves, until they are recorded.
        held_back: whether FSDP modules hold some of the gradients unreduced, where `unscale` cannot read them.
        local: whether the gradients are local to this rank, because a later backward reduces the sum under DDP.
    """

    def __init__(self, scaler: LossScaler) -> None:
        self.scaler = scaler
        self.scaling, self.checking = scaler.scales, scaler.checks
        self.updates, self.edits = scaler.updates, scaler.edits
        self.scale = scaler.loss_factor()
        self.found: FoundInf = {}
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


class Body(Protocol):
    """The attributes of a `ScaledBackward` that the rest of amp_patch uses; described there."""

    optimizers: list[Any]
    scaler: LossScaler
    scale: Tensor
    now: Pending
    checking: bool
    delay_unscale: bool
    failed: bool


no_body: Callable[[], None] = type(None)
no_gradient: Callable[[], None] = type(None)
body_events = SimpleNamespace(count=0)  # the number of times that a body of any optimizer has begun or ended


class Siblings(list[weakref.ref[Any]]):
    """Weak references to the optimizers of one training, and what these share, in one list for all their stashes.

    A copy or a pickle of the list is empty, except for `unowned`. Optimizers that are copied together share the new
    list, and each copy adds itself to it.
    """

    def __init__(self, optimizers: Iterable[Any] = (), models: Iterable[nn.Module] = ()) -> None:
        super().__init__(map(weakref.ref, optimizers))
        self.models = list(map(weakref.ref, models))
        self.unsharded = [ref for ref in self.models if not fsdp.is_fsdp(ref())]  # when `initialize` received them
        self.cast_weights: list[weakref.ref[Tensor]] = []  # in a copy, one of each copied model, in place of `models`
        self.unowned: list[Tensor] = []  # the models' trainable parameters that no optimizer holds
        self.process_group: Any = None  # reduces overflow flags; None: no explicit reduction

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return Siblings, (), {"unowned": self.unowned}

    def enter(self, optimizer: Optimizer) -> None:
        """Add `optimizer`, unless the list has it."""
        if all(known() is not optimizer for known in self):
            self.append(weakref.ref(optimizer))

    def alive_models(self) -> list[nn.Module]:
        return [model for ref in self.models if (model := ref()) is not None]


@dataclass(eq=False)
class Neighbours:
    """References from an optimizer to other objects of its training. Those to optimizers and modules are weak.

    A copy or a pickle of the stash gets a new object of this class, with a copy of `siblings`.

    Attributes:
        siblings: all optimizers of the training, the stash's own included, and what they share.
        sharing: all other optimizers of the training that hold parameters of this one.
        sharded: the FSDP modules of this optimizer's parameters.
        undo: called when the optimizer leaves its training: they remove hooks, and restore the classes of wrappers.
        has_stepped: whether the optimizer has taken a step outside of any capture.
        strategy: the strategy of this optimizer's steps; None: the strategy of the optimizer's class.
        before_backward, before_step: called with optimizer and stash before each `scale_loss` and each step.
        body: returns the running body of `scale_loss` of this optimizer; None if there is none. It is a weak reference,
            so that a body is freed, and ended, if no code can end it any more.
        other_bodies: the running bodies of the training's other optimizers.
        ended: `body_events.count` at the end of this optimizer's last body; before its first body, the count when this
            object was made.
    """

    siblings: Siblings = field(default_factory=Siblings)
    sharing: list[weakref.ref[Any]] = field(default_factory=list)
    sharded: list[weakref.ref[Any]] = field(default_factory=list)
    undo: list[Callable[[], Any]] = field(default_factory=list)
    has_stepped: bool = False
    strategy: joints.Strategy | None = None
    before_backward: list[Callable[[Any, Stash], None]] = field(default_factory=list)
    before_step: list[Callable[[Any, Stash], None]] = field(default_factory=list)
    body: Callable[[], Body | None] = no_body
    other_bodies: list[weakref.ref[Body]] = field(default_factory=list)
    ended: int = field(default_factory=lambda: body_events.count)

    def checking_body(self) -> bool:
        """Tell whether a running body of another optimizer checks gradients."""
        return any((body := ref()) is not None and body.checking for ref in self.other_bodies)


@dataclass
class Stash:
    """The state of one optimizer in amp_patch, stored as `optimizer._amp_stash`.

    The fields are pickled and copied with the optimizer, except for three: a copy or a pickle gets new `neighbours`,
    its `step` is None, and its `unscaled` finds no gradient.

    Attributes:
        policy: the policy of the optimizer's training.
        scalers: one `LossScaler` for each `loss_id` of that training, shared by its optimizers; empty after
            `initialize(enabled=False)`.
        masters: the records of the optimizer's parameters.
        pending: the scale of the gradients on the model after a delayed exit (`delay_unscale=True`); None otherwise.
        found: (scaler, overflow flag on the device) for each scaler that a backward since the last step has used.
        unscaled: returns the first of the gradients that were made for this optimizer since the last step, by a weak
            reference; None if no backward has made any.
        bodies: the number of bodies of `scale_loss` that have begun.
        last_skipped: whether the newest step with an outcome known to the host was skipped.
        device_skips: the steps after that one, skipped or taken on the device: the host has not read their flags.
        passes: the backward passes for one step that a wrapper around the optimizer makes: 1 if it may read gradients
            after the step (LARC), 2 if it moves weights between backward and step (SAM), 0 without a wrapper.
        step: the running `Step`; None between steps.
        fp32_state: the models' parameters whose state stays FP32 where the optimizer's state is in eight bits.
        neighbours: references to models, sibling optimizers, wrappers and hooks.
    """

    policy: Policy
    scalers: list[LossScaler]
    masters: Masters = field(default_factory=Masters)
    pending: Pending | None = None
    found: list[tuple[LossScaler, Tensor]] = field(default_factory=list)
    unscaled: Callable[[], Tensor | None] | None = None
    bodies: int = 0
    last_skipped: bool = False
    device_skips: list[DeviceSkip] = field(default_factory=list)
    passes: int = 0
    step: object = field(default=None, compare=False)
    fp32_state: list[Tensor] = field(default_factory=list, compare=False)
    neighbours: Neighbours = field(default_factory=Neighbours)

    @property
    def enabled(self) -> bool:
        """Tell whether the optimizer is in a training; if not, amp_patch changes no call."""
        return bool(self.scalers)

    def owner(self) -> Any:
        """Return the optimizer itself; None for a stash that no optimizer has."""
        alive = (optimizer for ref in self.neighbours.siblings if (optimizer := ref()) is not None)
        return next((optimizer for optimizer in alive if stash_of(optimizer) is self), None)

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
        while self.device_skips and (wait or self.device_skips[0].flags.here()):
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
        return not (self.passes or self.neighbours.sharing)

    def names(self) -> dict[Tensor, str]:
        """Return the qualified names of the parameters of the training's models, for messages."""
        models, names = self.neighbours.siblings.models, dict[Tensor, str]()
        for index, model in enumerate(ref() for ref in models):
            prefix = f"models[{index}]." if len(models) > 1 else ""
            for name, param in () if model is None else model.named_parameters():
                names.setdefault(param, prefix + name)
        return names

    def named(self, groups: Groups) -> Iterator[tuple[str, Tensor, Record]]:
        """Yield (qualified name, parameter, record) for each parameter in `groups`, for messages."""
        names, held = self.names(), self.masters.of_groups(groups)
        both = zip(held.params, held.records, strict=True)
        for index, group in enumerate(groups):
            for position in range(len(group["params"])):
                param, record = next(both)
                yield names.get(param, f"group {index}, parameter {position}"), param, record

    def __getstate__(self) -> dict[str, Any]:
        self.collect_device_skips(wait=True)
        on_host.arrive()  # for flags in `found`
        owner, siblings = self.owner(), self.neighbours.siblings
        params = [] if owner is None else self.masters.of_groups(owner.param_groups).params
        narrow = [param for param in params if param.dtype in LOW_PRECISION]
        # `copies.narrow` finds a model by any one of its cast parameters, and the optimizer may hold none of them.
        known = [param for ref in siblings.cast_weights if (param := ref()) is not None]
        held = set(params)
        for model in siblings.alive_models():
            if not held.isdisjoint(model.parameters()):
                known += [param for param in model.parameters() if param.dtype in LOW_PRECISION][:1]
        unscaled = None if self.unscaled is None else no_gradient
        more = {"step": None, "unscaled": unscaled, "narrow": narrow + known, "copied_with": (siblings, known)}
        return {**vars(self), **more, "neighbours": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        siblings, known = state.pop("copied_with")
        if narrowed := copies.narrow(state.pop("narrow")):
            joints.tell(joints.retyped, set(narrowed))
        vars(self).update(state)
        self.neighbours = Neighbours(siblings)
        siblings.cast_weights += map(weakref.ref, known)
        if (form := self.master_form) is not None:
            self.masters.keep(form)
        if self.policy.master_weights:
            clipping.install()  # in the process that loads a pickle, nothing has installed it yet
            part_loads.install()
            joints.tell(joints.unpickled)

    def note_gathered(self) -> None:
        """Note the gradients that masters have, so that `param.grad` returns them (`route_grads`)."""
        if self.unscaled is None and with_gradient(self.masters.links.masters):
            self.unscaled = no_gradient
        self.route_grads()

    def route_grads(self) -> None:
        """Set which gradient `param.grad` returns (`Route`): the scaled one, the master's, or the last step's."""
        scaled = self.pending is not None or self.neighbours.body() is not None
        for route in self.masters.routes:
            route.to_masters, route.scaled = self.unscaled is not None and not scaled, scaled

    def forget_cleared(self) -> None:
        """Drop the set-aside gradients of parameters whose `grad` user code has cleared since the delayed exit."""
        if self.masters.aside:
            self.masters.forget_aside(lambda param: own_grad(param) is None)

    def clear_found(self) -> None:
        """Clear `found`, because the gradients were cleared: the next step is not skipped for an overflow in them.

        If a wrapper makes two passes, leave `found` as it is: the first pass has moved the weights by the gradients
        that overflowed.
        """
        if self.passes < 2:
            self.found.clear()

    def note_found(self, scaler: LossScaler, found_inf: Tensor) -> None:
        """Record for the next step the overflow flag of a backward of `scaler`'s loss; the maximum of several flags."""
        for index, (known, earlier) in enumerate(self.found):
            if known is scaler:
                self.found[index] = (scaler, torch.maximum(earlier, found_inf.to(earlier.device)))
                return
        self.found.append((scaler, found_inf))


def distinct_pairs(held: Sequence[GroupParams]) -> Sequence[tuple[Tensor, Tensor]]:
    """Return one (param, master) for each parameter of several optimizers, also if several hold it."""
    if len(held) == 1:
        return held[0].distinct
    return list({param: (param, master) for known in held for param, master in known.pairs}.values())


def has_unscaled(stash: Stash) -> bool:
    """Tell whether the first gradient that was made for the next step exists still."""
    return stash.unscaled is not None and stash.unscaled() is not None


def note_sharing(stash: Stash) -> None:
    """Store in `sharing` of each of the training's stashes the other optimizers that hold parameters of its own."""
    held = [(o, known, set(known.masters.of_groups(o.param_groups).params)) for o, known in siblings(stash)]
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


def stash_of(optimizer: object) -> Stash | None:
    """Return the stash of `optimizer`; None if it did not go through `initialize`."""
    return getattr(optimizer, ATTRIBUTE, None)


def known_stash(optimizer: object) -> Stash:
    """Return the stash of `optimizer`, which went through `initialize`; AttributeError otherwise."""
    stash: Stash = getattr(optimizer, ATTRIBUTE)
    return stash


def enabled_stash(optimizer: object) -> Stash | None:
    """Return the stash of an optimizer whose training is enabled; None if it has no stash, or another optimizer's.

    A shallow copy, and the inner optimizer of a ZeroRedundancyOptimizer, have the stash of another optimizer.
    """
    stash = stash_of(optimizer)
    return stash if isinstance(stash, Stash) and stash.enabled and stash.owner() is optimizer else None
