"""A second `initialize` of a model with a new optimizer: the new training has all that the first had."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from conftest import DEVICES
from crossed import crossed
from split_masters import opened
from three_ways import spied_kernels
from torch import nn
from training import backward, masters_of, same

from amp_patch import amp

KINDS: dict[str, dict[str, Any]] = {
    "O2": {"opt_level": "O2", "loss_scale": 64.0},
    "O5": {"opt_level": "O5"},
    "split": {"opt_level": "O5", "master_weights": "split"},
    "split, 8bit": {"opt_level": "O5", "master_weights": "split", "optimizer_state": "8bit"},
}
OPTIMIZERS = {"in one pass": torch.optim.AdamW, "in portions": torch.optim.Adagrad}


@pytest.fixture(name="kernels")
def kernels_fixture(monkeypatch):
    return spied_kernels(monkeypatch)


def network(device="cpu"):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).to(device)


def loss_of(model, step=0):
    inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).to(model[0].weight.device)
    return model(inputs).float().square().mean()


def seen_in(model, optimizer, kernels):
    """Train three steps; return bytes of the gradients, open masters, tensors in kernels, and the masters."""
    seen: list[Any] = []
    for step in range(3):
        optimizer.zero_grad()
        backward(loss_of(model, step), optimizer)
        waiting = optimizer._amp_stash.masters.waiting
        seen.append(sum(grad.nbytes for grad in waiting.grads()) if waiting else 0)
        kernels.clear()
        optimizer.step()
        seen += [opened(optimizer), list(kernels)]
    return seen, masters_of(optimizer)


def first_of(kind, cls, device, first):
    """Return a model that a first optimizer has trained, and this optimizer, if it is alive still."""
    model = network(device)
    optimizer = cls(model.parameters(), lr=0.0)
    model, optimizer = amp.initialize(model, optimizer, verbosity=0, **KINDS[kind])
    if first != "fresh":
        backward(loss_of(model), optimizer)  # its gradients stay
    if first == "alive":
        return model, optimizer
    del optimizer
    gc.collect()
    return model, None


@pytest.mark.extension
@crossed({"kind": list(KINDS), "way": list(OPTIMIZERS), "first": ["alive", "freed", "fresh"], "device": DEVICES})
def test_the_second_training_defers_gradients_and_steps_as_the_first(kind, way, first, device, kernels):
    cls = OPTIMIZERS[way]
    model = network(device)
    model, optimizer = amp.initialize(model, cls(model.parameters(), lr=0.01), verbosity=0, **KINDS[kind])
    expected, values = seen_in(model, optimizer, kernels)
    amp.restore()
    assert expected[0] == 2 * sum(param.numel() for param in model.parameters())

    model, earlier = first_of(kind, cls, device, first)
    model, optimizer = amp.initialize(model, cls(model.parameters(), lr=0.01), verbosity=0, **KINDS[kind])
    seen, trained = seen_in(model, optimizer, kernels)
    assert seen == expected and same(trained, values)
    del earlier


@crossed({"kind": list(KINDS), "again": ["first", "both"]})
def test_the_first_optimizer_can_be_used_again(kind, again):
    def train(initialize):
        model = network()
        optimizers = [torch.optim.SGD(model.parameters(), lr=rate, momentum=0.5) for rate in (0.5, 0.25)]
        for optimizer in optimizers:
            initialize(model, optimizer)
        read = []
        for step in range(4):
            optimizer = optimizers[step % 2 if again == "both" else 0]
            optimizer.zero_grad()
            backward(loss_of(model, step), optimizer)
            read.append(all(param.grad is not None for param in model.parameters()))
            optimizer.step()
        values = masters_of(optimizers[0])
        amp.restore()
        return values, read, [param.detach().clone() for param in model.parameters()]

    options = {key: value for key, value in KINDS[kind].items() if key != "optimizer_state"}
    values, read, restored = train(lambda *pair: amp.initialize(*pair, verbosity=0, **options))
    expected, _, _ = train(lambda *pair: amp.initialize(*pair, opt_level="O0", verbosity=0))
    assert all(read) and same(values, restored)
    for value, true in zip(values, expected, strict=True):
        torch.testing.assert_close(value, true, atol=5e-3, rtol=0)


@crossed({"level": ["O4", "O5"], "first": ["alive", "freed"], "second": [False, True]})
def test_gradient_release_ends_with_its_training(level, first, second):
    model = network()
    earlier = torch.optim.SGD(model.parameters(), lr=0.5)
    model, earlier = amp.initialize(model, earlier, opt_level=level, gradient_release=True, verbosity=0)
    backward(loss_of(model), earlier)
    earlier.step()
    if first == "freed":
        del earlier
        gc.collect()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, gradient_release=second, verbosity=0)
    optimizer.zero_grad()
    backward(loss_of(model), optimizer)
    assert all(param.grad is None for param in amp.master_params(optimizer)) is second
    if second:
        with pytest.raises(RuntimeError, match="with gradient_release=True parameters are stepped in backward"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    else:
        assert nn.utils.clip_grad_norm_(model.parameters(), 1e-3).item() > 1e-3
        norms = [param.grad.norm() for param in amp.master_params(optimizer)]
        assert torch.stack(norms).norm().item() == pytest.approx(1e-3, rel=1e-2)
    optimizer.step()
    if first == "alive":  # its own steps go on, and can be clipped now
        backward(loss_of(model), earlier)
        assert second or nn.utils.clip_grad_norm_(model.parameters(), 1e-3).item() > 1e-3
        earlier.step()
    amp.restore()
    loss_of(model).backward()
    assert nn.utils.clip_grad_norm_(model.parameters(), 1e-3).item() > 1e-3
