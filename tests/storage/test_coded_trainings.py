"""Trainings with `optimizer_state="8bit"`: saved, copied, restored, interrupted, on several processes, and refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from coded_states import (
    IN_ONE_PASS,
    MAKERS,
    OPTIM,
    coded,
    go_on,
    in_codes,
    interrupt,
    loss_of,
    net,
    start,
    state_of,
)
from conftest import DEVICES
from training import backward, masters_of

from amp_patch import amp, multi_tensor, optimizers

one_of_each_way = pytest.mark.parametrize("make", [MAKERS[name] for name in ("AdamW", "SGD", "NAdam")])

# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints, copies, and the way back


@pytest.mark.extension
@pytest.mark.parametrize("device", [d for d in DEVICES if d in getattr(multi_tensor.extension(), "devices", ())])
@pytest.mark.parametrize("make", [MAKERS[name] for name in IN_ONE_PASS], ids=IN_ONE_PASS)
def test_the_kernels_step_codes_without_a_state_in_fp32(make, device, monkeypatch):
    with multi_tensor.use_backend("torch"):
        losses = go_on(*start(make), range(4))
    amp.restore()
    model, optimizer = start(make, net().to(device))
    found = go_on(model, optimizer, range(2))
    with monkeypatch.context() as patches:
        patches.setattr(multi_tensor, "multi_tensor_decode", lambda *_: pytest.fail("a state was decoded"))
        found += go_on(model, optimizer, range(2, 4))
    assert coded(optimizer)
    torch.testing.assert_close(found, losses, rtol=5e-2, atol=1e-2)


@one_of_each_way
def test_plain_torch_steps_it_too(make):
    with multi_tensor.use_backend("torch"):
        model, optimizer = start(make)
        losses = go_on(model, optimizer, range(4))
        assert coded(optimizer)
    amp.restore()
    model, optimizer = start(make)
    torch.testing.assert_close(go_on(model, optimizer, range(4)), losses, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("place", range(0, 120, 19))
@one_of_each_way
def test_an_interrupt_leaves_each_parameter_stepped_or_not_and_the_next_step_goes_on(make, place):
    """After Ctrl-C at a line of amp_patch in the step, each stored tensor has the values before or after the step."""

    def until_the_step() -> tuple[Any, Any]:
        model, optimizer = start(make)
        go_on(model, optimizer, range(2))
        optimizer.zero_grad()
        backward(loss_of(model, 2), optimizer)
        return model, optimizer

    before, after, (model, optimizer) = until_the_step(), until_the_step(), until_the_step()
    after[1].step()
    interrupt(place, optimizer.step)
    for ours, old, new in zip(masters_of(optimizer), *(masters_of(o) for _, o in (before, after)), strict=True):
        assert torch.equal(ours, old) or torch.equal(ours, new)
    for ours, old, new in zip(*(state_of(o) for o in (optimizer, before[1], after[1])), strict=True):
        assert torch.equal(ours, old) or torch.equal(ours, new) or torch.equal(in_codes(ours), new)
    go_on(model, optimizer, range(3, 4))
    assert coded(optimizer)


# ---------------------------------------------------------------------------------------------------------------------
# Where it is refused


def in_a_subclass(params: Any) -> Any:
    class Mine(OPTIM.NAdam):
        pass

    return Mine(params)


REFUSED = {
    "LBFGS": (OPTIM.LBFGS, "LBFGS.*one direction is made of all gradients"),
    "a subclass": (in_a_subclass, "Mine.*its class is not one of torch.optim"),
    "fused": (lambda p: OPTIM.Adagrad(p, fused=True), "Adagrad.*fused=True"),
    "a tensor": (lambda p: OPTIM.NAdam(p, lr=torch.tensor(0.1), foreach=False), "NAdam.*a setting is a tensor"),
    "differentiable": (lambda p: OPTIM.Adam(p, differentiable=True), "Adam.*differentiable=True"),
    "FusedLAMB": (optimizers.FusedLAMB, "FusedLAMB.*its class is not one of torch.optim"),
    "sparse": (OPTIM.SparseAdam, "SparseAdam.*it takes sparse gradients alone"),
}


@pytest.mark.parametrize(("make", "match"), REFUSED.values(), ids=REFUSED)
def test_optimizers_that_cannot_are_refused_by_name(make, match):
    model = net()
    optimizer = make(model.parameters())
    with pytest.raises(
        ValueError, match=f"optimizer_state='8bit' is not for this {match}.*leave optimizer_state at None"
    ):
        amp.initialize(model, optimizer, opt_level="O4", optimizer_state="8bit", verbosity=0)
    assert type(optimizer).__dict__.get("_amp_base") is None and model[0].weight.dtype is torch.float32
