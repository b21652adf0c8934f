"""`initialize(skip_nonfinite=True)`: gradients that are not finite skip the step where no loss is scaled too."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
import torch_optimizers
import training
from conftest import DEVICES
from crossed import crossed
from small_trainings import TRAININGS, every_training
from torch import Tensor, nn
from training import assert_unchanged, backward, linear, same, snapshot

from amp_patch import amp

OPTIM = torch.optim

# In one pass, in portions, by itself, with our kernels, in a wrapper.
MAKERS = {
    **torch_optimizers.MAKERS,
    "SGD, fused": lambda p: OPTIM.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "AdamW": lambda p: OPTIM.AdamW(p, lr=1e-2, eps=1e-4, weight_decay=0.1),
    "RMSprop": lambda p: OPTIM.RMSprop(p, lr=1e-2, eps=1e-4, momentum=0.9),
    "NAdam": lambda p: OPTIM.NAdam(p, lr=1e-2, eps=1e-4, foreach=True),
}

ON = {"skip_nonfinite": True, "verbosity": 0}


def start_convnet(maker: Any, device: str = "cpu", **options: Any) -> Any:
    """Return model and optimizer. The batch norm's statistics do not change, because NaN inputs would ruin them."""
    model = training.convnet(device=device)
    model.body[1].eval()
    return amp.initialize(model, maker(model.parameters()), **{"verbosity": 0} | options)


def loss_of(model: nn.Module, step: int, device: str = "cpu") -> Tensor:
    inputs, targets = training.images(step, device)
    return nn.functional.cross_entropy(model(inputs), targets)


def iterate(model: nn.Module, optimizer: Any, step: int, factor: float = 1.0, device: str = "cpu") -> None:
    optimizer.zero_grad()
    backward(loss_of(model, step, device) * factor, optimizer)
    optimizer.step()


def skipped(optimizer: Any) -> bool:
    return getattr(optimizer, "optim", optimizer)._amp_stash.step_skipped


@pytest.mark.parametrize("device", DEVICES)
# Torch's fused SGD of FP16 on a CPU comes to other numbers each time (2.13).
@crossed({"options": TRAININGS, "maker": MAKERS}, meet=1, impossible=[("O3", "SGD, fused")])
def test_a_step_of_gradients_that_are_not_finite_changes_nothing(maker, options, device):
    model, optimizer = start_convnet(maker, device, **options, **ON)
    iterate(model, optimizer, 0, device=device)
    assert not skipped(optimizer)
    for value in (math.nan, math.inf):
        before = snapshot(model, optimizer)
        iterate(model, optimizer, 7, value, device)
        assert skipped(optimizer)
        assert_unchanged(before, snapshot(model, optimizer))
    for step in (1, 2):
        iterate(model, optimizer, step, device=device)
        assert not skipped(optimizer)
    learned = snapshot(model, optimizer)

    model, optimizer = start_convnet(maker, device, **options)  # neither checked nor given the bad batches
    for step in range(3):
        iterate(model, optimizer, step, device=device)
    assert_unchanged(snapshot(model, optimizer), learned)


@crossed(
    {
        "options": TRAININGS,
        "value": [math.nan, math.inf, -math.inf],
        "where": ["body.0.weight", "body.1.bias", "head.bias"],
    }
)
def test_one_element_is_enough(options, value, where):
    model, optimizer = start_convnet(training.SGD, **options, **ON)
    bad: list[float] = []

    def spoil(grad: Tensor) -> Tensor:
        flat = grad.clone().flatten()
        flat[-1:] = torch.tensor(bad or flat[-1:].tolist())
        return flat.view_as(grad)

    model.get_parameter(where).register_hook(spoil)
    iterate(model, optimizer, 0)
    before = snapshot(model, optimizer)
    bad.append(value)
    iterate(model, optimizer, 1)
    assert skipped(optimizer)
    assert_unchanged(before, snapshot(model, optimizer))


def accumulated(model: nn.Module, optimizer: Any, step: int) -> None:
    for micro_batch in range(3):
        backward(loss_of(model, 3 * step + micro_batch) / 3, optimizer)


def delayed(model: nn.Module, optimizer: Any, step: int) -> None:
    for micro_batch in range(3):
        backward(loss_of(model, 3 * step + micro_batch) / 3, optimizer, delay_unscale=micro_batch != 1)


def of_two_losses(model: nn.Module, optimizer: Any, step: int) -> None:
    backward(loss_of(model, step), optimizer, loss_id=1)
    backward(loss_of(model, step + 50), optimizer)


def clipped(model: nn.Module, optimizer: Any, step: int) -> None:
    backward(loss_of(model, step), optimizer)
    for limit in (0.5, 0.1):
        nn.utils.clip_grad_norm_(amp.master_params(optimizer), limit)


