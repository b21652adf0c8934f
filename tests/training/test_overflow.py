"""Skipped steps: what causes one, what it must not change, how it can be read."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
import training
from crossed import crossed
from training import backward, linear

from amp_patch import amp


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_scheduler_built_before_or_after_initialize_works_and_does_not_warn(level, when):
    model = linear([[1.0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if when == "before":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    if when == "after":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for value, skipped, rate in ((math.inf, True, 0.5), (1.0, False, 0.25)):  # a warning would be an error here
        optimizer.zero_grad()
        backward(model(torch.tensor([[value]])).sum() / 2, optimizer)
        optimizer.step()
        scheduler.step()
        assert optimizer._amp_stash.step_skipped is skipped
        assert optimizer.param_groups[0]["lr"] == rate
    assert model.weight.item() == 0.75  # one step, at rate 0.5, of gradient 0.5


class Thorough(torch.optim.Optimizer):
    """An optimizer with a step count in an attribute and a sum in a tensor; it divides by the number of gradients."""

    def __init__(self, params, lr=1.0):
        super().__init__(params, {"lr": lr, "sum": torch.zeros(())})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            grads = [p.grad for p in group["params"] if p.grad is not None]
            group["sum"] += sum(grad.sum() for grad in grads) / len(grads)
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"])


@pytest.mark.parametrize("scheduled", ["never", "before", "after"])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_skipped_step_of_an_optimizer_that_is_not_torch_s_is_not_taken_at_all(level, scheduled):
    model = linear([[1.0]])
    optimizer, told = Thorough(model.parameters()), []
    optimizer.register_step_post_hook(lambda *_: told.append(optimizer.steps))
    if scheduled == "before":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=1.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
    if scheduled == "after":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=1.0)
    for value, steps in ((0.5, 1), (math.inf, 1), (0.25, 2)):
        optimizer.zero_grad()
        backward(model(torch.full((1, 1), value)).sum(), optimizer)
        optimizer.step()
        if scheduled != "never":
            scheduler.step()  # it warns of schedules without steps, and a warning is an error here
        assert optimizer.steps == steps and optimizer._amp_stash.step_skipped is (value == math.inf)
    assert model.weight.item() == 0.25 and optimizer.param_groups[0]["sum"].item() == 0.75 and told == [1, 1, 2]
    amp.restore()
    optimizer.zero_grad()
    model(torch.full((1, 1), 0.25)).sum().backward()
    optimizer.step()
    assert optimizer.steps == 3 and model.weight.item() == 0.0 and told == [1, 1, 2, 3]


class Raising(torch.optim.SGD):
    """Raises in the middle of a step while `broken`."""

    broken = False

    def step(self, closure=None):
        if self.broken:
            raise KeyError("planted")
        return super().step(closure)


@crossed({"again": ["retry", "scale_loss", "grad_scaler"], "value": [0.5, math.inf], "level": training.LEVELS})
def test_a_step_that_an_exception_left_is_over(level, value, again):
    model = linear([[1.0]])
    optimizer = Raising(model.parameters(), lr=1.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)

    def scaled_backward(value: float) -> None:
        optimizer.zero_grad()
        backward(model(torch.full((1, 1), value)).sum() / 4, optimizer)

    scaled_backward(value)
    optimizer.broken = True
    skipped = value == math.inf and level in ("O1", "O2")
    with nullcontext() if skipped else pytest.raises(KeyError):
        torch.optim.Optimizer.profile_hook_step(Raising.step)(optimizer)
    optimizer.broken = False
    if again == "retry":
        if not skipped:
            optimizer.step()
        if level not in ("O0", "O3", "O4", "O5"):  # the loss is scaled, and the overflow seen
            assert model.weight.item() == (1.0 if value == math.inf else 0.875)
        return
    if again == "scale_loss":
        scaled_backward(0.5)
        optimizer.step()
    else:
        scaler = amp.GradScaler("cpu", init_scale=8.0)
        optimizer.zero_grad()
        scaler.scale(model(torch.full((1, 1), 0.5)).sum() / 4).backward()
        assert scaler.step(optimizer) is True
    assert model.weight.item() == 0.875
    assert next(iter(amp.master_params(optimizer))).item() == 0.875
