"""What amp_patch knows of one optimizer, and of the others of its training."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.masters import clipping
from amp_patch.masters.closed_master import Form
from amp_patch.masters.grad_field import own_grad, with_gradient
from amp_patch.masters.gradients import Aside
from amp_patch.masters.of_optimizer import Masters
from amp_patch.model import copies
from amp_patch.multi_tensor import inverse_of
from amp_patch.multi_tensor.checks import Number
from amp_patch.policy import LOW_PRECISION, Policy
from amp_patch.support import device_sync
from amp_patch.support.device_sync import DeviceNumbers
from amp_patch.training import joints
from amp_patch.training.loss_scaler import LossScaler

_ATTRIBUTE = "_amp_stash"  # an attribute of optimizers; scripts read it by Apex's name


class Pending:
    """How gradients are scaled that a delayed exit of `scale_loss` left on the model: by which scaler, and how much.

    Attributes:
        scaling: whether the loss is multiplied.
        checking: whether a step is skipped whose gradients are not finite.
        held_back: whether FSDP modules keep some of the gradients unreduced, out of reach.
        local: whether the gradients wait for a later backward, in which DDP reduces the sum.
    """

    def __init__(self, scaler: LossScaler) -> None:
        self.scaler = scaler
        self.scaling, self.checking = scaler.scales, scaler.checks
        self.updates, self.edits = scaler.updates, scaler.edits
        # A scaler that multiplies nothing may hold another scale than 1: from a checkpoint of a level that scales.
        self.scale = scaler.scale_tensor.clone() if scaler.scales else torch.ones_like(scaler.scale_tensor)
        self.held_back = self.local = False

    def inverse(self) -> Number | None:
        """What the gradients are multiplied by: FP32, shape []; 1.0 where they are only checked; None: neither."""
        if self.scaling:
            return inverse_of(self.scale)
        return 1.0 if self.checking else None

    def has_scale_of(self, scaler: LossScaler) -> bool:
        """Whether `scaler` surely still has the scale of these gradients; the host knows, without a sync."""
        moved = scaler.dynamic and self.updates != scaler.updates
        return self.scaler is scaler and not moved and self.edits == scaler.edits


class DeviceSkip:
    """Whether one step was skipped, which the device alone decided: on its way to the host, without a sync.

    Args:
        scalers: of the losses whose gradients the step was for.
        flags: for each of them, on the device: not 0 if its loss overflowed; FP32.
        overflow: the largest of these, shape [], on the device. The optimizer reads it there.
    """

    def __init__(self, scalers: list[LossScaler], flags: Tensor, overflow: Tensor) -> None:
        self.scalers = scalers
        self.overflow = overflow
        self._flags = DeviceNumbers(flags)

    def here(self) -> bool:
        """Whether the flags have arrived, so that `read` need not wait."""
        return self._flags.here()

    def read(self) -> list[LossScaler]:
        """The scalers whose losses overflowed; the others are told that they stepped. Waits for flags on their way."""
        return overflowed(self.scalers, self._flags.read())


class OfThisProcess:
    """A part of a `Stash` that means nothing elsewhere: a copy and a pickle of the stash begin with a fresh one."""


class _BodyEvents:
    """How often a body of any optimizer of the process has begun or ended.

    An instance: an assignment to an attribute of a class discards what the interpreter has cached of its attributes.
    """

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


body_events = _BodyEvents()


@dataclass
class BackwardState(OfThisProcess):
    """What the bodies of `scale_loss` need of one optimizer, from the first that begins to the step that follows.

    Attributes:
        body: the `ScaledBackward` of this optimizer that is running, if one is.
        other_open_bodies: the running bodies of the training's other optimizers, by id: whether their exits check
            gradients.
        ended: what `body_events.count` was when the last body of this optimizer had ended, or there was none yet.
        cleared: how often the optimizer's `zero_grad` was called.
        aside: by the parameter's id the unscaled gradients of parameters that are their own master, taken away while
            a body runs; after a delayed exit what of them no scaled gradient can hold.
        first_unscaled_grad: gives the first gradient that an exit has left unscaled for the next step.
        strays: ids of the parameters with masters on which another optimizer's backward has left gradients.
        is_seen: whether it was looked whether any loss depends on the optimizer's parameters.
    """

    body: Any = None
    other_open_bodies: dict[int, bool] = field(default_factory=dict)
    ended: int = field(default_factory=lambda: body_events.count)
    cleared: int = 0
    aside: dict[int, Aside] = field(default_factory=dict)
    first_unscaled_grad: Callable[[], Tensor | None] | None = None
    strays: set[int] = field(default_factory=set)
    is_seen: bool = False


class Siblings(list[weakref.ref[Any]]):
    """The optimizers of one training, held weakly; one list for all of them.

    What is copied or pickled is empty. Optimizers that are copied together share a list again, and enter it one by one.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Siblings, ()

    def enter(self, optimizer: Any) -> None:
        """Add `optimizer`, unless it is there."""
        if all(known() is not optimizer for known in self):
            self.append(weakref.ref(optimizer))


