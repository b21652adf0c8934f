"""torch.set_default_dtype and set_default_device are for tensors that the script makes: those of a training stay.

Each story is told twice, without a default and with one, about a model and batches that are there before it. The
first telling is the oracle of the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch_optimizers
import training
from conftest import DEVICES
from crossed import crossed
from torch import Tensor, nn
from training import backward

from amp_patch import amp
from amp_patch.apex import amp as apex_amp

F = nn.functional
DEFAULTS = [torch.float64, torch.bfloat16, torch.float16]
OPTIM = torch.optim

# Torch's own, in one pass, in portions and by itself; Apex's.
MAKERS = {**torch_optimizers.MAKERS, "RMSprop": lambda p: OPTIM.RMSprop(p, lr=1e-2, eps=1e-4)}

# Of initialize.
TRAININGS: dict[str, dict[str, Any]] = {
    **{level: {"opt_level": level} for level in training.LEVELS},
    "O2 in BF16": {"opt_level": "O2", "dtype": torch.bfloat16},
    "O1 in BF16, scaled": {"opt_level": "O1", "dtype": torch.bfloat16, "loss_scale": "dynamic"},
    "O5, scaled": {"opt_level": "O5", "loss_scale": 128.0},
    "O2, split": {"opt_level": "O2", "dtype": torch.bfloat16, "master_weights": "split", "loss_scale": "dynamic"},
    "O5, split": {"opt_level": "O5", "master_weights": "split"},
    "O5, stochastic": {"opt_level": "O5", "master_weights": "stochastic"},
}


@contextmanager
def default(dtype: torch.dtype = torch.float32, device: str | None = None) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)


class Told:
    """A model, what else a story needs, and what it comes to."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.model = training.convnet(device=device)
        self.batches = [training.images(step, device) for step in range(6)]

    def loss(self, step: int) -> Tensor:
        inputs, targets = self.batches[step]
        return F.cross_entropy(self.model(inputs), targets)

    def of(self, story: Callable[[Told], Any], **given: Any) -> Any:
        with default(**given):
            told = story(self)
        amp.restore()
        return told


def same_story(story: Callable[[Told], Any], where: str, **given: Any) -> None:
    wanted = Told(where).of(story)
    training.assert_unchanged(wanted, Told(where).of(story, **given))


def trained(told: Told, maker: Callable[[Any], Any], **options: Any) -> Any:
    """Two micro-batches a step, of which the third step's overflow, clipping, a checkpoint in between."""
    optimizer = maker(told.model.parameters())
    model, optimizer = amp.initialize(told.model, optimizer, verbosity=0, **options)
    scaled = "loss_scale" in options or (options.get("opt_level") in ("O1", "O2") and "dtype" not in options)
    losses = []
    for step in range(6):
        optimizer.zero_grad()
        for half in range(2):
            inputs, targets = (part[4 * half :][:4] for part in told.batches[step])
            loss = F.cross_entropy(model(inputs), targets) * (torch.inf if scaled and step == 2 else 1)
            backward(loss, optimizer)
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.5)
        optimizer.step()
        if step == 3:
            states = model.state_dict(), amp.state_dict()
            model.load_state_dict(states[0])
            amp.load_state_dict(states[1])
    masters = [p.detach().clone() for p in amp.master_params(optimizer)]
    return losses, training.weights(model), masters, amp.state_dict(), amp.loss_scale(optimizer)


@pytest.mark.parametrize("device", DEVICES)
@crossed({"options": TRAININGS, "dtype": DEFAULTS[:2]}, meet=1)
def test_a_training_is_that_without_a_default_type(options, dtype, device):
    same_story(lambda told: trained(told, MAKERS["SGD"], **options), device, dtype=dtype)


@pytest.mark.parametrize("device", DEVICES)
@crossed(
    {
        "maker": MAKERS,
        "dtype": DEFAULTS[:2],
        "options": {name: TRAININGS[name] for name in ("O1", "O2", "O5, split")},
    },
    meet=1,
)
def test_each_optimizer_is_that_without_a_default_type(maker, dtype, options, device):
    same_story(lambda told: trained(told, maker, **options), device, dtype=dtype)


