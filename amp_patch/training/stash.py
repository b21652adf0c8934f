"""What amp_patch knows of one optimizer, and of the others of its training."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from amp_patch.casts import regions
from amp_patch.masters import clipping
from amp_patch.masters.gradients import Earlier
from amp_patch.masters.of_optimizer import Masters
from amp_patch.policy import Policy
from amp_patch.support.device_numbers import DeviceNumbers
from amp_patch.training import ddp
from amp_patch.training.loss_scaler import LossScaler

_TRANSIENT = (
    "brought",
    "earlier",
    "handles",
    "models",
    "names",
    "owner",
    "prepared",
    "process_group",
    "quiet",
    "set_aside",
    "sharded",
    "sharing",
    "siblings",
    "spent",
    "step_frame",
    "stepped",
    "unowned",
    "wrappers",
)


class Pending:
    """Gradients that a delayed exit of `scale_loss` left scaled: by which scaler, and how much."""

    def __init__(self, scaler: LossScaler) -> None:
        self.scaler = scaler
        self.scaling = scaler.scales
        self.updates, self.edits = scaler.updates, scaler.edits
        # Where nothing is multiplied the scaler may have been loaded with a scale from a level that does.
        self.scale = scaler.scale_tensor.clone() if scaler.scales else torch.ones_like(scaler.scale_tensor)
        self.held_back = False  # whether some of them are inside of FSDP modules, out of reach
        self.local = False  # whether they wait for a DDP to reduce them, with later ones

    def has_scale_of(self, scaler: LossScaler) -> bool:
        """Whether `scaler` surely has this scale still; told on the host, without a sync."""
        moved = scaler.dynamic and self.updates != scaler.updates
        return self.scaler is scaler and not moved and self.edits == scaler.edits


@dataclass
class SkippedStep:
    """What a skipped step must find again afterwards."""

    grads: list[tuple[Tensor, Tensor]]
    group_values: list[dict[str, Any]]


class DeviceSkip:
    """What a step whose optimizer skipped on the device, or not, found; on its way to the host, without a sync."""

    def __init__(self, found: list[tuple[LossScaler, Tensor]]) -> None:
        self.scalers = [scaler for scaler, _ in found]
        flags = torch.stack([found_inf.reshape(()) for _, found_inf in found])
        self.overflow = flags.amax()
        self._flags = DeviceNumbers(flags)

    def here(self) -> bool:
        """Whether `read` needs no wait."""
        return self._flags.here()

    def read(self) -> list[LossScaler]:
        """The scalers whose losses overflowed; waits for the device if it must. Tells the others that they stepped."""
        return overflowed(self.scalers, self._flags.read())


@dataclass
class Stash:
    """Everything amp_patch knows of one optimizer: `optimizer._amp_stash`.

    Attributes:
        policy: of the training that the optimizer belongs to.
        scalers: one `LossScaler` for each `loss_id` of that training, shared by its optimizers.
        enabled: False after `initialize(enabled=False)`: every call passes through.
        masters: the pairs of parameters and masters.
        pending: set while the model's gradients are still scaled (`delay_unscale=True`).
        earlier: by id the unscaled gradients of parameters that are their own master, taken away while a body runs;
            where the exit was delayed, what of them no scaled gradient can hold.
        keeps_scaled_gradients: whether low-precision gradients stay on the model, scaled, when masters have got them.
    """

    keeps_scaled_gradients: ClassVar[bool] = False
    turns: ClassVar[int] = 0  # how often a body of any optimizer of the process has begun or ended

    policy: Policy
    scalers: list[LossScaler]
    enabled: bool = True
    masters: Masters = field(default_factory=Masters)
    pending: Pending | None = None
    earlier: dict[int, Earlier] = field(default_factory=dict)
    last_skipped: bool = False  # of the last step that is no verdict
    # Of steps that skipped on the device or did not: the newest last.
    verdicts: list[DeviceSkip] = field(default_factory=list)
    # id of a master -> how much state the optimizer had of it after a step that the host knows was taken.
    stepped: dict[int, int] = field(default_factory=dict)
    # Per scaler what its backward passes found since the last step, on the device.
    found: list[tuple[LossScaler, Tensor]] = field(default_factory=list)
    told: bool = False  # whether the optimizer has the overflow flag of the step that is running
    step_depth: int = 0
    prepared: bool = False  # whether the pre-hook has done its part: what moves a master from then on is the step
    step_frame: FrameType | None = None  # the call of `step` that is running, if it has not been left by an exception
    open: bool = False  # whether a `scale_loss` body of this optimizer is running
    scale: Tensor | None = None  # that body's
    scaling: bool = False  # whether that body's loss is multiplied
    # Which bodies of the training's other optimizers are running; whether their losses are multiplied.
    beside: dict[int, bool] = field(default_factory=dict)
    bodies: int = 0  # how many were begun
    ended: int = -1  # `turns` when the last has ended
    cleared: int = 0  # how often `zero_grad` was called
    wrapped: bool = False  # whether something around the optimizer may look at gradients after its step
    spent: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # masters, and gradients left for the wrapper
    two_passes: bool = False  # whether weights are moved between backward and step, by a wrapper such as SAM
    wrappers: list[weakref.ref[Any]] = field(default_factory=list)  # those that were given a class
    left: set[int] = field(default_factory=set)  # ids of the parameters whose gradients were kept on the model
    gathered: bool = False  # whether a backward has brought gradients since the last step
    brought: TensorWeakRef | None = None  # the first gradient that `scale_loss` has left unscaled for the next step
    unowned: list[Tensor] = field(default_factory=list)  # the models' trainable parameters that no optimizer holds
    set_aside: SkippedStep | None = None
    names: dict[int, str] = field(default_factory=dict)  # id(param) -> qualified name, for messages
    siblings: list[Any] = field(default_factory=list)  # weak references to the training's optimizers
    sharing: list[Any] = field(default_factory=list)  # to those others that hold parameters of this one
    models: list[weakref.ref[nn.Module]] = field(default_factory=list)  # those that have parameters of this optimizer
    process_group: Any = None
    sharded: list[Any] = field(default_factory=list)  # weak references to the FSDP modules of its parameters
    handles: list[Any] = field(default_factory=list)
    owner: weakref.ref[Any] | None = None  # the optimizer
    quiet: regions.region | None = None  # the region without casts that a running step is in

    @property
    def step_skipped(self) -> bool:
        """Whether the last `optimizer.step()` was skipped because of an overflow.

        Syncs with the device where the optimizer skips there (`skips_on_device`), else not.
        """
        self.hear(wait=True)
        return self.last_skipped

    @step_skipped.setter
    def step_skipped(self, skipped: bool) -> None:
        self.hear(wait=True)
        self.last_skipped = skipped

    def hear(self, *, wait: bool = False) -> None:
        """Take note of the verdicts that have arrived; of all of them if `wait`, which syncs."""
        while self.verdicts and (wait or self.verdicts[0].here()):
            overflowed = self.verdicts.pop(0).read()
            self.last_skipped = bool(overflowed)
            for scaler in overflowed:
                scaler.skipped(lambda: "not known, the step was skipped on the device")

    @property
    def scales_loss(self) -> bool:
        """Whether any loss of the training is multiplied."""
        return any(scaler.scales for scaler in self.scalers)

    def __getstate__(self) -> dict[str, Any]:
        self.hear(wait=True)
        return {name: value for name, value in vars(self).items() if name not in _TRANSIENT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(
            state,
            handles=[],
            owner=None,
            quiet=None,
            brought=None,
            siblings=[],
            models=[],
            sharded=[],
            sharing=[],
            unowned=[],
            wrappers=[],
            spent=[],
            process_group=None,
            names={},
            set_aside=None,
            left=set(),  # ids of another process
            earlier={},
            ended=-1,
            stepped={},
            told=False,
            step_depth=0,
            prepared=False,
            step_frame=None,
            open=False,
            scale=None,
            scaling=False,
            beside={},
        )
        if self.policy.master_weights:
            clipping.install()  # this may be another process
            ddp.install()

    def forget_cleared(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Of gradients that a delayed exit left scaled, those that were set to None since take their rest with them."""
        if self.earlier:
            there = {id(param) for param, _ in pairs if param.grad is not None}
            self.earlier = {key: earlier for key, earlier in self.earlier.items() if key in there}

    def clear_found(self) -> None:
        """The gradients that overflowed are gone: forget it, unless weights were moved by them, for the next ones."""
        if not self.two_passes:
            self.found.clear()

    def note_found(self, scaler: LossScaler, found_inf: Tensor) -> None:
        """Remember, on the device, that gradients of `scaler`'s loss went into the next step."""
        for index, (known, earlier) in enumerate(self.found):
            if known is scaler:
                self.found[index] = (scaler, torch.maximum(earlier, found_inf.to(earlier.device)))
                return
        self.found.append((scaler, found_inf))


