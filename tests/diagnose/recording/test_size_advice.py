"""Advice on sizes from a recorded model's first forward, which leaves no hooks."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from conftest import DEVICES
from torch import nn
from training import LEVELS, images, same, train, weights

from amp_patch import amp
from amp_patch.diagnose import shapes
from amp_patch.diagnose.recording import size_advice

LINE = "99 is no multiple of 8: out features of *; in features of *; "


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    """As if a CPU were a GPU, and the model large."""
    monkeypatch.setattr(size_advice, "DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(shapes, "_MULTIPLY_ADDS", 0)


class FailingNet(nn.Sequential):
    fails = False

    def forward(self, images):
        if self.fails:
            raise ArithmeticError("planted")
        return super().forward(images.flatten(1))


def started(level, device="cpu"):
    torch.manual_seed(0)
    net = FailingNet(nn.Linear(64, 99), nn.BatchNorm1d(99), nn.ReLU(), nn.Linear(99, 40), nn.Linear(40, 5)).to(device)
    return amp.initialize(net, torch.optim.SGD(net.parameters(), lr=0.1), opt_level=level, verbosity=0)


def hooks(net):
    return sum(len(inner._forward_hooks) + len(inner._forward_pre_hooks) for inner in net.modules())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("device", DEVICES)
def test_the_first_forward_is_looked_at_and_nothing_else_changes(level, device):
    batch = partial(images, device=device)
    net, optimizer = started(level, device)
    losses, plain = train(net, optimizer, 3, batch), weights(net)
    amp.restore()
    with amp.record() as run:
        net, optimizer = started(level, device)
        before, net.fails = hooks(net), True
        with pytest.raises(ArithmeticError):
            net(batch(0)[0])
        assert hooks(net) == before
        net.fails = False
        assert train(net, optimizer, 3, batch) == losses and hooks(net) == before
    assert same(weights(net), plain) and hooks(net) == before - 1  # the recorder's own
    assert [line.startswith(LINE) for line in run.advice] == ([] if level == "O0" else [True])


def test_without_a_gpu_nothing_is_said(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(shapes, "_MULTIPLY_ADDS", 0)
    with amp.record() as run:
        train(*started("O4"), 2)
    assert run.advice == [] and run.steps == 2


@pytest.mark.parametrize("inside", [False, True])
def test_compiled_models_are_left_alone(inside, fresh_compiler):
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph

    net, optimizer = started("O4")
    called = net
    if inside:
        net[0] = torch.compile(net[0], backend=backend)
    else:
        called = torch.compile(net, backend=backend)
    with amp.record() as run:
        train(called, optimizer, 3)
    assert len(graphs) == 1 and run.advice == [] and run.steps == 3
