"""What may happen to a training, beside each level, way to step and optimizer: it goes on to the bit as without it.

Copies and pickles of model and optimizer together, checkpoints loaded before and after `initialize`, skipped steps,
interrupts, `restore`: each row of EVENTS gives what goes on, with weights, masters, state, buffers and scale as of a
training that nothing has happened to.
"""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import coded_states
import torch
import training
from crossed import crossed
from torch import nn
from torch_optimizers import MAKERS, VARIANTS, made, of_sparse_gradients, one_step
from training import assert_unchanged, snapshot, through_pickle, through_torch

from amp_patch import amp


class Pair(NamedTuple):
    model: nn.Module
    optimizer: Any


class Training:
    """Functions that make a new training, before `initialize`, and that continue a training."""

    def __init__(self, make: Callable[[], Pair], step: Callable[[Any, Any, float], None], **options: Any) -> None:
        self.make, self.step, self.options = make, step, {"loss_scale": "dynamic", "verbosity": 0} | options

    def start(self) -> Pair:
        return self.enter(self.make())

    def enter(self, pair: Pair) -> Pair:
        return Pair(*amp.initialize(*pair, **self.options))

    def go_on(self, pair: Pair, steps: int = 2) -> Pair:
        for _ in range(steps):
            self.step(*pair, 1.0)
        return pair


def scales(pair: Pair) -> Any:
    return amp.state_dict(pair.optimizer)


