"""Cast weights that are frozen when an optimizer gets them, and unfrozen later."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conftest import DEVICES
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from training import linear

from amp_patch import amp
from amp_patch.masters.masters import master_of

with_masters = pytest.mark.parametrize(
    "options",
    [{"opt_level": "O2"}, {"opt_level": "O5"}, {"opt_level": "O5", "master_weights": "split"}],
    ids=["O2", "O5", "split"],
)


def frozen_then_added(options: dict[str, Any], device: torch.device) -> tuple[nn.Sequential, torch.optim.SGD]:
    """Return a model of two layers, and its optimizer, which got the first layer while that was frozen."""
    model = nn.Sequential(linear([[2.0]], device), linear([[3.0]], device))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.25)
    model, optimizer = amp.initialize(model, optimizer, loss_scale=4.0, verbosity=0, **options)
    model[0].requires_grad_(False)
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 2.0**-10})
    assert master_of(model[0].weight) is None  # no step changes it, so that it needs no FP32 value
    return model, optimizer


def loss_of(model: nn.Module, device: torch.device) -> Tensor:
    return model(torch.ones(1, 1, device=device)).sum()


def train(model: nn.Module, optimizer: Any, device: torch.device) -> None:
    with amp.scale_loss(loss_of(model, device), optimizer) as scaled_loss:
        scaled_loss.backward()


@with_masters
@pytest.mark.parametrize("device", DEVICES)
def test_a_weight_that_was_added_frozen_gets_its_master_at_the_first_backward_after_it_is_unfrozen(options, device):
    model, optimizer = frozen_then_added(options, device)
    train(model, optimizer, device)
    model[0].requires_grad_(True)
    optimizer.step()  # of the backward before: only the second layer has a gradient
    assert [weight.item() for weight in amp.master_params(optimizer)] == [2.5, 2.0]
    optimizer.zero_grad()
    train(model, optimizer, device)
    optimizer.step()
    # 2 - 2.5 / 1024 lies between two numbers of BF16, and of FP16.
    assert [weight.item() for weight in amp.master_params(optimizer)] == [2.0, 2.0 - 2.5 / 1024]


@with_masters
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_a_step_that_would_train_such_a_weight_without_a_master_is_refused(options, copied, device):
    model, optimizer = frozen_then_added(options, device)
    if copied:
        model, optimizer = copy.deepcopy((model, optimizer))
    model[0].requires_grad_(True)
    loss_of(model, device).backward()
    with pytest.raises(RuntimeError, match=r"came frozen .* call scale_loss for its loss") as refusal:
        optimizer.step()
    assert copied or "'0.weight'" in str(refusal.value)  # a copy does not know the names
    assert model[0].weight.item() == 2.0
    optimizer.zero_grad()
    train(model, optimizer, device)
    optimizer.step()
    assert [weight.item() for weight in amp.master_params(optimizer)] == [2.5, 2.0 - 3.0 / 1024]


@with_masters
@pytest.mark.parametrize("device", DEVICES)
def test_a_frozen_weight_with_a_gradient_is_added_with_a_master(options, device):
    """A step uses the gradient, as in torch."""
    model = nn.Sequential(linear([[2.0]], device), linear([[3.0]], device))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.25)
    model, optimizer = amp.initialize(model, optimizer, loss_scale=1.0, verbosity=0, **options)
    train(model, optimizer, device)
    model[0].requires_grad_(False)
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 2.0**-10})
    optimizer.step()
    assert [weight.item() for weight in amp.master_params(optimizer)] == [2.5, 2.0 - 3.0 / 1024]


# ---------------------------------------------------------------------------------------------------------------------
# Loads


LEVELS: dict[str, dict[str, Any]] = {
    "O1": {"opt_level": "O1"},
    "O2": {"opt_level": "O2"},
    "O4": {"opt_level": "O4"},
    "O5": {"opt_level": "O5"},
    "split": {"opt_level": "O5", "master_weights": "split"},
    "8bit": {"opt_level": "O5", "optimizer_state": "8bit"},
    "split, 8bit": {"opt_level": "O5", "master_weights": "split", "optimizer_state": "8bit"},
}
every_level = pytest.mark.parametrize("options", LEVELS.values(), ids=LEVELS)
SIZE = 4096  # the least whose state is in eight bits
FILE = {"0.weight": 2.0**-12 + 1, "1.weight": 2.0**-10 + 3}  # between two numbers of BF16 and FP16


def came_frozen(options: dict[str, Any], device: Any = "cpu") -> tuple[nn.Sequential, Any]:
    model = nn.Sequential(linear([[2.0]] * SIZE, device), linear([[3.0] * SIZE], device))
    model[0].bfloat16().requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-10, momentum=0.5)
    return amp.initialize(model, optimizer, loss_scale=1.0, verbosity=0, **options)


def file(*names: str) -> dict[str, Tensor]:
    shapes = {"0.weight": (SIZE, 1), "1.weight": (1, SIZE)}
    return {name: torch.full(shapes[name], FILE[name]) for name in names or FILE}


def parent_loads(model: nn.Module) -> None:
    nn.ModuleDict({"model": model}).load_state_dict({f"model.{name}": value for name, value in file().items()})


LOADS: dict[str, Any] = {
    "load_state_dict": lambda model: model.load_state_dict(file()),
    "of a parent": parent_loads,
    "in parts": lambda model: [model.load_state_dict(file(name), strict=False) for name in FILE],
    "of the layer": lambda model: [model[int(name[0])].load_state_dict({"weight": file()[name]}) for name in FILE],
    "set_model_state_dict": lambda model: set_model_state_dict(model, file()),
}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
@every_level
@pytest.mark.parametrize("device", DEVICES)
def test_a_load_into_an_unfrozen_layer_keeps_the_numbers_of_the_file(options, load, device):
    model, optimizer = came_frozen(options, device)
    model[0].requires_grad_(True)
    load(model)
    held = [*model.state_dict().values(), *amp.master_params(optimizer)]
    assert [value.unique().tolist() for value in held] == [[number] for number in FILE.values()] * 2
    train(model, optimizer, device)
    before = next(iter(amp.master_params(optimizer)))[0].item()
    optimizer.step()
    assert before == FILE["0.weight"]
    gradient = model[1].weight.float()[0, 0].item() if options["opt_level"] in ("O2", "O5") else FILE["1.weight"]
    assert 0 < before - next(iter(amp.master_params(optimizer)))[0].item() <= gradient / 256


@pytest.mark.parametrize("first", ["model", "optimizer"])
@every_level
def test_a_training_that_thawed_a_layer_is_resumed_to_the_bit(options, first):
    def begin() -> tuple[nn.Sequential, Any]:
        model, optimizer = came_frozen(options)
        model[0].requires_grad_(True)
        return model, optimizer

    def weights(model: nn.Module, optimizer: Any, steps: int) -> list[Tensor]:
        for _ in range(steps):
            optimizer.zero_grad()
            train(model, optimizer, torch.device("cpu"))
            optimizer.step()
        state = optimizer.state_dict()["state"]
        found = [*model.state_dict().values(), *(state[index]["momentum_buffer"] for index in range(2))]
        return [value.clone() for value in found]

    model, optimizer = begin()
    model.load_state_dict(file())
    weights(model, optimizer, 2)
    states = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    wanted = weights(model, optimizer, 2)
    amp.restore()
    model, optimizer = begin()
    loads = [lambda: model.load_state_dict(states[0]), lambda: optimizer.load_state_dict(states[1])]
    for load in loads if first == "model" else reversed(loads):
        load()
    assert all(map(torch.equal, weights(model, optimizer, 2), wanted))


@with_masters
def test_a_load_serves_each_optimizer_and_model_and_copies(options):
    models = [nn.Sequential(linear([[2.0]]), linear([[3.0]])) for _ in range(2)]
    for model in models:
        model.bfloat16().requires_grad_(False)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=1.0) for model in models for layer in model]
    amp.initialize(models, optimizers, loss_scale=1.0, verbosity=0, **options)
    for taken, given in [(models, optimizers), copy.deepcopy((models, optimizers))]:
        taken[1].requires_grad_(True)
        for model in taken:
            model.load_state_dict({name: torch.full((1, 1), number) for name, number in FILE.items()})
        found = [master.item() for optimizer in given for master in amp.master_params(optimizer)]
        assert found == [1.0, 3.0, *FILE.values()]  # the first model is frozen: its weights stay in BF16
        assert [value.item() for value in taken[1].state_dict().values()] == list(FILE.values())
        low = torch.float16 if options["opt_level"] == "O2" else torch.bfloat16
        assert [value.dtype for value in taken[0].state_dict().values()] == [low] * 2


@with_masters
def test_a_load_into_a_layer_that_was_added_frozen(options):
    model, optimizer = frozen_then_added(options, torch.device("cpu"))
    model[0].requires_grad_(True)
    model.load_state_dict({name: torch.full((1, 1), number) for name, number in FILE.items()})
    assert [master.item() for master in amp.master_params(optimizer)] == list(FILE.values())[::-1]