@dataclass
class Neighbours(OfThisProcess):
    """The objects around an optimizer, and what is known of its parameters by their id.

    Optimizers, models, modules and wrappers are held weakly: a stash keeps none of them alive. A copy of the stash
    begins with none of this but `siblings` and `unowned`, where those were copied with it.

    Attributes:
        owner: the optimizer itself.
        siblings: all optimizers of its training, itself among them.
        sharing: those of the others that hold parameters of this one.
        models: those models of the training that have parameters of this optimizer.
        sharded: the FSDP modules of its parameters.
        unowned: the models' trainable parameters that no optimizer holds.
        wrappers: the wrappers around it that were given a class (`AmpWrapper`).
        handles: of the hooks that were registered with it and with its wrappers.
        process_group: over which overflows are agreed on.
        names: id(param) -> its qualified name, for messages.
        stepped: id(master) -> how much state the optimizer had of it after a step that the host knows was taken.
        has_stepped: whether a step was taken, outside of any capture.
        coder: what keeps the optimizer's state in codes (coded_state.py); None: it is FP32.
        strategy: how its steps are made; None: as its class has it.
        before_backward, before_step: called with optimizer and stash before each `scale_loss` and each step.
    """

    owner: weakref.ref[Any] | None = None
    siblings: Siblings = field(default_factory=Siblings)
    sharing: list[weakref.ref[Any]] = field(default_factory=list)
    models: list[weakref.ref[nn.Module]] = field(default_factory=list)
    sharded: list[weakref.ref[Any]] = field(default_factory=list)
    unowned: list[Tensor] = field(default_factory=list)
    wrappers: list[weakref.ref[Any]] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    process_group: Any = None
    names: dict[int, str] = field(default_factory=dict)
    stepped: dict[int, int] = field(default_factory=dict)
    has_stepped: bool = False
    coder: Any = None
    strategy: Any = None
    before_backward: list[Callable[[Any, Stash], None]] = field(default_factory=list)
    before_step: list[Callable[[Any, Stash], None]] = field(default_factory=list)

    @property
    def owns_all(self) -> bool:
        """Whether the optimizer is the training's only one, and holds all of its trainable parameters."""
        return len(self.siblings) == 1 and not self.unowned


