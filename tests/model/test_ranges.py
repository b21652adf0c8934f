"""Weights and buffers that become infinite in the type of a level: refused by name, before anything is changed."""

from __future__ import annotations

import pytest
import torch
from conftest import DEVICES
from crossed import crossed
from torch import nn
from training import SGD

from amp_patch import amp
from amp_patch.apex.amp import frontend as apex

TYPES = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16, "O7": torch.bfloat16}
BEYOND = {torch.float16: 4e5, torch.bfloat16: torch.finfo(torch.float32).max}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)
        self.register_buffer("scale", torch.ones(2))
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)) * self.scale) * self.gain


def holding(name: str, number: float, device: str = "cpu") -> Net:
    net = Net().to(device)
    net.get_parameter(name).data.fill_(number) if name != "scale" else net.scale.fill_(number)
    return net


WAYS = {
    "first.weight": "parameter 'first.weight' of Net .* name its module in keep_fp32, 'first'",
    "last.bias": "parameter 'last.bias' of Net .* name its module in keep_fp32, 'last'",
    "gain": "parameter 'gain' of Net .*: choose opt_level",
    "scale": "buffer 'scale' of Net .* pass keep_fp32=\"buffers\"",
}


@crossed({"device": DEVICES, "level": list(TYPES), "name": list(WAYS)}, meet=2)
def test_numbers_beyond_the_type_are_named_before_anything_is_changed(level, name, device):
    number = BEYOND[TYPES[level]] * (1 if name == "scale" else -1)  # a buffer of negative numbers may be a mask
    model = holding(name, number, device)
    optimizer = SGD(model.parameters())
    with pytest.raises(ValueError, match=f"^initialize: {WAYS[name]}") as caught:
        amp.initialize(model, optimizer, opt_level=level)
    assert f"holds {number:g}, which {TYPES[level]} cannot hold" in str(caught.value)
    assert type(model) is Net and type(optimizer) is torch.optim.SGD
    assert {value.dtype for value in model.state_dict().values() if value.is_floating_point()} == {torch.float32}


@pytest.mark.parametrize(("name", "keep"), [("last.bias", "last"), ("scale", "buffers")])
def test_the_ways_out_hold_them(name, keep):
    model = holding(name, 4e5)
    amp.initialize(model, SGD(model.parameters()), opt_level="O2", keep_fp32=keep)
    assert dict(model.named_parameters(), **dict(model.named_buffers()))[name].unique().tolist() == [4e5]


def test_apex_s_names_name_them_too():
    model = holding("first.weight", 4e5)
    with pytest.raises(ValueError, match=r"'first.weight' of Net is .* and holds 400000"):
        apex.initialize(model, SGD(model.parameters()), opt_level="O2", verbosity=0)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_mask_may_become_infinite_and_numbers_that_are_not_finite_stay(level):
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_buffer("mask", torch.tensor([0.0, -1e9]))
    model[0].weight.data[0] = float("inf")
    amp.initialize(model, SGD(model.parameters()), opt_level=level)
    assert model.mask.isneginf().tolist() == [False, True]


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("name", ["last.bias", "scale"])
def test_a_checkpoint_with_such_a_number_is_refused_before_anything_is_loaded(level, name):
    model = Net()
    amp.initialize(model, SGD(model.parameters()), opt_level=level)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(
        ValueError, match=f"^load_state_dict: .* '{name}' of Net is .* and holds 400000, which torch.float16"
    ):
        model.load_state_dict(holding(name, 4e5).state_dict())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    wide = Net()
    amp.initialize(wide, SGD(wide.parameters()), opt_level="O5")
    wide.load_state_dict(holding(name, 4e5).state_dict())
    assert wide.state_dict()[name].unique().tolist() == [4e5]