def saved(pair: Pair) -> dict[str, Any]:
    file = io.BytesIO()
    states = {"model": pair.model.state_dict(), "optimizer": pair.optimizer.state_dict(), "scales": scales(pair)}
    torch.save(states, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def load(pair: Pair, states: dict[str, Any]) -> None:
    pair.model.load_state_dict(states["model"])
    pair.optimizer.load_state_dict(states["optimizer"])


# ---------------------------------------------------------------------------------------------------------------------
# Events: (how it is made and stepped, a training under way) -> what goes on


def copied(duplicate: Callable[[Any], Any]) -> Callable[[Training, Pair], Pair]:
    def event(kind: Training, pair: Pair) -> Pair:
        before, twin, other = all_of(pair), Pair(*duplicate(tuple(pair))), Pair(*duplicate(tuple(pair)))
        types = [[type(master) for master in amp.master_params(each.optimizer)] for each in (pair, twin)]
        assert types[0] == types[1]
        masters = [master.float() for master in training.masters_of(kind.go_on(other).optimizer)]
        assert training.same([param.detach() for param in copy.deepcopy(other.model).parameters()], masters)
        assert_unchanged(before, all_of(pair))
        return twin

    return event


def optimizer_first(duplicate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda pair: duplicate(pair[::-1])[::-1]


def resumed(kind: Training, pair: Pair) -> Pair:
    states, fresh = saved(pair), kind.start()
    kind.go_on(fresh, 1)
    load(fresh, states)
    amp.load_state_dict(states["scales"], fresh.optimizer)
    return fresh


def resumed_last_first(kind: Training, pair: Pair) -> Pair:
    states, fresh = saved(pair), kind.start()
    amp.load_state_dict(states["scales"], fresh.optimizer)
    fresh.optimizer.load_state_dict(states["optimizer"])
    fresh.model.load_state_dict(states["model"])
    return fresh


def resumed_before(kind: Training, pair: Pair) -> Pair:
    states, fresh = saved(pair), kind.make()
    load(fresh, states)
    fresh = kind.enter(fresh)
    amp.load_state_dict(states["scales"], fresh.optimizer)
    return fresh


def skipped(kind: Training, pair: Pair) -> Pair:
    before = scales(pair)
    pair.model.eval()  # else batch norms would count the batch
    kind.step(*pair, math.inf)
    pair.model.train()
    assert pair.optimizer._amp_stash.step_skipped
    assert scales(pair)["loss_scaler0"]["loss_scale"] == before["loss_scaler0"]["loss_scale"] / 2
    amp.load_state_dict(before, pair.optimizer)
    return pair


def interrupted_in_backward(kind: Training, pair: Pair) -> Pair:
    pair.optimizer.zero_grad()
    loss = sum(param.float().sum() for param in pair.model.parameters())
    with suppress(KeyboardInterrupt), amp.scale_loss(loss, pair.optimizer) as scaled_loss:
        scaled_loss.backward()
        raise KeyboardInterrupt
    grads = [param.grad for param in (*pair.model.parameters(), *amp.master_params(pair.optimizer))]
    assert not any(grad is not None and grad.any() for grad in grads)
    return pair


def interrupted_before_the_step(kind: Training, pair: Pair) -> Pair:
    """In a pre-hook of the user's: the gradients are there, and are cleared."""
    before = scales(pair)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = pair.optimizer.register_step_pre_hook(interrupt)
    pair.model.eval()
    with suppress(KeyboardInterrupt):
        kind.step(*pair, 1.0)
    pair.model.train()
    handle.remove()
    amp.load_state_dict(before, pair.optimizer)
    return pair


def initialized_again(kind: Training, pair: Pair) -> Pair:
    before = scales(pair)
    pair = kind.enter(pair)
    amp.load_state_dict(before, pair.optimizer)
    return pair


def restored(kind: Training, pair: Pair) -> Pair:
    before, plain = scales(pair), kind.make()
    masters = [master.float() for master in training.masters_of(pair.optimizer)]
    amp.restore()
    assert training.same([param.detach() for param in pair.model.parameters()], masters)
    assert (type(pair.model), type(pair.optimizer)) == (type(plain.model), type(plain.optimizer))
    assert all(p.dtype is torch.float32 and type(p) is nn.Parameter for p in pair.model.parameters())
    pair = kind.enter(pair)
    amp.load_state_dict(before, pair.optimizer)
    return pair


EVENTS: dict[str, Callable[[Training, Pair], Pair]] = {
    "deepcopy": copied(copy.deepcopy),
    "deepcopy, optimizer first": copied(optimizer_first(copy.deepcopy)),
    "pickle": copied(through_pickle),
    "torch.save": copied(optimizer_first(through_torch)),
    "resumed": resumed,
    "resumed, loaded last first": resumed_last_first,
    "resumed, loaded before initialize": resumed_before,
    "skipped": skipped,
    "interrupted in backward": interrupted_in_backward,
    "interrupted before the step": interrupted_before_the_step,
    "initialized again": initialized_again,
    "restored": restored,
}


def all_of(pair: Pair) -> Any:
    """Return copies of weights, masters, the optimizer's state and groups, state dict, buffers and scales."""
    return [*snapshot(*pair), training.weights(pair.model), scales(pair)]


def assert_goes_on(kind: Training, event: Callable[[Training, Pair], Pair]) -> None:
    wanted = all_of(kind.go_on(kind.go_on(kind.start())))
    amp.restore()
    assert_unchanged(wanted, all_of(kind.go_on(event(kind, kind.go_on(kind.start())))))


class Own(torch.optim.Adagrad):
    """An optimizer that a script defines: only its own `step` steps it, and a pickle has its importable name."""


WAYS = {
    "one pass": MAKERS["AdamW, fused"],
    # Not NAdam: torch loads its `mu_product` in the type of the weights, FP16 at O3.
    "portions": lambda params: torch.optim.RMSprop(params, lr=1e-2, eps=1e-4, momentum=0.9, foreach=True),
    "its own way": lambda params: Own(params, lr=1e-2, eps=1e-4),
    "ours": MAKERS["FusedSGD"],
}
OPTIONS: dict[str, dict[str, Any]] = {level: {"opt_level": level} for level in training.LEVELS}
OPTIONS |= {form: {"opt_level": "O5", "master_weights": form} for form in ("split", "stochastic")}


def train_step(model: nn.Module, optimizer: Any, factor: float) -> None:
    images, classes = training.images(0)
    optimizer.zero_grad()
    training.backward(nn.functional.cross_entropy(model(images).float(), classes) * factor, optimizer)
    optimizer.step()


def of_convnets(make: Callable[[Any], Any], **options: Any) -> Training:
    def fresh() -> Pair:
        model = training.convnet()
        return Pair(model, make(model.parameters()))

    return Training(fresh, train_step, **options)


@crossed({"options": OPTIONS, "make": WAYS, "event": EVENTS})
def test_a_training_at_any_level_goes_on_as_if_nothing_had_been(options, make, event):
    assert_goes_on(of_convnets(make, **options), event)


@crossed({"make": MAKERS, "event": EVENTS}, meet=1)
def test_with_any_of_our_optimizers(make, event):
    assert_goes_on(of_convnets(make, opt_level="O2"), event)


@of_sparse_gradients
@crossed({"name, flags": VARIANTS, "event": EVENTS}, meet=1)
def test_with_any_optimizer_of_torch(name, flags, event):
    assert_goes_on(Training(lambda: Pair(*made(name, flags)), one_step, opt_level="O2"), event)


def coded_step(model: nn.Module, optimizer: Any, factor: float) -> None:
    optimizer.zero_grad()
    training.backward(coded_states.loss_of(model, 0) * factor, optimizer)
    optimizer.step()
    assert coded_states.coded(optimizer)


CODED = [f"{level}+8bit" for level in ("O1", "O2", "O5+split", "O5+stochastic")]


@crossed({"level": CODED, "make": coded_states.MAKERS, "event": EVENTS})
def test_with_state_in_eight_bits(level, make, event):
    def fresh() -> Pair:
        model = coded_states.net()
        return Pair(model, make(model.parameters()))

    assert_goes_on(Training(fresh, coded_step, opt_level=level), event)
