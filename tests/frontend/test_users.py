"""What users of Apex's and torch's AMP asked for; each test is named after what it promises.

Numbers in comments are issues of NVIDIA/apex unless a project is named. Promises with a file of their own (overflow,
resume, copies, casts, several processes) are tested there.
"""

from __future__ import annotations

import math

import pytest
import torch
import training
from small_trainings import LEVELS_WITH_MASTERS, SCALED
from torch import nn
from training import LEVELS, backward, linear, skipped

from amp_patch import amp


def step(model, optimizer, number=0):
    inputs, targets = training.images(number)
    loss = nn.functional.cross_entropy(model(inputs), targets) / 8
    backward(loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


# --- state, scope and order of calls ---------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_growing_net_adds_a_param_group_before_or_after_the_first_backward(level, when):  # 292, PR 310
    model = nn.Sequential(linear([[1.0]]))
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=1.0), opt_level=level, loss_scale=64.0
    )
    if when == "after":
        backward(model(torch.zeros(1, 1)).sum(), optimizer)
        optimizer.step()
    layer = linear([[1.0]]).to(model[0].weight.dtype)
    model.append(layer)
    group = {"params": layer.weight, "lr": 0.5}
    optimizer.add_param_group(group)
    assert optimizer.param_groups[1] is group
    added = list(amp.master_params(optimizer))[1]
    assert (added is layer.weight) == (level not in LEVELS_WITH_MASTERS)
    optimizer.zero_grad()
    backward(model(torch.ones(1, 1)).sum(), optimizer)
    optimizer.step()
    assert (model[0].weight.item(), layer.weight.item()) == (0.0, 0.5)
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [layer.weight]})
    assert len(optimizer.param_groups) == 2


class Homemade:
    """No torch Optimizer at all, only its shape."""

    def __init__(self, params):
        self.param_groups = [{"params": list(params)}]

    def step(self):
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p -= p.grad  # with no thought of parameters without gradients

    def zero_grad(self):
        for p in self.param_groups[0]["params"]:
            p.grad = None


@pytest.mark.parametrize("level", LEVELS)
def test_optimizers_by_shape_alone_are_accepted(level):
    model = linear([[1.0]])
    optimizer = Homemade(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
    for value, expected in ((0.5, 0.5), (math.inf, 0.5), (0.25, 0.25)):
        if level not in SCALED and math.isinf(value):
            assert not skipped(optimizer)
        backward(model(torch.full((1, 1), value)).sum(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        assert model.weight.item() == expected
    amp.restore()
    assert type(optimizer) is Homemade and vars(optimizer).keys() == {"param_groups"}
