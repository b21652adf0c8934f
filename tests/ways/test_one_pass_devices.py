"""A group whose parameters lie on several devices steps in one pass on each; "meta" acts the second GPU."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from any_optimizer import KINDS as MAKES
from torch import Tensor, nn

from amp_patch import amp, multi_tensor
from amp_patch.support import device_sync, distributed
from amp_patch.ways import one_pass

pytestmark = pytest.mark.extension

KINDS = ("torch's SGD, Nesterov", "torch's Adam, amsgrad", "torch's AdamW", "FusedAdam, L2", "FusedSGD")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Record for each kernel call the devices of gradients, masters and flag. An optimizer's own step is an error."""
    seen: list[list[str]] = []

    def spied(kernel: Any) -> Any:
        def call(grads: Any, params: Any, *others: Any, **options: Any) -> None:
            kernel(grads, params, *others, **options)
            tensors = [t for t in (*grads, *params, options["found_inf"]) if t is not None]
            seen.append(sorted({t.device.type for t in tensors}))

        return call

    for name in ("multi_tensor_adam", "multi_tensor_sgd"):
        monkeypatch.setattr(multi_tensor, name, spied(getattr(multi_tensor, name)))

    def own_way(*_: Any) -> None:
        raise AssertionError("the optimizer went its own way")

    monkeypatch.setattr(one_pass, "_step_with_torch", own_way)
    return seen


def training_on(devices: str, level: str, recipe: Any) -> tuple[list[nn.Module], Any]:
    """A layer a device, all in one group, their parameters in turn; the layers are alike."""
    layers = []
    for device in devices.split():
        torch.manual_seed(0)
        layers.append(nn.Linear(5, 5).to(device))
    params = [param for pair in zip(*(layer.parameters() for layer in layers), strict=True) for param in pair]
    scale = {"loss_scale": "dynamic", "max_loss_scale": 128.0} if level == "O2" else {}
    return amp.initialize(layers, recipe(params), opt_level=level, verbosity=0, **scale)


def step(layers: list[nn.Module], optimizer: Any, index: int, factor: float = 1.0) -> None:
    inputs = torch.randn(3, 5, generator=torch.Generator().manual_seed(index))
    losses = [layer(inputs.to(layer.weight.device)).float().square().sum() * factor for layer in layers]
    with amp.scale_loss(losses[0], optimizer) as scaled:
        scaled.backward()
        for loss in losses[1:]:  # on "meta", or not scaled
            loss.backward()
    optimizer.step()


def on_the_cpu(optimizer: Any) -> list[Tensor]:
    masters = [m for m in amp.master_params(optimizer) if m.device.type == "cpu"]
    states = [value for m in masters for value in optimizer.state[m].values() if isinstance(value, Tensor)]
    return [t.detach().clone() for t in (*masters, *states)]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_group_on_two_devices_is_stepped_on_each(kind, split, calls):
    ends = []
    for devices in ("cpu meta", "meta cpu", "cpu"):
        calls.clear()
        layers, optimizer = training_on(devices, "O5+split" if split else "O5", copy.deepcopy(MAKES[kind]))
        for index in range(3):
            step(layers, optimizer, index)
        wanted = [[device] for device in devices.split()] * 3
        assert calls == wanted
        ends.append(on_the_cpu(optimizer))
    assert all(torch.equal(a, b) for end in ends[:2] for a, b in zip(end, ends[2], strict=True))


# The loss on "meta" is not scaled, which would train wrongly if it had numbers.
@pytest.mark.filterwarnings("ignore:scale_loss. a backward pass in the body went past the scaled loss")
def test_the_flag_of_an_overflow_is_brought_to_each_device(calls, monkeypatch):
    monkeypatch.setattr(device_sync, "waits", lambda device: True)  # so that FusedSGD skips on the device
    agree = distributed.agree
    monkeypatch.setattr(  # nobody can read the second one's flag
        distributed, "agree", lambda found, params: {d: f for d, f in agree(found, params).items() if d.type == "cpu"}
    )
    layers, optimizer = training_on("cpu meta", "O2", MAKES["FusedSGD"])
    with pytest.MonkeyPatch.context() as patch:  # the host reads the flag of a first step
        patch.setattr(device_sync, "waits", lambda device: False)
        step(layers, optimizer, 0)
    calls.clear()
    step(layers, optimizer, 1)
    assert calls == [["cpu"], ["meta"]]
    before = on_the_cpu(optimizer)
    step(layers, optimizer, 2, math.inf)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 64.0
    assert all(torch.equal(a, b) for a, b in zip(before, on_the_cpu(optimizer), strict=True))
