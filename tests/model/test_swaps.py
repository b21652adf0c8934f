"""`torch.__future__.set_swap_module_params_on_conversion(True)`: parameters get their new contents by a swap."""

from __future__ import annotations

import copy

import pytest
import torch
import training
from crossed import crossed
from torch import nn
from training import ADAM, convnet

from amp_patch import amp

KINDS = {level: {"opt_level": level} for level in training.LEVELS} | {
    form: {"opt_level": "O5", "master_weights": form} for form in ("split", "stochastic")
}


@pytest.fixture
def swapping():
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def channels_last(module):
    module.to("cpu", memory_format=torch.channels_last)


CONVERSIONS = {
    "to": channels_last,
    "to, a wrapper": lambda model: channels_last(nn.ModuleDict({"net": model})),
    "to, a part": lambda model: channels_last(model.body),
    "load": lambda model: model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}),
    "load, a wrapper": lambda model: nn.ModuleDict({"net": model}).load_state_dict(
        {f"net.{k}": v.clone() for k, v in model.state_dict().items()}
    ),
}


def trained(kind, convert):
    model = convnet()
    model, optimizer = amp.initialize(model, ADAM(model.parameters()), **KINDS[kind])
    training.train(model, optimizer, 2)
    convert(model)
    training.train(model, optimizer, range(2, 5))
    return model, optimizer


@crossed({"kind": list(KINDS), "conversion": list(CONVERSIONS)}, meet=1)
def test_a_model_in_training_is_converted_and_loaded(kind, conversion, swapping):
    swapped, _ = trained(kind, CONVERSIONS[conversion])
    torch.__future__.set_swap_module_params_on_conversion(False)
    expected, _ = trained(kind, CONVERSIONS[conversion])
    assert training.same(training.weights(swapped), training.weights(expected))


@pytest.mark.parametrize("kind", KINDS)
def test_masters_follow_their_weights_after_a_swap(kind, swapping):
    model, optimizer = trained(kind, channels_last)
    with torch.no_grad():
        for master in amp.master_params(optimizer):
            master.fill_(0.5)
    model(training.images(0)[0])
    assert all(p.eq(0.5).all() for p in model.parameters())
    model.body[0].weight.data.fill_(0.25)
    assert model.state_dict()["body.0.weight"].eq(0.25).all()


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_copies_are_converted_and_loaded(kind, pair, swapping):
    model, optimizer = trained(kind, channels_last)
    twin = copy.deepcopy((model, optimizer))[0] if pair else copy.deepcopy(model)
    channels_last(twin)
    twin.load_state_dict(model.state_dict())
    assert training.same(training.weights(twin), training.weights(model))
    inputs = training.images(0)[0]
    assert torch.equal(twin.eval()(inputs), model.eval()(inputs))


@pytest.mark.parametrize("kind", KINDS)
def test_after_restore_torch_s_own_function_is_back(kind, swapping):
    swap = torch.utils.swap_tensors
    model, _ = trained(kind, channels_last)
    amp.restore()
    assert torch.utils.swap_tensors is swap
    assert {p.dtype for p in model.double().parameters()} == {torch.float64}


def test_a_swap_that_torch_refuses_leaves_the_master_where_it_was():
    layer = training.linear([[1.0]])
    model, optimizer = amp.initialize(layer, training.SGD(layer.parameters()), opt_level="O2")
    other = nn.Parameter(torch.zeros(1, 1, dtype=torch.float16))
    held = other.view(1)  # a view holds its base
    with pytest.raises(RuntimeError, match="use_count"):
        torch.utils.swap_tensors(model.weight, other)
    with torch.no_grad():
        next(amp.master_params(optimizer)).fill_(3.0)
    assert model(torch.ones(1, 1)).item() == 3.0 and held.item() == 0
