"""A training that is copied or pickled, and a second `initialize`, keep all state of the training."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import three_ways
import torch
from torch import nn
from training import backward, masters_of, skipped, through_pickle

from amp_patch import amp
from amp_patch.watch import questions

COPIES = {"deepcopy": copy.deepcopy, "pickle": through_pickle}
both_ways = pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
WITH_MASTERS = {
    "O2": {"opt_level": "O2"},
    "O5": {"opt_level": "O5"},
    "split": {"opt_level": "O5", "master_weights": "split"},
    "stochastic": {"opt_level": "O5", "master_weights": "stochastic"},
}
every_master = pytest.mark.parametrize("options", WITH_MASTERS.values(), ids=WITH_MASTERS)


def sgd(*params: Any) -> torch.optim.SGD:
    return torch.optim.SGD([p for some in params for p in some], lr=0.5)


def start_all(model: nn.Module, optimizers: Any, **options: Any) -> tuple[Any, Any]:
    return amp.initialize(model, optimizers, verbosity=0, **options)


def ones(*layers: nn.Module) -> nn.Sequential:
    """Layers whose weights are 1: gradients of sums are whole numbers."""
    model = nn.Sequential(*layers)
    for param in model.parameters():
        nn.init.ones_(param)
    return model


@both_ways
def test_copies_of_a_copy_have_the_level_s_types_where_the_optimizer_has_no_cast_parameter(copied: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1).requires_grad_(False))
    pair = start_all(model, sgd(model[0].parameters()), opt_level="O2", keep_fp32="0")
    for _ in range(3):
        pair = copied(pair)
        assert [param.dtype for param in pair[0].parameters()] == [torch.float32] * 2 + [torch.float16] * 2


# ---------------------------------------------------------------------------------------------------------------------
# The other optimizers of the training


@both_ways
@pytest.mark.parametrize("level", ["O0", "O1", "O5"])
def test_a_copy_is_in_the_training_before_its_first_backward(copied: Any, level: str) -> None:
    model = ones(nn.Linear(2, 2))
    pair = start_all(model, sgd(model.parameters()), opt_level=level)
    _, optimizer = copied(pair)
    assert questions.policy_of(optimizer).opt_level == level
    optimizer.step()
    assert not skipped(optimizer)


@both_ways
@pytest.mark.parametrize("level", ["O0", "O1"])
def test_a_copied_training_unscales_the_gradients_of_its_other_optimizers(copied: Any, level: str) -> None:
    model = ones(nn.Linear(2, 2), nn.Linear(2, 1))
    model, optimizers = start_all(
        model, [sgd(layer.parameters()) for layer in model], opt_level=level, loss_scale=1024.0
    )
    model, (first, second) = copied((model, optimizers))
    backward(model(torch.ones(3, 2)).sum(), first)
    assert model[1].bias.grad.tolist() == [3.0]
    second.step()
    assert model[1].bias.item() == 1 - 0.5 * 3


# ---------------------------------------------------------------------------------------------------------------------
# initialize, once more


@pytest.mark.extension
@every_master
def test_an_optimizer_that_is_initialized_again_steps_in_one_pass(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = three_ways.spied_kernels(monkeypatch)
    model = ones(nn.Linear(1, 1, bias=False))
    model, optimizer = start_all(model, sgd(model.parameters()), **options)
    for _ in range(3):
        start_all(model, optimizer, loss_scale=4.0, **options)
        backward(model(torch.ones(1, 1)).sum(), optimizer)
        optimizer.step()
    assert calls == [1, 1, 1] and masters_of(optimizer)[0].item() == -0.5


def test_a_level_without_masters_keeps_none_of_an_earlier_one() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0001)
    model, optimizer = start_all(model, sgd(model.parameters()), opt_level="O2")
    master = weakref.ref(next(amp.master_params(optimizer)))
    start_all(model, optimizer, opt_level="O3")
    gc.collect()
    assert master() is None and model.state_dict()["weight"].item() == model.weight.item() == 1.0
