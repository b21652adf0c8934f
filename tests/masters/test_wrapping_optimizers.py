"""Wrappers that write into masters: Lookahead, schedule-free optimizers."""

from __future__ import annotations

import pytest
import torch
from crossed import crossed
from small_trainings import LEVELS_WITH_MASTERS, output
from training import LEVELS, backward, linear

from amp_patch import amp


class Lookahead:
    """Zhang et al. 2019 (arXiv:1907.08610) with k = 2 and alpha = 1/2, around an optimizer that it keeps."""

    def __init__(self, optimizer, put):
        self.optimizer, self.put, self.steps, self.slow = optimizer, put, 0, {}
        self.param_groups = optimizer.param_groups

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self):
        slow = [self.slow.setdefault(id(p), p.detach().clone()) for p in self.param_groups[0]["params"]]
        self.optimizer.step()
        self.steps += 1
        if self.steps % 2 == 0:
            for p, s in zip(self.param_groups[0]["params"], slow, strict=True):
                if p.grad is None:  # as of a frozen one
                    continue
                with torch.no_grad():
                    s.add_(p - s, alpha=0.5)
                    self.put(p, s)
                    self.slow[id(p)] = s.clone()


class LookaheadOptimizer(Lookahead, torch.optim.Optimizer):
    """The same, as an Optimizer whose constructor does not call `Optimizer.__init__`, as in public packages."""


def put_copy(p, slow):
    p.copy_(slow)


def put_data_copy(p, slow):
    p.data.copy_(slow)


def put_data(p, slow):
    p.data = slow


def four_steps(model, lookahead):
    seen = []
    for gradient in (0.5, 0.25, 0.5, 0.125):
        lookahead.zero_grad()
        out = model(torch.full((1, 1), gradient))
        backward(out.sum(), lookahead)
        lookahead.step()
        seen.append(output(model))
    return seen


@crossed(
    {
        "level": LEVELS,
        "when": ["given", "put around afterwards"],
        "kind": [Lookahead, LookaheadOptimizer],
        "put": [put_copy, put_data_copy, put_data],
    }
)
def test_lookahead_equals_fp32(level, when, kind, put):
    model = linear([[4.0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if when == "given":
        model, lookahead = amp.initialize(model, kind(optimizer, put), opt_level=level, loss_scale=64.0)
    else:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0)
        lookahead = kind(optimizer, put)
    # 4 - 3/4 = 3.25 is met half way, at 3.625; so is that less 5/8, at 3.3125.
    assert four_steps(model, lookahead) == [3.5, 3.625, 3.125, 3.3125]


@pytest.mark.parametrize("level", LEVELS_WITH_MASTERS)
@pytest.mark.parametrize("scaled_by", ["scale_loss", "GradScaler"])
def test_gradients_that_a_wrapper_saw_are_gone_for_the_next_step(level, scaled_by):
    model = linear([[4.0]])
    lookahead = Lookahead(torch.optim.SGD(model.parameters(), lr=1.0), put_copy)
    model, lookahead = amp.initialize(model, lookahead, opt_level=level, loss_scale=64.0)
    scaler = amp.GradScaler("cpu", init_scale=64.0)
    (master,) = amp.master_params(lookahead)
    for expected in (3.5, 3.5, 3.0):  # the second is met half way: 4 - 1, and 4
        out = model(torch.full((1, 1), 0.5)).sum()  # nothing clears the gradients
        if scaled_by == "scale_loss":
            backward(out, lookahead)
        else:
            scaler.scale(out).backward()
            scaler.unscale_(lookahead.optimizer)
        lookahead.step()
        if scaled_by == "GradScaler":
            scaler.update()
        assert master.grad is not None and output(model) == expected
    lookahead.step()  # without a backward, nothing
    assert master.grad is None
    master.grad = torch.ones(1, 1)  # a gradient of the script's own
    lookahead.optimizer.step()
    assert output(model) == 2.0
