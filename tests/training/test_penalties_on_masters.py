"""A penalty over masters in the loss: the gradients that backward leaves on masters directly are unscaled, once."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import DEVICES
from crossed import crossed
from small_trainings import x
from training import backward, linear

from amp_patch import amp

LEVELS = {
    "O1": {"opt_level": "O1", "loss_scale": 64.0},
    "O2": {"opt_level": "O2", "loss_scale": 64.0},
    "O2, dynamic": {"opt_level": "O2", "max_loss_scale": 256.0},
    "O2 in BF16": {"opt_level": "O2", "dtype": torch.bfloat16, "loss_scale": 64.0},
    "O5": {"opt_level": "O5"},
    "O5, checked": {"opt_level": "O5", "skip_nonfinite": True},
    "O5, split": {"opt_level": "O5", "master_weights": "split"},
    "O5, split and scaled": {"opt_level": "O5", "master_weights": "split", "loss_scale": 64.0},
}
CHECKED = [name for name in LEVELS if name not in ("O5", "O5, split")]
ROW = [1.0, -2.0]


class OwnSGD(torch.optim.SGD):
    """An optimizer whose gradients are made FP32 at each exit."""

    def step(self, closure=None):
        return super().step(closure)


OPTIMIZERS = {"deferred": torch.optim.SGD, "FP32": OwnSGD}


def start(level, count=1, cls=torch.optim.SGD, device="cpu"):
    """Return linear layers with their optimizers; `level` "plain" is torch alone."""
    models = [linear([ROW], device) for _ in range(count)]
    optimizers = [cls(model.parameters(), lr=0.25, momentum=0.5) for model in models]
    if level == "plain":
        return models, optimizers
    return amp.initialize(models, optimizers, verbosity=0, **LEVELS[level])


def stepped(*optimizers):
    return [param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]]


def loss_of(models, penalized, weight=0.25):
    inputs = x(0.25, 0.5, device=models[0].weight.device)
    output = sum(model(inputs).float().sum() for model in models)
    return output + weight * sum(param.square().sum() for param in penalized)


def run_backward(loss, optimizers, level, **options):
    if level == "plain":
        loss.backward()
    else:
        backward(loss, optimizers, **options)


def train(level, micro, delay, cls, device):
    """Return the gradients before each of three steps, and the weights after them."""
    (model,), (optimizer,) = start(level, 1, cls, device)
    seen = []
    for _ in range(3):
        optimizer.zero_grad()
        for index in range(micro):
            options = {"delay_unscale": delay and index < micro - 1}
            run_backward(loss_of([model], stepped(optimizer)), optimizer, level, **options)
        seen += [param.grad.tolist() for param in stepped(optimizer)]
        optimizer.step()
    return [*seen, *(param.tolist() for param in stepped(optimizer))]


@crossed({"level": list(LEVELS), "micro": [1, 3], "delay": [False, True], "way": list(OPTIMIZERS), "device": DEVICES})
def test_it_trains_as_in_plain_torch(level, micro, delay, way, device):
    expected = train("plain", micro, False, OPTIMIZERS[way], device)
    assert train(level, micro, delay, OPTIMIZERS[way], device) == expected


@crossed({"level": list(LEVELS), "way": list(OPTIMIZERS), "own": ["one", "both"]})
def test_the_penalty_may_be_over_the_masters_of_every_optimizer(level, way, own):
    """Also over those of an optimizer that this `scale_loss` was not given, which have a gradient already."""

    def train(level):
        models, optimizers = start(level, 2, OPTIMIZERS[way])
        for _ in range(2):
            for optimizer in optimizers:
                optimizer.zero_grad()
            run_backward(loss_of(models[1:], stepped(optimizers[1])), optimizers[1], level)
            given = optimizers if own == "both" else optimizers[0]
            run_backward(loss_of(models[:1], stepped(*optimizers)), given, level)
            for optimizer in optimizers:
                optimizer.step()
        return [param.tolist() for param in stepped(*optimizers)]

    assert train(level) == train("plain")


@crossed({"level": CHECKED, "way": list(OPTIMIZERS), "delay": [False, True]})
def test_an_overflow_in_the_penalty_skips_the_step(level, way, delay):
    (model,), (optimizer,) = start(level, 1, OPTIMIZERS[way])
    scale = amp.loss_scale(optimizer).item()
    bad = loss_of([model], []) + sum((param * math.inf).sum() for param in stepped(optimizer))
    backward(bad, optimizer, delay_unscale=delay)
    if delay:
        backward(loss_of([model], []), optimizer)
    optimizer.step()
    assert optimizer._amp_stash.step_skipped and [p.tolist() for p in stepped(optimizer)] == [[ROW]]
    assert amp.loss_scale(optimizer).item() == (scale / 2 if level == "O2, dynamic" else scale)
    optimizer.zero_grad()
    backward(loss_of([model], stepped(optimizer)), optimizer)
    optimizer.step()
    assert not optimizer._amp_stash.step_skipped
    assert [p.tolist() for p in stepped(optimizer)] == [[[0.8125, -1.875]]]


@crossed({"level": CHECKED, "way": list(OPTIMIZERS), "end": ["raises", "zero_grad", "model.zero_grad"]})
def test_earlier_gradients_are_restored_after_an_exception_and_can_be_cleared_in_the_body(level, way, end):
    (model,), (optimizer,) = start(level, 1, OPTIMIZERS[way])
    backward(loss_of([model], stepped(optimizer)), optimizer)
    loss_of([model], stepped(optimizer), weight=0.5).backward(inputs=stepped(optimizer))  # outside of all bodies
    earlier = [param.grad.tolist() for param in stepped(optimizer)]
    own = level == "O1"  # whose gradient outside is of the whole loss
    assert earlier == [[[2.0 if own else 1.75, -2.0 if own else -2.5]]]
    if end == "raises":
        with pytest.raises(KeyError), amp.scale_loss(loss_of([model], stepped(optimizer)), optimizer) as scaled:
            scaled.backward()
            raise KeyError
        assert [param.grad.tolist() for param in stepped(optimizer)] == earlier
        return
    with amp.scale_loss(loss_of([model], stepped(optimizer)), optimizer) as scaled:
        (optimizer if end == "zero_grad" else model).zero_grad()
        scaled.backward()
    assert [param.grad.tolist() for param in stepped(optimizer)] == [[[0.75, -0.5]]]


@crossed({"level": [name for name in LEVELS if name != "O1"], "way": list(OPTIMIZERS)})
def test_in_the_body_of_another_optimizer_gradients_are_read_and_stepped_as_before(level, way):
    models, optimizers = start(level, 2, OPTIMIZERS[way])
    for _ in range(2):  # the second exit has made the gradients FP32
        backward(loss_of(models[1:], stepped(optimizers[1])), optimizers[1])
    grads = [param.grad.tolist() for param in stepped(optimizers[1])]
    with amp.scale_loss(loss_of(models[:1], []), optimizers[0]) as scaled:
        assert [param.grad.tolist() for param in (*stepped(optimizers[1]), models[1].weight)] == 2 * grads
        scaled.backward()
        optimizers[1].step()
    assert [param.tolist() for param in stepped(optimizers[1])] == [[[0.625, -1.75]]]
    assert [param.grad.tolist() for param in stepped(optimizers[0])] == [[[0.25, 0.5]]]
