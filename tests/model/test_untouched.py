"""O0 is the script without amp_patch: models keep their own classes."""

from __future__ import annotations

import pytest
import torch
import training
from torch import nn
from training import ADAM, backward, convnet, images, linear

from amp_patch import amp


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.seen = None

    def forward(self, x):
        self.seen = type(self) is Model
        return torch.softmax(self.inner(x), -1)


class Own(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


def start_o0(model=None, make=Own, **options):
    model = Model() if model is None else model
    return amp.initialize(model, make(model.parameters(), lr=0.1), opt_level="O0", **options)


def test_a_model_keeps_its_own_class_and_nothing_of_it_is_left():
    model, optimizer = start_o0(keep_fp32="inner", methods=("forward",))
    before = set(vars(Model())), set(vars(Own(Model().parameters(), lr=0.1)))
    backward(model(torch.ones(1, 2))[0, 0], optimizer)
    optimizer.step()
    assert type(model) is Model and model.seen and type(model.inner) is nn.Linear
    assert isinstance(optimizer, Own) and set(vars(model)) == before[0]
    (ours,) = set(vars(optimizer)) - before[1]
    amp.restore()
    assert "_amp" in ours and not hasattr(optimizer, ours) and type(optimizer) is Own
    assert not optimizer._optimizer_step_pre_hooks and not model._forward_pre_hooks


OPTIONS = {
    "a scale": {"loss_scale": 128.0},
    "outputs": {"cast_model_outputs": torch.float16},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_at_o0_is_kept(option):
    model, optimizer = start_o0(**OPTIONS[option])
    output = model(torch.ones(1, 2))
    assert output.dtype is OPTIONS[option].get("cast_model_outputs", torch.float32)
    with amp.scale_loss(output[0, 0].float(), optimizer) as scaled:
        assert scaled.item() == output[0, 0].float().item() * OPTIONS[option].get("loss_scale", 1.0)


def losses(model, optimizer, run=training.backward):
    """The loss function is called outside of the model, where O1's casts act: here not."""
    found = []
    for number in range(4):
        inputs, targets = images(number)
        optimizer.zero_grad()
        output = model(inputs)
        with amp.disable_casts():
            loss = nn.functional.cross_entropy(output, targets)
        run(loss, optimizer)
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("before", [True, False], ids=["O1 first", "O0 first"])
def test_casts_of_another_training_do_not_act_in_a_model_or_its_step(before):
    plain, other = convnet(), nn.Linear(2, 2)
    expected = losses(plain, ADAM(plain.parameters()), lambda loss, _: loss.backward())
    model = convnet()
    if before:
        amp.initialize(other, opt_level="O1")
    model, optimizer = amp.initialize(model, ADAM(model.parameters()), opt_level="O0", methods=("encode",))
    if not before:
        amp.initialize(other, opt_level="O1")
    assert losses(model, optimizer) == expected
    assert training.same(training.weights(model), training.weights(plain))
    assert model.encode(images(0)[0]).dtype is torch.float32
    amp.restore()
    assert type(model) is training.ConvNet and type(optimizer) is torch.optim.Adam


class CastingOptimizer(torch.optim.Optimizer):
    """Its own arithmetic would be cast by O1's default."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.kind = torch.mm(p.data, p.data).dtype


def test_casts_do_not_act_in_the_step_of_an_own_class():
    model = linear([[1.0]])
    model, optimizer = amp.initialize(model, CastingOptimizer(model.parameters()), opt_level="O0")
    amp.initialize(nn.Linear(2, 2), opt_level="O1")
    optimizer.step()
    assert optimizer.kind is torch.float32


@pytest.mark.parametrize("first", ["O1", "O2", "O3"])
def test_a_model_that_comes_from_another_level_has_its_own_class_again(first):
    model = convnet()
    model, optimizer = amp.initialize(model, ADAM(model.parameters()), opt_level=first, keep_fp32="head")
    amp.restore()
    model, optimizer = amp.initialize(model, optimizer, opt_level="O0")
    assert type(model) is training.ConvNet and type(model.head) is nn.Linear


@pytest.mark.parametrize("second", training.LEVELS)
def test_a_model_goes_to_another_level(second):
    model, optimizer = start_o0(convnet(), torch.optim.SGD)
    losses(model, optimizer)
    model, optimizer = amp.initialize(model, optimizer, opt_level=second)
    assert len(losses(model, optimizer)) == 4
    amp.restore()
    assert type(model) is training.ConvNet and type(optimizer) is torch.optim.SGD
