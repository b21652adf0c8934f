"""`get_state_dict` and `set_state_dict` of torch.distributed.checkpoint, and its files."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import DEVICES
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from training import backward, same

from amp_patch import amp

LEVELS: dict[str, dict[str, Any]] = {
    "O0": {"opt_level": "O0"},
    "O1": {"opt_level": "O1"},
    "O2": {"opt_level": "O2"},
    "O5": {"opt_level": "O5"},
    "split": {"opt_level": "O5", "master_weights": "split"},
    "stochastic": {"opt_level": "O5", "master_weights": "stochastic"},
    "8bit": {"opt_level": "O5", "optimizer_state": "8bit"},
    "split, 8bit": {"opt_level": "O5", "master_weights": "split", "optimizer_state": "8bit"},
}
every_level = pytest.mark.parametrize("options", LEVELS.values(), ids=LEVELS)
MAKERS: dict[str, Any] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2, eps=1e-4),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "SGD without state": lambda groups: torch.optim.SGD(groups, lr=1e-2),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3),
}
every_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
OPTIONS = {
    "plain": StateDictOptions(),
    "full": StateDictOptions(full_state_dict=True),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
    "without frozen": StateDictOptions(ignore_frozen_params=True, strict=False),
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 1))
    model[3].bias.requires_grad_(False)
    return model


def start(make: Any, options: dict[str, Any], device: str = "cpu") -> tuple[nn.Sequential, Any]:
    model = net().to(device)
    optimizer = make([{"params": model[:2].parameters()}, {"params": model[2:].parameters(), "lr": 5e-3}])
    return amp.initialize(model, optimizer, verbosity=0, **options) if options else (model, optimizer)


def train(model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(8, 64, generator=generator).to(next(model.parameters()).device)
        optimizer.zero_grad()
        loss = model(inputs).float().square().mean()
        backward(loss, optimizer)
        optimizer.step()
        losses.append(loss.item())
    return losses


def tensors(model: nn.Module, optimizer: Any) -> list[Tensor]:
    states = optimizer.state_dict()["state"]
    found = [value for key in sorted(states) for value in states[key].values() if isinstance(value, Tensor)]
    return [value.detach().clone() for value in [*model.state_dict().values(), *found]]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@every_maker
@every_level
@pytest.mark.parametrize("device", DEVICES)
def test_a_training_is_resumed_to_the_bit_from_a_file_of_dcp(options, make, device, tmp_path):
    model, optimizer = start(make, options, device)
    train(model, optimizer, range(3))
    saved = get_state_dict(model, optimizer)
    dcp.save({"model": saved[0], "optimizer": saved[1], "amp": amp.state_dict()}, checkpoint_id=tmp_path)
    losses, wanted = train(model, optimizer, range(3, 6)), tensors(model, optimizer)
    amp.restore()
    model, optimizer = start(make, options, device)
    empty = get_state_dict(model, optimizer)
    found = {"model": empty[0], "optimizer": empty[1], "amp": amp.state_dict()}
    dcp.load(found, checkpoint_id=tmp_path)
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    amp.load_state_dict(found["amp"])
    assert train(model, optimizer, range(3, 6)) == losses
    assert same(tensors(model, optimizer), wanted)


@pytest.mark.parametrize("kind", OPTIONS.values(), ids=OPTIONS)
@every_level
def test_the_states_have_the_names_and_types_of_plain_torch_and_load_into_it(options, kind):
    make = MAKERS["AdamW"]
    model, optimizer = start(make, options)
    train(model, optimizer, range(2))
    states = copy.deepcopy(get_state_dict(model, optimizer, options=kind))
    amp.restore()
    plain_model, plain_optimizer = start(make, {})
    train_plain(plain_model, plain_optimizer)
    wanted = get_state_dict(plain_model, plain_optimizer, options=kind)
    assert described(states) == described(wanted)
    set_state_dict(
        plain_model,
        plain_optimizer,
        model_state_dict=dict(states[0]),
        optim_state_dict=copy.deepcopy(states[1]),
        options=kind,
    )
    again = get_state_dict(plain_model, plain_optimizer, options=kind)
    assert same(flat(again), flat(states))
    model, optimizer = start(make, options)
    set_optimizer_state_dict(model, optimizer, optim_state_dict=copy.deepcopy(states[1]), options=kind)
    assert same(flat(get_optimizer_state_dict(model, optimizer, options=kind)), flat(states[1]))


def train_plain(model: nn.Module, optimizer: Any) -> None:
    for step in range(2):
        inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def flat(value: Any) -> list[Tensor]:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [value] if isinstance(value, Tensor) else [tensor for each in values for tensor in flat(each)]


def described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.shape
    if isinstance(value, dict):
        return {key: described(each) for key, each in sorted(value.items())}
    return [described(each) for each in value] if isinstance(value, list | tuple) else value


def test_restore_gives_torchs_functions_back():
    module = importlib.import_module("torch.distributed.checkpoint.state_dict")
    before = module._get_optim_state_dict, module._load_optim_state_dict
    start(MAKERS["AdamW"], LEVELS["O5"])
    assert module._get_optim_state_dict is not before[0]
    amp.restore()
    assert (module._get_optim_state_dict, module._load_optim_state_dict) == before
