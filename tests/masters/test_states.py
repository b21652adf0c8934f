"""`optimizer.state` by the model's parameters, whose state is that of their masters."""

from __future__ import annotations

import collections
import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import DEVICES
from torch import Tensor, nn
from training import linear

from amp_patch import amp

LEVELS: dict[str, dict[str, Any]] = {
    "O2": {"opt_level": "O2"},
    "O5": {"opt_level": "O5"},
    "split": {"opt_level": "O5", "master_weights": "split"},
    "stochastic": {"opt_level": "O5", "master_weights": "stochastic"},
    "8bit": {"opt_level": "O5", "optimizer_state": "8bit"},
    "split, 8bit": {"opt_level": "O5", "master_weights": "split", "optimizer_state": "8bit"},
}
SIZE = 4096  # the least whose state is in eight bits; all elements are equal, so that the codes are exact
every_level = pytest.mark.parametrize("options", LEVELS.values(), ids=LEVELS)
every_device = pytest.mark.parametrize("device", DEVICES)


def start(options: dict[str, Any], device: str = "cpu") -> tuple[nn.Linear, torch.optim.SGD]:
    model = linear([[2.0]] * SIZE, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
    return amp.initialize(model, optimizer, loss_scale=4.0, verbosity=0, **options) if options else (model, optimizer)


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    """Train with gradients of 1: the momentum is 1, 1.5, 1.75 and so on."""
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 1, device=next(model.parameters()).device)).sum()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()


def plain(change: Callable[[Any, Tensor], Any]) -> tuple[Any, dict[str, Any], float]:
    """Return the result of `change(state, weight)` after two steps of plain torch; the state dict and weight later."""
    model, optimizer = start({})
    for step in range(4):
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        if step == 1:
            result = change(optimizer.state, model.weight)
    return result, optimizer.state_dict(), model.weight[0].item()


def momentum(value: float) -> dict[str, Any]:
    return {"momentum_buffer": torch.full((SIZE, 1), value)}


def replaced(state: Any, weight: Tensor) -> None:
    state[weight] = momentum(3.0)


def edited(state: Any, weight: Tensor) -> None:
    state[weight]["momentum_buffer"].fill_(3.0)


def updated(state: Any, weight: Tensor) -> None:
    state.update({weight: momentum(3.0)})


def merged(state: Any, weight: Tensor) -> None:
    state |= {weight: momentum(3.0)}


def deleted(state: Any, weight: Tensor) -> Any:
    del state[weight]
    return weight in state, state.get(weight), state.get(weight, 5), len(state), len(state[weight]), len(state)


def set_by_default(state: Any, weight: Tensor) -> Any:
    before = state.setdefault(weight, momentum(3.0))["momentum_buffer"][0].item()
    state.pop(weight)
    return before, state.setdefault(weight, momentum(7.0))["momentum_buffer"][0].item()


CHANGES: dict[str, Callable[[Any, Tensor], Any]] = {
    "a read": lambda state, weight: (weight in state, state[weight]["momentum_buffer"][0].item(), len(state)),
    "get": lambda state, weight: state.get(weight)["momentum_buffer"][0].item(),
    "a write": replaced,
    "an edit": edited,
    "update": updated,
    "|=": merged,
    "clear": lambda state, weight: state[weight].clear(),
    "del": deleted,
    "pop": lambda state, weight: (state.pop(weight)["momentum_buffer"][0].item(), state.pop(weight, None)),
    "setdefault": set_by_default,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@every_level
@every_device
def test_the_state_of_a_parameter_is_read_and_changed_as_in_torch(change, options, device):
    wanted, state, weight = plain(change)
    model, optimizer = start(options, device)
    train(model, optimizer, 2)
    assert change(optimizer.state, model.weight) == wanted
    train(model, optimizer, 2)
    found = optimizer.state_dict()
    assert found["state"].keys() == state["state"].keys()
    assert [m[0].item() for m in amp.master_params(optimizer)] == [weight]
    assert torch.equal(found["state"][0]["momentum_buffer"].cpu(), state["state"][0]["momentum_buffer"])


def loaded(model: nn.Module, optimizer: Any) -> tuple[Any, Any]:
    optimizer.load_state_dict(optimizer.state_dict())
    return model, optimizer


def pickled(model: nn.Module, optimizer: Any) -> tuple[Any, Any]:
    return pickle.loads(pickle.dumps((model, optimizer)))


def saved(model: nn.Module, optimizer: Any) -> tuple[Any, Any]:
    torch.save([model, optimizer], file := io.BytesIO())
    file.seek(0)
    return tuple(torch.load(file, weights_only=False))


def assigned(model: nn.Module, optimizer: Any) -> tuple[Any, Any]:
    optimizer.state = collections.defaultdict(dict, {model.weight: optimizer.state[model.weight]})
    return model, optimizer


def copied(model: nn.Module, optimizer: Any) -> tuple[Any, Any]:
    optimizer.state = copy.copy(optimizer.state)
    return model, optimizer


def entered_again(model: nn.Module, optimizer: Any) -> tuple[Any, Any]:
    return amp.initialize(model, optimizer, opt_level="O2", dtype=torch.bfloat16, loss_scale=1.0, verbosity=0)


WAYS = {
    "load_state_dict": loaded,
    "deepcopy": lambda *both: copy.deepcopy(both),
    "pickle": pickled,
    "torch.save": saved,
    "an assigned dictionary": assigned,
    "a second initialize": entered_again,
    "a shallow copy of it": copied,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@every_level
def test_the_state_of_a_parameter_is_found_in_copies_and_after_loads(way, options):
    model, optimizer = way(*start(options)) if way is entered_again else start(options)
    train(model, optimizer, 2)
    model, optimizer = way(model, optimizer)
    (master,) = amp.master_params(optimizer)
    assert optimizer.state[model.weight]["momentum_buffer"][0].item() == 1.5
    assert optimizer.state[model.weight] is optimizer.state[master] and len(optimizer.state) == 1
    optimizer.state[model.weight] = {}
    train(model, optimizer, 1)
    assert optimizer.state_dict()["state"][0]["momentum_buffer"][0].item() == 1.0


@every_level
def test_restore_gives_the_state_back_to_the_parameters(options):
    model, optimizer = start(options)
    train(model, optimizer, 2)
    amp.restore()
    assert type(optimizer.state) is collections.defaultdict and list(map(id, optimizer.state)) == [id(model.weight)]
    assert optimizer.state[model.weight]["momentum_buffer"][0].item() == 1.5


@every_level
def test_a_dictionary_that_a_wrapper_holds_has_the_entries(options):
    class Wrapper:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer, self.state = optimizer, optimizer.state

    model, optimizer = start({})
    wrapper = Wrapper(optimizer)
    model, optimizer = amp.initialize(model, optimizer, loss_scale=1.0, verbosity=0, **options)
    train(model, optimizer, 2)
    (master,) = amp.master_params(optimizer)
    assert optimizer.state is wrapper.state and set(wrapper.state) == {master}
    copied, its = copy.deepcopy((model, optimizer))
    assert its.state[copied.weight]["momentum_buffer"][0].item() == 1.5
    wrapper.state[master]["momentum_buffer"] = torch.full((SIZE, 1), 3.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    (master,) = amp.master_params(optimizer)
    assert optimizer.state is wrapper.state and optimizer.state[master]["momentum_buffer"][0].item() == 3.0
    amp.restore()
    assert wrapper.state is optimizer.state and optimizer.state[model.weight]["momentum_buffer"][0].item() == 3.0
