"""Gradients of masters that wait in low precision: each read returns unscaled FP32 gradients."""

from __future__ import annotations

import math

import pytest
import torch
from small_trainings import backward_row, master_of
from torch import nn
from training import backward, linear

from amp_patch import amp

pytestmark = pytest.mark.extension

HALF = {"O2": torch.float16, "O5": torch.bfloat16}
LEVELS = pytest.mark.parametrize("level", HALF)
LOOKS = {
    "the parameter": lambda model, optimizer: model.weight.grad,
    "a master": lambda model, optimizer: next(amp.master_params(optimizer)).grad,
    "a group": lambda model, optimizer: optimizer.param_groups[0]["params"][0].grad,
    "the norm": lambda model, optimizer: nn.utils.get_total_norm([p.grad for p in amp.master_params(optimizer)]),
    "another clip": lambda model, optimizer: nn.utils.clip_grad_value_(model.parameters(), 1e9),
}


def start_row(level="O2", optimizer=torch.optim.SGD, device="cpu", **options):
    """A model of one weight, [[1, 2]], whose gradient is [[3, -5]]."""
    model = linear([[1.0, 2.0]], device)
    model, optimizer = amp.initialize(
        model, optimizer(model.parameters(), lr=0.5), opt_level=level, loss_scale=128.0, verbosity=0, **options
    )
    return model, optimizer


@LEVELS
@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_a_read_returns_fp32_unscaled_numbers_that_the_step_uses(level, look):
    model, optimizer = start_row(level)
    backward_row(model, optimizer)
    look(model, optimizer)
    grad = master_of(optimizer).grad
    assert grad.dtype is torch.float32 and grad.tolist() == [[3, -5]] and master_of(optimizer).grad is grad
    grad.mul_(2)
    optimizer.step()
    assert model.weight.tolist() == [[-2, 7]]


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.RMSprop])
def test_a_step_and_a_clip_find_what_a_backward_through_a_master_has_added(make, clips):
    def train(looks):
        model, optimizer = start_row(optimizer=make)
        backward_row(model, optimizer)
        (master_of(optimizer) * torch.tensor([[10.0, 20.0]])).sum().backward()
        if looks:
            assert master_of(optimizer).grad.tolist() == [[13, 15]]
        if clips:
            assert nn.utils.clip_grad_norm_(model.parameters(), 1.0).item() == pytest.approx(math.sqrt(394))
        optimizer.step()
        return model.weight

    assert torch.equal(train(looks=False), train(looks=True))


@pytest.mark.parametrize("max_norm", [100.0, 1.0])
@pytest.mark.parametrize("whose", ["model's", "masters"])
@LEVELS
def test_clipping_by_norm_gives_the_norm_and_scales_what_is_stepped(level, whose, max_norm):
    model, optimizer = start_row(level)
    for _ in range(2):  # the second norm comes from the overflow check
        backward_row(model, optimizer)
        params = model.parameters() if whose == "model's" else amp.master_params(optimizer)
        norm = nn.utils.clip_grad_norm_(params, max_norm)
        assert norm.item() == pytest.approx(math.sqrt(34))
        factor = min(1.0, max_norm / (norm.item() + 1e-6))
        copied = master_of(optimizer).detach().clone()
        optimizer.step()
        wanted = copied - 0.5 * factor * torch.tensor([[3.0, -5.0]])
        torch.testing.assert_close(master_of(optimizer).detach(), wanted, rtol=1e-6, atol=1e-6)
    backward_row(model, optimizer, math.inf)
    assert not nn.utils.clip_grad_norm_(model.parameters(), max_norm).isfinite()


def test_a_norm_that_is_not_finite_is_an_error_where_it_shall_be():
    model, optimizer = start_row("O5")
    backward_row(model, optimizer)
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True).item() == pytest.approx(34**0.5)
    optimizer.zero_grad()
    backward_row(model, optimizer, math.inf)
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    assert not master_of(optimizer).grad.isfinite().any()


def test_a_parameter_that_has_left_the_groups_is_none_of_the_optimizers_any_more():
    model = nn.Sequential(linear([[3.0]]), linear([[2.0]]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale=8.0, verbosity=0)
    optimizer.param_groups[0]["params"].pop(0)
    model[0].weight.register_hook(lambda grad: grad * math.inf)
    backward(model(torch.ones(1, 1)).sum(), optimizer)
    optimizer.step()
    assert [p.item() for p in model.parameters()] == [3, -1]