@dataclass
class Stash:
    """Everything amp_patch knows of one optimizer: `optimizer._amp_stash`.

    Its own fields but `step` outlive the process: they are pickled and copied with the optimizer. What one backward
    pass needs and what is around the optimizer are parts of their own, which a pickle or a copy has fresh.

    Attributes:
        policy: of the training that the optimizer belongs to.
        scalers: one `LossScaler` for each `loss_id` of that training, shared by its optimizers.
        enabled: False after `initialize(enabled=False)`: every call passes through.
        masters: the pairs of parameters and masters.
        pending: set while the model's gradients are still scaled (`delay_unscale=True`).
        found: per scaler what its backward passes found since the last step, on the device.
        gathered: whether a backward has brought gradients since the last step.
        bodies: how many bodies of `scale_loss` were begun.
        last_skipped: whether the last step was skipped, of those that the host has heard of.
        device_skips: the steps that skipped on the device, or did not, which it has not heard of yet; the newest last.
        wrapped: whether something around the optimizer may look at gradients after its step.
        two_passes: whether weights are moved between backward and step, by a wrapper such as SAM.
        step: the `Step` that is running (at O0 what `untouched.py` has in its place); None in copies and pickles.
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
    step: Any = field(default=None, compare=False)
    neighbours: Neighbours = field(default_factory=Neighbours)

    @property
    def step_skipped(self) -> bool:
        """Whether the last `optimizer.step()` was skipped because of an overflow.

        Syncs with the device where the optimizer skips there (`skips_on_device`), else not.
        """
        self.collect_device_skips(wait=True)
        return self.last_skipped

    @step_skipped.setter
    def step_skipped(self, skipped: bool) -> None:
        self.collect_device_skips(wait=True)
        self.last_skipped = skipped

    def collect_device_skips(self, *, wait: bool = False) -> None:
        """Take note of the device's skips that have arrived; of all of them if `wait`, which syncs.

        Nothing can be asked for while a CUDA graph is captured: they wait for a later call.
        """
        if not self.device_skips or device_sync.is_capturing():
            return
        while self.device_skips and (wait or self.device_skips[0].here()):
            skipping = self.device_skips.pop(0).read()
            self.last_skipped = bool(skipping)
            for scaler in skipping:
                scaler.skipped(lambda: "not known, the step was skipped on the device")

    @property
    def scales_loss(self) -> bool:
        """Whether any loss of the training is multiplied."""
        return any(scaler.scales for scaler in self.scalers)

    @property
    def checks_gradients(self) -> bool:
        """Whether the exit of any loss of the training checks gradients, for the step to be skipped."""
        return any(scaler.checks for scaler in self.scalers)

    @property
    def master_form(self) -> Form | None:
        """How the masters of bfloat16 weights are kept; None: whole."""
        form_of = joints.forms.get(self.policy.master_weights)
        return None if form_of is None else form_of(self.scalers[0].beside)

    @property
    def unobserved(self) -> bool:
        """Whether nobody but the optimizer needs the masters' gradients: no wrapper, scaler or other optimizer."""
        return not (self.wrapped or self.two_passes or self.neighbours.sharing)

    def __getstate__(self) -> dict[str, Any]:
        self.collect_device_skips(wait=True)
        state = {name: value for name, value in vars(self).items() if not isinstance(value, OfThisProcess)}
        owner = None if self.neighbours.owner is None else self.neighbours.owner()
        params = [] if owner is None else [param for param, _ in self.masters.pairs(owner.param_groups)]
        narrow = [param for param in params if param.dtype in LOW_PRECISION]
        for model in [model for ref in self.neighbours.models if (model := ref()) is not None]:
            # The optimizer may hold no cast parameter. One of the model's is enough, and pickles no other.
            narrow += [param for param in model.parameters() if param.dtype in LOW_PRECISION][:1]
        copied_with = (self.neighbours.siblings, self.neighbours.unowned)
        return {**state, "step": None, "narrow": narrow, "copied_with": copied_with}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        siblings, unowned = state.pop("copied_with", (Siblings(), []))
        if narrowed := copies.narrow(state.pop("narrow", ())):
            joints.tell(joints.retyped, set(map(id, narrowed)))
        vars(self).update(state)
        for part in fields(self):
            if isinstance(part.default_factory, type) and issubclass(part.default_factory, OfThisProcess):
                setattr(self, part.name, part.default_factory())
        self.neighbours.siblings, self.neighbours.unowned = siblings, unowned
        if (form := self.master_form) is not None:
            self.masters.keep(form)
        if self.policy.master_weights:
            clipping.install()  # this may be another process
            joints.tell(joints.unpickled)

    def note_gathered(self) -> None:
        """Let `grad` of the parameters be their masters' where these have gradients by now."""
        self.gathered = self.gathered or bool(with_gradient(self.masters.links.masters))
        self.route_grads()

    def route_grads(self) -> None:
        """Let `grad` of the parameters be their masters' where those have been gathered, and none are scaled now."""
        scaled = self.pending is not None or self.backward.body is not None
        for route in self.masters.routes:
            route.to_masters, route.scaled = self.gathered and not scaled, scaled

    def forget_cleared(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Forget what was taken off parameters whose scaled gradients somebody has cleared since the delayed exit."""
        taken = self.backward.aside
        if taken:
            there = {id(param) for param, _ in pairs if own_grad(param) is not None}
            self.backward.aside = {key: aside for key, aside in taken.items() if key in there}

    def clear_found(self) -> None:
        """Forget the overflows of gradients that are gone; not with two passes: the first has moved weights by them."""
        if not self.two_passes:
            self.found.clear()

    def note_found(self, scaler: LossScaler, found_inf: Tensor) -> None:
        """Remember, on the device, that gradients of `scaler`'s loss went into the next step."""
        for index, (known, earlier) in enumerate(self.found):
            if known is scaler:
                self.found[index] = (scaler, torch.maximum(earlier, found_inf.to(earlier.device)))
                return
        self.found.append((scaler, found_inf))


def distinct_pairs(optimizers: Sequence[Any]) -> Sequence[tuple[Tensor, Tensor]]:
    """(param, master) of all the optimizers' parameters, one that several of them share once."""
    if len(optimizers) == 1:
        return known_stash(optimizers[0]).masters.of_groups(optimizers[0].param_groups).distinct
    return list(
        {
            id(param): (param, master)
            for optimizer in optimizers
            for param, master in known_stash(optimizer).masters.pairs(optimizer.param_groups)
        }.values()
    )


def note_sharing(optimizers: Sequence[Any]) -> None:
    """Tell each of a training's optimizers which of the others hold parameters of its own."""
    held = [
        (optimizer, stash, {id(param) for param, _ in stash.masters.pairs(optimizer.param_groups)})
        for optimizer in optimizers
        if (stash := stash_of(optimizer)) is not None
    ]
    for optimizer, stash, own in held:
        others = [other for other, _, params in held if other is not optimizer and not own.isdisjoint(params)]
        stash.neighbours.sharing = [weakref.ref(other) for other in others]


def siblings(stash: Stash) -> list[tuple[Any, Stash]]:
    """The optimizers of the training, this one among them, which are still in it."""
    return _still_in_training(stash.neighbours.siblings)


def sharing(stash: Stash) -> list[tuple[Any, Stash]]:
    """The other optimizers of the training that hold parameters of this one, which are still in it."""
    return _still_in_training(stash.neighbours.sharing) if stash.neighbours.sharing else []


def _still_in_training(refs: list[weakref.ref[Any]]) -> list[tuple[Any, Stash]]:
    alive = [optimizer for ref in refs if (optimizer := ref()) is not None]
    return [(optimizer, known) for optimizer in alive if (known := stash_of(optimizer)) is not None]


def overflowed(scalers: list[LossScaler], flags: list[float]) -> list[LossScaler]:
    """Those of the scalers whose flag is up; the others are told that the step was taken."""
    for scaler, flag in zip(scalers, flags, strict=True):
        if not flag:
            scaler.stepped()
    return [scaler for scaler, flag in zip(scalers, flags, strict=True) if flag]


def stash_of(optimizer: Any) -> Stash | None:
    """What amp_patch knows of `optimizer`; None where that went through no `initialize`."""
    return getattr(optimizer, _ATTRIBUTE, None)


def known_stash(optimizer: Any) -> Stash:
    """What amp_patch knows of `optimizer`, which went through `initialize`."""
    stash: Stash = getattr(optimizer, _ATTRIBUTE)
    return stash


def enabled_stash(optimizer: Any) -> Stash | None:
    """The stash of an optimizer whose training is enabled.

    None for a copy of such an optimizer, and for one inside of a ZeroRedundancyOptimizer.
    """
    stash = stash_of(optimizer)
    if not isinstance(stash, Stash) or not stash.enabled:
        return None
    owner = stash.neighbours.owner
    return stash if owner is not None and owner() is optimizer else None


def give_stash(optimizer: Any, stash: Stash) -> None:
    """Let `optimizer` have `stash`, in place of another if there is one."""
    setattr(optimizer, _ATTRIBUTE, stash)


def take_stash(optimizer: Any) -> None:
    """Undo `give_stash`."""
    delattr(optimizer, _ATTRIBUTE)


def name_parameters(stash: Stash, models: list[nn.Module]) -> None:
    """Give the stash the qualified names of the models' parameters, for its messages."""
    for index, model in enumerate(models):
        prefix = f"models[{index}]." if len(models) > 1 else ""
        for name, param in model.named_parameters():
            stash.neighbours.names.setdefault(id(param), prefix + name)