@crossed({"options": TRAININGS, "name": ["SGD", "FusedAdam", "FusedLAMB"]}, meet=1)
def test_a_training_is_where_its_model_is(name, options):
    """Nothing can be read of a tensor on "meta". (torch's Adam counts its steps on the default device.)"""
    same_story(lambda told: trained(told, MAKERS[name], **options), "cpu", device="meta")


# ----------------------------------------------------------------------------------------------------------------------
# GradScaler, Apex's interfaces


def with_a_grad_scaler(told: Told) -> Any:
    scaler = amp.GradScaler(told.device, init_scale=1024.0, growth_interval=2)
    optimizer = MAKERS["SGD, foreach"](told.model.parameters())
    found = []
    for step in range(6):
        optimizer.zero_grad()
        with amp.autocast(told.device, dtype=torch.float16):
            loss = told.loss(step) * (torch.inf if step == 2 else 1)
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            found.append(nn.utils.clip_grad_norm_(told.model.parameters(), 0.5))
        scaler.step(optimizer)
        scaler.update()
        found += [loss.detach(), scaler.get_scale()]
    return found, training.weights(told.model), scaler.state_dict()


def with_a_grad_scaler_and_masters(told: Told) -> Any:
    model, optimizer = amp.initialize(told.model, MAKERS["SGD"](told.model.parameters()), opt_level="O2", loss_scale=1)
    scaler = amp.GradScaler(told.device, init_scale=1024.0)
    for step in range(6):
        optimizer.zero_grad()
        scaler.scale(told.loss(step) * (torch.inf if step == 2 else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
    return training.weights(model), scaler.state_dict()


def with_apexs_names(told: Told) -> Any:
    optimizer = MAKERS["SGD"](told.model.parameters())
    model, optimizer = apex_amp.initialize(told.model, optimizer, opt_level="O2", verbosity=0)
    for step in range(6):
        loss = told.loss(step) * (torch.inf if step == 2 else 1)
        with apex_amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return training.weights(model), apex_amp.state_dict()


# ----------------------------------------------------------------------------------------------------------------------
# What is asked about a training


def looked_at(told: Told) -> Any:
    model, optimizer = amp.initialize(told.model, MAKERS["SGD"](told.model.parameters()), opt_level="O2", verbosity=0)
    with amp.inspect(model, optimizer) as seen, amp.record(activations=True) as run:
        for step in range(3):
            training.backward(told.loss(step) * (torch.inf if step == 1 else 1), optimizer)
            optimizer.step()
            optimizer.zero_grad()
    gradients = {name: histogram.counts for name, histogram in seen.gradients.items()}
    safe = amp.find_loss_scale(model, F.cross_entropy, told.batches[4])
    copied = training.weights(amp.fp32_copy(model))
    return str(seen), gradients, run.loss, run.scale, run.skipped, run.activations, tuple(safe), copied


STORIES = [
    with_a_grad_scaler,
    with_a_grad_scaler_and_masters,
    with_apexs_names,
    looked_at,
]


@pytest.mark.parametrize("device", DEVICES)
@crossed({"story": STORIES, "dtype": DEFAULTS}, meet=1)
def test_a_default_type_changes_no_story(story, dtype, device):
    same_story(story, device, dtype=dtype)


@pytest.mark.parametrize("story", STORIES)
def test_a_default_device_changes_no_story(story):
    same_story(story, "cpu", device="meta")


@pytest.mark.parametrize("dtype", DEFAULTS)
def test_layer_norms_are_of_the_default_type_as_torchs_are(dtype):
    from amp_patch.apex.normalization import FusedLayerNorm

    with default(dtype):
        assert FusedLayerNorm(3).weight.dtype is nn.LayerNorm(3).weight.dtype is dtype
