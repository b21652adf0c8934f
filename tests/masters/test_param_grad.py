"""`param.grad` of a cast parameter, after `scale_loss`: the gradient of its master, FP32, unscaled and live."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from conftest import DEVICES
from crossed import crossed
from small_trainings import backward_row, master_of
from torch import Tensor, nn
from training import backward, linear

from amp_patch import amp

SCALE = 128.0
RAW = [[3.0, -5.0]]  # the gradient of the one weight
LEVELS = pytest.mark.parametrize(
    ("level", "options"), [("O2", {}), ("O5", {}), ("O5", {"master_weights": "split"})], ids=["O2", "O5", "split"]
)
# One that steps in one pass, one that steps in portions, and one whose class is not torch's.
OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.1),
    "another's": lambda params: Descent(params, {"lr": 0.5}),
}


class Descent(torch.optim.Optimizer):
    """Plain gradient descent, by somebody else."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad * group["lr"])


def start_level(level, options, optimizer=OPTIMIZERS["AdamW"], device="cpu"):
    model = linear([[1.0, 2.0]], device)
    options = {**options, **({"loss_scale": SCALE} if level == "O2" else {})}
    return amp.initialize(model, optimizer(model.parameters()), opt_level=level, verbosity=0, **options)


def assign(value):
    def edit(param: Tensor) -> None:
        param.grad = None if value is None else value.to(param.device)

    return edit


EDITS = {
    "nothing": (lambda param: param.grad, RAW),
    "in place": (lambda param: param.grad.mul_(0.5), [[1.5, -2.5]]),
    "through .data": (lambda param: param.grad.data.div_(2), [[1.5, -2.5]]),
    "detached": (lambda param: param.grad.detach().copy_(torch.tensor([[0.0, 7.0]])), [[0.0, 7.0]]),
    "zeroed": (lambda param: param.grad.zero_(), [[0.0, 0.0]]),
    "another": (assign(torch.tensor([[2.0, 1.0]])), [[2.0, 1.0]]),
    "another in low precision": (assign(torch.tensor([[2.0, 1.0]], dtype=torch.bfloat16)), [[2.0, 1.0]]),
    "none": (assign(None), None),
    "deleted": (lambda param: delattr(param, "grad"), None),
}


@crossed({"optimizer": list(OPTIMIZERS), "edit": list(EDITS)}, LEVELS)
@pytest.mark.parametrize("device", DEVICES)
def test_edits_of_param_grad_reach_the_step(level, options, optimizer, edit, device):
    """Compare with the optimizer on FP32 weights, given the gradient after the edit."""
    model, ours = start_level(level, options, OPTIMIZERS[optimizer], device)
    plain = nn.Parameter(torch.tensor([[1.0, 2.0]], device=device))
    plains = OPTIMIZERS[optimizer]([plain])
    change, expected = EDITS[edit]
    for _ in range(3):
        backward_row(model, ours)
        change(model.weight)
        plain.grad = None if expected is None else torch.tensor(expected, device=device)
        ours.step()
        plains.step()
        torch.testing.assert_close(master_of(ours).detach(), plain.detach(), rtol=2e-7, atol=0)
        assert torch.equal(model.weight, master_of(ours).to(model.weight.dtype))
        given = None if expected is None else torch.tensor(expected, device=device)
        assert (model.weight.grad is None) if given is None else torch.equal(model.weight.grad, given)


@LEVELS
@pytest.mark.parametrize("clear", ["param", "model", "optimizer"])
def test_cleared_ones_do_not_come_back(level, options, clear):
    model, optimizer = start_level(level, options)
    for _ in range(2):
        backward_row(model, optimizer)
        assert model.weight.grad.tolist() == RAW
        if clear == "param":
            model.weight.grad = None
        else:
            {"model": model, "optimizer": optimizer}[clear].zero_grad()
        assert model.weight.grad is None and master_of(optimizer).grad is None


@LEVELS
def test_a_refused_assignment_changes_nothing(level, options):
    model, optimizer = start_level(level, options)
    backward_row(model, optimizer)
    for wrong in (torch.ones(3), "gradient"):
        with pytest.raises((RuntimeError, TypeError), match=r"size|shape|Tensor"):
            model.weight.grad = wrong
    assert model.weight.grad.tolist() == RAW and master_of(optimizer).grad.tolist() == RAW


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_the_loss_of_another_optimizer_leaves_nothing_that_clipping_or_a_logger_would_find(level):
    model = nn.Sequential(linear([[1.0, 2.0]]), linear([[3.0]]))
    model, (first, second) = amp.initialize(
        model,
        [torch.optim.SGD(layer.parameters(), lr=1.0) for layer in model],
        opt_level=level,
        loss_scale=SCALE,
        verbosity=0,
    )
    backward(model(torch.tensor([[3.0, -5.0]])).float().sum(), first)
    assert model[1].weight.grad is None
    assert nn.utils.clip_grad_norm_(model.parameters(), 1e9).item() == pytest.approx(3 * (3.0**2 + 5.0**2) ** 0.5)
    with pytest.warns(UserWarning, match=r"1\.weight has a gradient on the model that was never gathered"):
        second.step()
    assert model[1].weight.item() == 3.0
    second.step()  # said once for each backward


@LEVELS
@pytest.mark.extension
def test_no_gradient_is_made_without_a_read(level, options):
    model, optimizer = start_level(level, options)
    backward_row(model, optimizer)
    assert master_of(optimizer).waits_alone()
    copy.deepcopy(model), pickle.dumps(model), model.state_dict()
    assert master_of(optimizer).waits_alone()
    optimizer.zero_grad()
    backward_row(model, optimizer)
    model.zero_grad()
    assert not optimizer._amp_stash.masters.waiting


@LEVELS
@pytest.mark.parametrize("when", ["before the step", "after the step"])
def test_a_model_that_has_gradients_is_compiled_in_one_graph(level, options, when, fresh_compiler):
    model, optimizer = start_level(level, options)
    backward_row(model, optimizer)
    if when == "after the step":
        optimizer.step()
    expected = model(torch.ones(1, 2))
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(torch.ones(1, 2)), expected)
    assert model.weight.grad.tolist() == RAW
