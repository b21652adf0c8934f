"""find_loss_scale: ranges of known gradients, and trainings at their ends."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import training
from conftest import DEVICES
from torch.nn import functional as F

from amp_patch import amp

LEVELS = ("O1", "O2", "O3")


def total(output, weight):
    return (output.float() * weight).sum()


def one_layer(level, device, **options):
    model = training.linear([[1.0, 1.0]], device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return amp.initialize(model, optimizer, opt_level=level, **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", LEVELS)
def test_the_range_of_loss_scales_fits_known_gradients(level, device):
    """The gradients are (2**-20, 1): times 2**15 is the most that FP16 holds, 2**-4 brings the small one to 2**-24."""
    model, _ = one_layer(level, device)
    inputs = torch.tensor([[2.0**-20, 1.0]], device=device)
    assert amp.find_loss_scale(model, total, (inputs, torch.ones((), device=device))) == (2.0**-4, 2.0**15)


@pytest.mark.parametrize("device", DEVICES)
def test_find_loss_scale_changes_no_weight_gradient_or_random_state(device):
    model = training.convnet(device=device)
    model.head = torch.nn.Sequential(torch.nn.Dropout(0.5), model.head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
    batch = training.images(0, device)
    for param in amp.master_params(optimizer):
        param.grad = torch.ones_like(param)
    before, random = training.weights(model), torch.random.get_rng_state()
    found = amp.find_loss_scale(model, F.cross_entropy, batch)
    assert training.same(before, training.weights(model))
    assert torch.equal(random, torch.random.get_rng_state())
    assert all(bool((param.grad == 1).all()) for param in amp.master_params(optimizer))
    assert all(param.grad is None for param in model.parameters() if param.dtype is torch.float16)
    assert found.lowest < found.highest


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", LEVELS)
def test_the_highest_scale_trains_and_its_double_overflows(level, device):
    def skipped(factor):
        model = training.convnet(device=device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
        scale = amp.find_loss_scale(model, F.cross_entropy, training.images(0, device)).highest * factor
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=scale, verbosity=0)
        before = training.masters_of(optimizer)
        training.train(model, optimizer, 1, partial(training.images, device=device))
        return training.same(training.masters_of(optimizer), before)

    assert not skipped(1.0)
    assert skipped(2.0)


def test_find_loss_scale_refuses_bad_input_by_name():
    model, _ = one_layer("O2", "cpu")
    with pytest.raises(TypeError, match="find_loss_scale: batch is a Tensor"):
        amp.find_loss_scale(model, total, torch.ones(2))
    inputs = torch.ones(1, 2)
    with pytest.raises(ValueError, match=r"find_loss_scale: the loss has shape \[1, 1\] and values \[\[inf\]\]"):
        amp.find_loss_scale(model, lambda y, w: y * w, (inputs, float("inf")))
    with pytest.raises(ValueError, match="overflows even at a loss scale"):
        amp.find_loss_scale(model, total, (inputs, 2.0**100))
    with pytest.raises(TypeError, match="loss_fn returned a float; wanted a tensor"):
        amp.find_loss_scale(model, lambda y, w: y.sum().item(), (inputs, 1.0))
    with pytest.raises(ValueError, match="the loss does not depend on a parameter"):
        amp.find_loss_scale(model, lambda y, w: y.detach().sum(), (inputs, 1.0))
    with torch.no_grad(), pytest.raises(ValueError, match="grad mode off"):
        amp.find_loss_scale(model, total, (inputs, 1.0))
    with pytest.raises(ValueError, match="find_loss_scale: no parameter of Linear requires grad"):
        amp.find_loss_scale(model.requires_grad_(False), total, (inputs, 1.0))
    with pytest.raises(ValueError, match=r"this Linear is FP32 and not initialized.*give it a level first"):
        amp.find_loss_scale(torch.nn.Linear(2, 1), total, (inputs, 1.0))
    with pytest.raises(TypeError, match="find_loss_scale: model is a function"):
        amp.find_loss_scale(total, total, (inputs, 1.0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", [*LEVELS, "O4", "O5"])
@pytest.mark.parametrize("size", [-30, -8, 0, 12])
@pytest.mark.filterwarnings("ignore:.* has whole numbers alone")  # the inputs are small integers times 2**size
def test_the_range_of_loss_scales_equals_that_of_trying_every_scale(size, level, device):
    """The gradients are the inputs, of 11 bits, times a power of two: FP16 rounds them only at its ends."""
    generator = torch.Generator().manual_seed(abs(size))
    inputs = torch.randint(-2047, 2048, (1, 2), generator=generator) * 2.0 ** torch.randint(
        -20, 4, (1, 2), generator=generator
    )
    inputs = inputs.where(inputs != 0, 1.0)
    model, _ = one_layer(level, device)
    dtype = torch.bfloat16 if level in ("O4", "O5") else torch.float16

    def gradients(power):  # the gradients of the layer's output and of its weight
        weight = torch.tensor([[2.0 ** (size + power)]]).to(dtype)
        return torch.cat([weight, (weight.double() * inputs.to(dtype)).to(dtype)], 1)

    found = amp.find_loss_scale(model, total, (inputs.to(device), torch.tensor(2.0**size, device=device)))
    powers = range(-24, 121)
    highest = max(power for power in powers if gradients(power).isfinite().all())
    lowest = min(power for power in powers if gradients(power)[:, 1:].all())
    assert found == (2.0**lowest, 2.0**highest)
    assert found.lowest <= found.highest


def test_the_range_of_loss_scales_is_printed_as_powers_of_two():
    model, _ = one_layer("O2", "cpu")
    found = amp.find_loss_scale(model, total, (torch.tensor([[2.0**-20, 1.0]]), torch.ones(())))
    assert str(found) == "loss scales from 2**-4 (0.0625) to 2**15 (32768)"


def test_a_loss_of_another_tensor_than_the_parameters_is_refused():
    """It requires a gradient, and none of the model's parameters has one."""
    model = amp.initialize(torch.nn.Linear(2, 1), opt_level="O2", verbosity=0)
    other = torch.ones((), requires_grad=True)
    with pytest.raises(ValueError, match="does not depend on a parameter that requires grad"):
        amp.find_loss_scale(model, lambda output, target: 2 * other, (torch.ones(4, 2), torch.ones(4, 1)))
