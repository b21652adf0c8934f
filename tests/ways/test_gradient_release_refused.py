"""What `gradient_release=True` refuses, by name and before anything is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from released import MAKERS, OPTIM, start, twice_checkpointed
from split_masters import loss_of, net
from torch import nn
from training import backward, same

from amp_patch import amp
from amp_patch.optimizers import FusedLAMB
from amp_patch.support import device_sync


@pytest.mark.parametrize(
    ("make", "options", "match"),
    [
        (MAKERS["AdamW"], {"opt_level": "O0"}, "contradicts opt_level 'O0'.*use O4 or O5"),
        (MAKERS["AdamW"], {"opt_level": "O1"}, "contradicts opt_level 'O1' with loss_scale=dynamic.*use O4 or O5"),
        (MAKERS["AdamW"], {"loss_scale": 128.0}, "with loss_scale=128.0.*checks gradients"),
        (MAKERS["AdamW"], {"skip_nonfinite": True}, "skip_nonfinite=True.*checks gradients"),
        (OPTIM.LBFGS, {"opt_level": "O4"}, "LBFGS.*one direction is made of all gradients"),
        (FusedLAMB, {}, "FusedLAMB.*its class is not one of torch.optim"),
        (lambda p: OPTIM.Adam(p, capturable=True), {}, "Adam.*capturable=True"),
    ],
)
def test_optimizers_that_cannot_step_in_backward_are_refused_at_once_by_name(make, options, match):
    model = net()
    with pytest.raises(ValueError, match=f"gradient_release=True.*{match}"):
        amp.initialize(
            model,
            make(model.parameters()),
            **{"opt_level": "O5", "gradient_release": True, "verbosity": 0} | options,
        )
    assert all(p.dtype is torch.float32 and not p._post_accumulate_grad_hooks for p in model.parameters())


def test_parameters_of_two_optimizers_are_refused():
    model = net()
    optimizers = [OPTIM.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    with pytest.raises(ValueError, match="not for parameters of two optimizers"):
        amp.initialize(model, optimizers, opt_level="O4", gradient_release=True)


@pytest.mark.parametrize("level", ["O4", "O5"])
@pytest.mark.parametrize("given", ["params", "masters"])
def test_clipping_is_refused(level, given):
    model, optimizer = start(MAKERS["AdamW"], level)
    backward(loss_of(model, 0), optimizer)
    params = list(model.parameters() if given == "params" else amp.master_params(optimizer))
    for clip in (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_):
        with pytest.raises(RuntimeError, match="clip_grad: with gradient_release=True"):
            clip(params, 1.0)
    others = nn.Linear(2, 2)
    others(torch.ones(1, 2)).sum().backward()
    nn.utils.clip_grad_norm_(others.parameters(), 1.0)


@pytest.mark.parametrize("level", ["O4", "O5"])
def test_accumulation_is_refused_before_anything_is_written(level):
    model, optimizer = start(MAKERS["AdamW"], level)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="delay_unscale=True leaves for the next micro-batch"):
        backward(loss_of(model, 0), optimizer, delay_unscale=True)
    assert same(model.parameters(), before)
    backward(loss_of(model, 0), optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(
        RuntimeError, match=r"has stepped 6 parameters of this AdamW.*call optimizer.step\(\) after each"
    ):
        backward(loss_of(model, 1), optimizer)
    assert same(model.parameters(), before)
    optimizer.step()
    backward(loss_of(model, 1), optimizer)


def two_passes(model: Any, optimizer: Any) -> None:
    loss = model(torch.randn(4, 16)).mean() * model[3].bias.sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        model[3].bias.sum().backward()
        scaled.backward()


def in_a_closure(model: Any, optimizer: Any) -> None:
    optimizer.step(lambda: backward(loss_of(model, 0), optimizer))


def a_graph_of_gradients(model: Any, optimizer: Any) -> None:
    with amp.scale_loss(loss_of(model, 0), optimizer) as scaled:
        scaled.backward(create_graph=True)


def in_a_capture(model: Any, optimizer: Any) -> None:
    with amp.scale_loss(loss_of(model, 0), optimizer) as scaled, pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_sync, "is_capturing", lambda: True)
        scaled.backward()


def reentrant_checkpoints(model: Any, optimizer: Any) -> None:
    """After the backward of the first, the weight that both share has only a part of its gradient."""
    backward(loss_of(lambda x: twice_checkpointed(model, x, use_reentrant=True), 0), optimizer)


PASSES = {
    two_passes: "has had a gradient in this",
    in_a_closure: r"gets a gradient in a closure of step\(\)",
    a_graph_of_gradients: "create_graph=True",
    in_a_capture: "in the capture of a CUDA graph",
    reentrant_checkpoints: r"backward within backward.*use_reentrant=False",
}


@pytest.mark.parametrize("run", PASSES, ids=lambda run: run.__name__)
def test_a_backward_that_cannot_step_is_refused_before_anything_is_written(run):
    model, optimizer = start(MAKERS["AdamW"], "O4")
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=PASSES[run]):
        run(model, optimizer)
    assert same(list(model.parameters())[:-1], before[:-1])  # the last one had a whole gradient before the second pass


def test_a_sparse_gradient_is_refused():
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 2))
    model, optimizer = start(lambda p: OPTIM.SGD(p, lr=0.1), "O4", model)
    before = model[0].weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"0\.weight gets a sparse gradient"):
        backward(model(torch.tensor([1, 3])).square().mean(), optimizer)
    assert torch.equal(model[0].weight, before)


class Around:
    """A wrapper, as Lookahead is."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def step(self) -> None:
        self.optimizer.step()


def test_a_wrapper_is_refused():
    model = net()
    with pytest.raises(ValueError, match=r"not for an Around around another optimizer.*give the optimizer inside"):
        start(lambda p: Around(OPTIM.SGD(p, lr=0.1)), "O5", model)
    with pytest.raises(TypeError, match="gradient_release is 'yes'"):
        start(MAKERS["SGD"], "O5", model, gradient_release="yes")
    assert all(p.dtype is torch.float32 for p in model.parameters())


def on_ranks() -> None:
    model = net()
    with pytest.raises(ValueError, match=r"gradient_release=True is not for DDP, ZeRO and FSDP2: several processes"):
        start(MAKERS["AdamW"], "O5", model)


@pytest.mark.slow
def test_several_processes_are_refused(ranks):
    ranks(on_ranks)