def distinct_pairs(optimizers: Sequence[Any]) -> list[tuple[Tensor, Tensor]]:
    """(param, master) of all the optimizers' parameters, one that several of them share once."""
    return list(
        {
            id(param): (param, master)
            for optimizer in optimizers
            for param, master in optimizer._amp_stash.masters.pairs(optimizer.param_groups)
        }.values()
    )


def note_sharing(optimizers: Sequence[Any]) -> None:
    """Let the optimizers of a training know which others hold parameters of theirs."""
    held = [
        (optimizer, stash, {id(param) for param, _ in stash.masters.pairs(optimizer.param_groups)})
        for optimizer in optimizers
        if (stash := stash_of(optimizer)) is not None
    ]
    for optimizer, stash, own in held:
        stash.sharing = [weakref.ref(o) for o, _, params in held if o is not optimizer and not own.isdisjoint(params)]


def sharing(stash: Stash) -> list[tuple[Any, Stash]]:
    """The other optimizers of the training that hold parameters of this one, which are still in it."""
    alive = [other for ref in stash.sharing if (other := ref()) is not None]
    return [(other, known) for other in alive if (known := stash_of(other)) is not None]


def drop_spent(stash: Stash) -> None:
    """Set the gradients to None that `consume` left for a wrapper, where they are still there.

    Those that it left to others which share masters too: this optimizer would add to them, or step with them.
    """
    for holder in (stash, *(known for _, known in sharing(stash))):
        for master, grad in holder.spent:
            if master.grad is grad:
                master.grad = None
        holder.spent = []


def overflowed(scalers: list[LossScaler], flags: list[float]) -> list[LossScaler]:
    """Those of the scalers whose flag is up; the others are told that the step was taken."""
    for scaler, flag in zip(scalers, flags, strict=True):
        if not flag:
            scaler.stepped()
    return [scaler for scaler, flag in zip(scalers, flags, strict=True) if flag]


def stash_of(optimizer: Any) -> Stash | None:
    return getattr(optimizer, "_amp_stash", None)


def name_parameters(stash: Stash, models: list[nn.Module]) -> None:
    """Give the stash the qualified names of the models' parameters, for its messages."""
    for index, model in enumerate(models):
        prefix = f"models[{index}]." if len(models) > 1 else ""
        for name, param in model.named_parameters():
            stash.names.setdefault(id(param), prefix + name)
