"""Models that user code changes after `initialize`: another type for the weights at O1, modules that were added."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from training import backward, same

from amp_patch import amp

FP32_WEIGHTS = ("O1", "O4", "O6")
CAST = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16, "O7": torch.bfloat16}
LOWER = {
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "to": lambda model: model.to("cpu", torch.float16),
    "type": lambda model: model.type(torch.bfloat16),
    "of a wrapper": lambda model: nn.Sequential(model).half(),
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("convert", LOWER)
@pytest.mark.parametrize("level", FP32_WEIGHTS)
def test_a_lower_type_for_the_weights_of_an_fp32_model_is_refused_with_the_ways_out(level, convert):
    model = network()
    model, _ = amp.initialize(model, sgd(model), opt_level=level, verbosity=0)
    words = rf"initialize\(opt_level='{level}'\).*amp\.restore\(\).*amp\.fp32_copy\(model\).*opt_level='O2'"
    with pytest.raises(RuntimeError, match=words):
        LOWER[convert](model)
    assert same(model.parameters(), network().parameters())
    assert {p.dtype for p in amp.fp32_copy(model).half().parameters()} == {torch.float16}
    amp.restore()
    assert {p.dtype for p in model.half().parameters()} == {torch.float16}


@pytest.mark.parametrize("level", FP32_WEIGHTS)
def test_moves_and_wider_types_of_an_fp32_model_are_torch_s(level):
    model = amp.initialize(network(), opt_level=level, verbosity=0)
    for move in (lambda: model.to("cpu"), model.float, lambda: model.to(torch.float32), model.share_memory):
        assert move() is model and same(model.parameters(), network().parameters())
    assert {p.dtype for p in model.double().parameters()} == {torch.float64}


def head() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(8, 3)


def replace(model: nn.Sequential) -> None:
    model[2] = head()


ADDED = {
    "a replaced head": ("2", replace),
    "a replaced head of several layers": ("2", lambda model: setattr(model, "2", nn.Sequential(head(), nn.ReLU()))),
    "an appended module": ("3", lambda model: model.append(nn.Linear(5, 3))),
}


@pytest.mark.parametrize("change", ADDED)
@pytest.mark.parametrize("level", CAST)
def test_a_new_module_of_a_cast_model_is_named_where_forward_fails_on_it(level, change):
    name, add = ADDED[change]
    model = network()
    model, _ = amp.initialize(model, sgd(model), opt_level=level, keep_high=(), verbosity=0)
    add(model)
    words = rf"new modules since, which were not: '{name}'\. .*amp\.initialize\(model, optimizer, opt_level='{level}'\)"
    with pytest.raises(RuntimeError, match=words) as error:
        model(torch.ones(2, 4))
    assert str(error.value).startswith(str(error.value.__cause__))


def losses_with_new_head(level: str, way: str) -> list[float]:
    """The losses of six steps after the head was replaced, as the error for `way` has it."""
    model = network()
    options = {"opt_level": level, "loss_scale": 64.0, "verbosity": 0}
    model, optimizer = amp.initialize(model, sgd(model), **options)
    replace(model)
    if way == "by hand":
        words = re.search(r"model\.get_submodule\('2'\)\.to\((.*?)\)", error_of(model))
        model.get_submodule("2").to({"torch.float16": torch.float16, "torch.bfloat16": torch.bfloat16}[words[1]])
    if way in ("by hand", "initialize again", "plain"):
        optimizer.add_param_group({"params": list(model[2].parameters())})
    if way == "initialize again":
        model, optimizer = amp.initialize(model, optimizer, **options)
    if way == "new optimizer":
        model, optimizer = amp.initialize(model, sgd(model), **options)
    inputs, targets = torch.linspace(-1, 1, 32).reshape(8, 4), torch.linspace(1, -1, 24).reshape(8, 3)
    losses = []
    for _ in range(6):
        loss = (model(inputs) - targets).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        backward(loss, optimizer)
        optimizer.step()
    amp.restore()
    return losses


def error_of(model: nn.Module) -> str:
    with pytest.raises(RuntimeError) as error:
        model(torch.ones(2, 4))
    return str(error.value)


@pytest.mark.parametrize("way", ["initialize again", "new optimizer", "by hand"])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_new_head_trains_as_in_fp32_by_each_way_that_the_error_names(level, way):
    assert losses_with_new_head(level, way) == pytest.approx(losses_with_new_head("O0", "plain"), rel=0.02)
