"""One training, run twice: by amp_patch, and by hand with `reference_training.py`.

The training by hand has FP32 masters that torch's own optimizers step, weights cast by hand, scales and skips by hand,
and a forward and backward of its own with every cast written out.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from reference_model import CastByHand, Level, Stack, Weight, level_of
from reference_training import Owner, Scale, Trainer
from stories import Story
from torch import Tensor, nn
from torch_optimizers import RECIPES
from training import check, check_state

from amp_patch import amp
from amp_patch.masters.masters import has_gradient
from amp_patch.multi_tensor import backend
from amp_patch.training.training import scalers_of

# Step as if fused, whatever they were told, at levels with casts or masters.
IN_ONE_PASS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
Groups = list[list[tuple[float, list[str]]]]  # per optimizer and group the learning rate and the weights


@dataclass
class Saved:
    """A checkpoint of both trainings: the state dicts of amp_patch, and the values that they must contain."""

    groups: Groups
    ours: dict[str, Any]
    values: dict[str, Tensor]
    states: list[dict[str, Any]]
    scales: list[tuple[float, int]]
    schedules: list[dict[str, Any]]


class Life:
    """A model with its optimizers, trained by amp_patch and by hand.

    Args:
        stack: the model for amp_patch; FP32.
        saved: the values that are loaded into both.
        load: when into amp_patch's: "before" `initialize`, "after" it, or "between" the model's and the optimizers'.
    """

    def __init__(
        self,
        story: Story,
        options: dict[str, Any],
        groups: Groups,
        stack: Stack,
        saved: Saved | None = None,
        load: str = "after",
    ) -> None:
        self.story, self.groups, self.model = story, groups, stack
        self.copied = False  # whether `initialize` has never seen it
        self.held: list[tuple[Tensor, Weight]] = []  # tensors of the masters' memory
        self.live_by_hand(options, stack, stack.state_dict() if saved is None else saved.values)
        if saved is not None:
            self.load_by_hand(saved)
        params = dict(stack.named_parameters())
        self.optimizers = [
            RECIPES[kind]([{"params": [params[name] for name in names], "lr": lr} for lr, names in own])
            for kind, own in zip(story.optimizers, groups, strict=True)
        ]
        self.schedulers = scheduled(self.optimizers) if story.scheduled == "before" else []
        if saved is not None and load != "after":
            stack.load_state_dict(saved.ours["model"])
        if saved is not None and load == "before":
            self.load_optimizers(saved)
        self.initialize(options)
        if story.scheduled == "after":
            self.schedulers = scheduled(self.optimizers)
        if saved is not None and load == "after":
            stack.load_state_dict(saved.ours["model"])
        if saved is not None and load != "before":
            self.load_optimizers(saved)
        if saved is not None:
            self.load_rest(saved)

    # ------------------------------------------------------------------------------------------------------------------
    # Begin, and begin again

    def initialize(self, options: dict[str, Any]) -> None:
        losses = self.story.losses
        amp.initialize(self.model, self.optimizers, num_losses=losses, keep_fp32=is_kept, verbosity=0, **options)
        for scaler in scalers_of(self.optimizers, "a story"):
            scaler.growth_interval = self.story.interval

    def live_by_hand(self, options: dict[str, Any] | None, stack: Stack, values: dict[str, Tensor]) -> None:
        """Begin the training by hand with `values`. Without options it is in FP32, without amp_patch."""
        self.options = options
        self.level = Level() if options is None else level_of(options)
        plain = Stack(stack.kinds)
        plain.load_state_dict(values)
        trains = {name: param.requires_grad for name, param in stack.named_parameters()}
        for name, param in plain.named_parameters():
            param.requires_grad_(trains[name])
        held = {name for own in self.groups for _, names in own for name in names}
        self.net = CastByHand(plain, self.level, frozenset(self.story.kept), lambda name: name in held)
        weights = self.net.weights
        owners = [
            Owner(self._by_itself(kind), [(lr, [weights[name] for name in names]) for lr, names in own])
            for kind, own in zip(self.story.optimizers, self.groups, strict=True)
        ]
        scales = [Scale(self.level, self.story.interval) for _ in range(self.story.losses)]
        self.trainer = Trainer(self.level, [self.net], owners, scales)
        self.their_schedulers = scheduled([owner.optimizer for owner in owners]) if self.story.scheduled else []

    def live_on_by_hand(self, options: dict[str, Any] | None) -> None:
        """Begin the training by hand again with its present values, at another level. Gradients of an overflow go."""
        old, schedules, earlier = self.trainer, self.their_schedulers, self.net.weights
        self.settle(earlier.values())
        self.live_by_hand(options, self.model, self.values())
        weights = self.net.weights
        # If the type of a weight changes, the model is FP32 in between, and all weights in optimizers get masters.
        if all(weight.value.dtype is earlier[name].value.dtype for name, weight in weights.items()):
            for name, weight in weights.items():
                if weight.has_master and not (earlier[name].has_master or weight.value.requires_grad):
                    weight.put_off_master()
        for before, after in zip(old.owners, self.trainer.owners, strict=True):
            for group, known in zip(after.optimizer.param_groups, before.optimizer.param_groups, strict=True):
                group |= {name: value for name, value in known.items() if name not in ("params", "foreach", "fused")}
            state = after.optimizer.state
            for weight, other in zip(before.weights, after.weights, strict=True):
                if weight.master in before.optimizer.state:
                    state[other.master] = before.optimizer.state[weight.master]
                if weight.grad is not None and not before.overflowed:
                    other.grad = weight.grad.to(other.master.dtype)
            if any(is_of_another_type(value, master) for master in state for value in state[master].values()):
                after.optimizer.load_state_dict(after.optimizer.state_dict())
        for scheduler, known in zip(self.their_schedulers, schedules, strict=True):
            scheduler.load_state_dict(known.state_dict())

    def _by_itself(self, kind: str) -> Any:
        return partial(RECIPES[kind], **self._flags(kind))

    def _flags(self, kind: str) -> dict[str, Any]:
        recipe = RECIPES[kind]
        if recipe.func in IN_ONE_PASS and (self.level.masters or self.level.patches) and backend() == "cpp":
            return {"foreach": False, "fused": True}
        return {name: recipe.keywords[name] for name in ("foreach", "fused") if name in recipe.keywords}

    # ------------------------------------------------------------------------------------------------------------------
    # Checkpoints

    def save(self, by: str) -> Saved:
        ours: Any = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "amp": amp.state_dict(self.optimizers),
        }
        self.settle(self.net.weights.values())
        values = self.values()
        check_state(dict(ours["model"]), values)
        return Saved(
            copy.deepcopy(self.groups),
            copy.deepcopy(ours) if by == "memory" else reread(ours),
            values,
            [copy.deepcopy(owner.optimizer.state_dict()) for owner in self.trainer.owners],
            [(scale.value, scale.unskipped) for scale in self.trainer.scales],
            [copy.deepcopy(scheduler.state_dict()) for scheduler in self.their_schedulers],
        )

    def values(self) -> dict[str, Tensor]:
        """Return the state dict by hand, in FP32."""
        names = {id(param): name for name, param in self.model.named_parameters()}
        everything = self.model.named_parameters(remove_duplicate=False)
        found = {name: self.net.weights[names[id(param)]].fp32() for name, param in everything}
        buffers = {id(b): name for name, b in self.model.named_buffers()}
        by_hand = self.net.fp32_buffers()
        return found | {name: by_hand[buffers[id(b)]] for name, b in self.model.named_buffers(remove_duplicate=False)}

    def load(self, saved: Saved) -> None:
        """Load a checkpoint into the running training; gradients stay."""
        self.model.load_state_dict(saved.ours["model"])
        self.load_optimizers(saved)
        self.load_rest(saved)
        for name, weight in self.net.weights.items():
            with torch.no_grad():
                weight.held.copy_(saved.values[name])
            weight.publish()
        for name, buffer in self.net.buffers.items():
            buffer.copy_(saved.values[name])
            self.net.exact[name] = saved.values[name].clone()
        self.load_by_hand(saved)

    def load_optimizers(self, saved: Saved) -> None:
        for optimizer, state in zip(self.optimizers, saved.ours["optimizers"], strict=True):
            optimizer.load_state_dict(copy.deepcopy(state))

    def load_rest(self, saved: Saved) -> None:
        for scheduler, state in zip(self.schedulers, saved.ours["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        amp.load_state_dict(saved.ours["amp"], self.optimizers)

    def load_by_hand(self, saved: Saved) -> None:
        """Load optimizers, scales and schedules into the training by hand."""
        for kind, owner, state in zip(self.story.optimizers, self.trainer.owners, saved.states, strict=True):
            owner.optimizer.load_state_dict(copy.deepcopy(state))
            for group in owner.optimizer.param_groups:
                group |= dict.fromkeys(group.keys() & {"foreach", "fused"}) | self._flags(kind)
        for scale, values in zip(self.trainer.scales, saved.scales, strict=True):
            scale.value, scale.unskipped = values
        for scheduler, schedule in zip(self.their_schedulers, saved.schedules, strict=True):
            scheduler.load_state_dict(schedule)

    # ------------------------------------------------------------------------------------------------------------------
    # State of both trainings

    @property
    def waits(self) -> bool:
        return any(owner.waits_for is not None for owner in self.trainer.owners)

    @property
    def params(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    @property
    def pairs(self) -> list[tuple[nn.Parameter, Weight]]:
        return list(zip(self.params.values(), self.net.weights.values(), strict=True))

    @property
    def masters(self) -> list[tuple[Tensor, Weight]]:
        """Return the tensors in the optimizers, and their expected values."""
        return [
            pair
            for optimizer, owner in zip(self.optimizers, self.trainer.owners, strict=True)
            for pair in zip(amp.master_params(optimizer), owner.weights, strict=True)
        ]

    @property
    def unowned(self) -> list[tuple[Tensor, Weight]]:
        held = [weight for owner in self.trainer.owners for weight in owner.weights]
        return [(param, weight) for param, weight in self.pairs if not any(weight is other for other in held)]

    def settle(self, weights: Iterable[Weight]) -> None:
        for weight in weights:
            weight.settle()

    def check(self, *, look: bool = False) -> None:
        """Compare all that can be read without a side effect; gradients and split masters only if `look`."""
        for name, param in self.params.items():
            weight = self.net.weights[name]
            assert param.requires_grad == weight.value.requires_grad
            if weight.edited != "master":
                check(param.detach(), weight.value.detach(), name)
        for name, buffer in self.model.named_buffers():
            check(buffer, self.net.buffers[name], name)
        for optimizer, owner in zip(self.optimizers, self.trainer.owners, strict=True):
            both = zip(optimizer.param_groups, owner.optimizer.param_groups, strict=True)
            for group, theirs in both:
                assert len(group["params"]) == len(theirs["params"])
                check_state(settings(group), settings(theirs))
            for master, weight in zip(amp.master_params(optimizer), owner.weights, strict=True):
                states = [optimizer.state.get(master, {}), owner.optimizer.state.get(weight.master, {})]
                if weight.lacks_master:  # its state is low precision or FP32 until the master is made
                    states = [
                        {name: value.float() for name, value in state.items() if isinstance(value, Tensor)}
                        for state in states
                    ]
                check_state(*states)
        self._check_masters(look)
        if self.options is not None:
            scales = [{"loss_scale": scale.value, "unskipped": scale.unskipped} for scale in self.trainer.scales]
            assert list(amp.state_dict(self.optimizers).values()) == scales, scales
        if look:
            self._check_gradients()

    def _check_masters(self, look: bool) -> None:
        names = {id(weight): name for name, weight in self.net.weights.items()}
        param_of = {id(weight): param for param, weight in self.pairs}
        for master, weight in self.masters:
            low = getattr(master, "low_half", None)
            assert (low is not None) == (weight.low is not None)
            if weight.edited == "weight":
                continue
            if low is not None and not look:
                if weight.edited != "master":  # beside a weight of 0 it counts for nothing
                    zero = param_of[id(weight)].detach() == 0
                    check(low.masked_fill(zero, 0), weight.low.masked_fill(zero, 0), names[id(weight)])
                continue
            check(master.detach(), weight.held.detach(), names[id(weight)])
        for tensor, weight in self.held:
            if not weight.edited:
                check(tensor, weight.held.detach(), names[id(weight)])

    def _check_gradients(self) -> None:
        param_of = {id(weight): param for param, weight in self.pairs}
        for optimizer, owner in zip(self.optimizers, self.trainer.owners, strict=True):
            waits = owner.waits_for is not None
            for master, weight in zip(amp.master_params(optimizer), owner.weights, strict=True):
                param = param_of[id(weight)]
                if waits:
                    check(param.grad, weight.waiting)
                if weight.has_master or not waits:
                    grad = master.grad if has_gradient(master) else None  # else a step is done with it
                    check(grad, weight.grad)
                if not waits and weight.has_master:
                    assert param.grad is master.grad


def is_kept(name: str, module: nn.Module) -> bool:
    return getattr(module, "kept", False)


def is_of_another_type(value: Any, master: Tensor) -> bool:
    """Tell whether torch would cast this state of a parameter on loading, step counts excepted."""
    counts = not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() == 0
    return not counts and value.dtype is not master.dtype


def scheduled(optimizers: list[Any]) -> list[Any]:
    return [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for optimizer in optimizers]


def rescheduled(schedulers: list[Any], optimizers: list[Any]) -> list[Any]:
    """Return the schedulers again, for copies of their optimizers."""
    fresh = scheduled(optimizers) if schedulers else []
    for scheduler, known in zip(fresh, schedulers, strict=True):
        scheduler.load_state_dict(known.state_dict())
    return fresh


def reread(value: Any, *, weights_only: bool = True) -> Any:
    """Return the value after `torch.save` and `torch.load`."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=weights_only)


def settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a group, without the settings that choose between torch's implementations."""
    return {name: value for name, value in group.items() if name not in ("params", "foreach", "fused", "initial_lr")}