@crossed(
    {
        "options": TRAININGS,
        "way": [accumulated, delayed, of_two_losses, clipped],
        "name": ["SGD", "AdamW", "NAdam", "FusedLAMB"],
    }
)
def test_finite_gradients_come_to_the_same_bits(way, options, name):
    def learned(**more: Any) -> Any:
        model, optimizer = start_convnet(MAKERS[name], num_losses=2, **options, **more)
        for step in range(4):
            optimizer.zero_grad()
            way(model, optimizer, step)
            optimizer.step()
        return snapshot(model, optimizer)

    assert_unchanged(learned(), learned(skip_nonfinite=True))


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(5, 3, sparse=True)

    def forward(self, words: Tensor) -> Tensor:
        return self.table(words).square().sum()


@pytest.mark.parametrize("level", ["O0", "O4", "O5"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1.5e38])
def test_sparse_gradients_are_checked_and_left_as_they_are(level, bad):
    """If a word occurs twice, its sparse gradient has two rows. Their sum may be infinite although both are finite."""
    words = torch.tensor([1, 3, 1, 0, 1])
    learned = []
    for on in (False, True):
        model = Sparse()
        optimizer = OPTIM.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, skip_nonfinite=on, verbosity=0)
        for _ in range(3):
            optimizer.zero_grad()
            backward(model(words), optimizer)
            backward(model(words), optimizer)
            optimizer.step()
        learned += training.weights(model)
    assert same(learned[:1], learned[1:])
    optimizer.zero_grad()
    backward((model.table(words) * bad).sum(), optimizer)
    optimizer.step()
    assert skipped(optimizer) and same(training.weights(model), learned[1:])


@every_training
def test_messages_come_ever_more_rarely_and_name_the_parameters_in_the_end(options, caplog):
    model, optimizer = start_convnet(training.SGD, **options, skip_nonfinite=True, verbosity=1)
    with caplog.at_level(logging.WARNING, "amp_patch"):
        for step in range(10):
            iterate(model, optimizer, step, math.nan)
    said = "A gradient is not finite: skipped the step (skip {} of loss 0)"
    assert caplog.messages[:-1] == [said.format(number) for number in (1, 2, 4, 8)]
    assert caplog.messages[-1].startswith(said.format(10) + "; 10 in a row; not finite: ")
    assert "head.weight (NaN)" in caplog.messages[-1]


@every_training
def test_the_state_has_the_form_of_any_and_a_loaded_scale_multiplies_nothing(options):
    model, optimizer = start_convnet(training.SGD, **options, **ON)
    iterate(model, optimizer, 0, math.nan)
    state = amp.state_dict()["loss_scaler0"]
    chance = state.pop("stochastic_rounding", None)
    assert state == {"loss_scale": 1.0, "unskipped": 0}
    assert (chance is not None) is (options.get("master_weights") == "stochastic")
    assert chance is None or set(chance["steps"]) == {0}, "a skipped step draws nothing"
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 3}})
    other, plain = start_convnet(training.SGD, **options)
    for each in ((model, optimizer), (other, plain)):
        each[1].zero_grad()
        backward(loss_of(each[0], 1), each[1], delay_unscale=True)
        iterate(*each, 2)
    assert not skipped(optimizer)
    assert_unchanged(snapshot(other, plain), snapshot(model, optimizer))


def test_a_parameter_that_no_optimizer_holds_loses_a_gradient_that_is_not_finite():
    model = nn.ModuleDict({"own": linear([[1.0]]), "free": linear([[1.0]])})
    model, optimizer = amp.initialize(model, training.SGD(model["own"].parameters()), opt_level="O0", **ON)
    for value, wanted in ((math.nan, 0.0), (1.0, 1.0)):
        backward((model["free"](torch.ones(1, 1)) * value + model["own"](torch.ones(1, 1))).sum(), optimizer)
        assert model["free"].weight.grad.item() == wanted


@every_training
def test_closures_and_steps_in_the_body_are_refused(options):
    model, optimizer = start_convnet(training.SGD, **options, **ON)
    with pytest.raises(RuntimeError, match=r"a closure .* with skip_nonfinite=True"):
        optimizer.step(lambda: None)
    before = snapshot(model, optimizer)
    with (
        pytest.raises(RuntimeError, match="called in the body of scale_loss, where its gradients are unchecked"),
        amp.scale_loss(loss_of(model, 0), optimizer) as loss,
    ):
        loss.backward()
        optimizer.step()
    assert_unchanged(before, snapshot(model, optimizer))
    iterate(model, optimizer, 0)
    assert not skipped(optimizer)


@pytest.mark.parametrize("level", ["O0", "O4"])
def test_optimizers_that_step_in_backward_are_refused_before_any_change(level):
    model = linear([[1.0]])
    with pytest.raises(ValueError, match=r"LBFGS .* without skip_nonfinite"):
        amp.initialize(model, OPTIM.LBFGS(model.parameters()), opt_level=level, skip_nonfinite=True)
    amp.initialize(model, OPTIM.LBFGS(model.parameters()), opt_level=level)
    model = linear([[1.0]])
    model.weight._in_backward_optimizers = [object()]
    with pytest.raises(ValueError, match=r"steps parameter 'weight' .* \(without skip_nonfinite\)"):
        amp.initialize(model, training.SGD(model.parameters()), opt_level=level, skip_nonfinite=True)
    amp.initialize(model, training.SGD(model.parameters()), opt_level=level)
