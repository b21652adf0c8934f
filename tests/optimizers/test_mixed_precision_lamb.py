"""FusedMixedPrecisionLamb: FP32 copies of half parameters, under a GradScaler."""

from __future__ import annotations

import copy
import io

import pytest
import reference_optimizers as reference
import torch
from conftest import DEVICES, DTYPES
from crossed import crossed
from reference_optimizers import parameters
from scaled_loops import skip_if_it_cannot_unscale
from torch import nn

from amp_patch import amp
from amp_patch.optimizers import FusedMixedPrecisionLamb

HALVES = pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
SCALERS = pytest.mark.parametrize("make_scaler", [torch.amp.GradScaler, amp.GradScaler], ids=["torch", "amp"])


def give_gradients(params, step, scale=1.0):
    """Of a few bits, so that scaled ones in a half type are exact."""
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = (torch.randint(-8, 8, p.shape, generator=generator) / 8 * scale).to(p.device, p.dtype)


def everything(optimizer):
    """Copies of all that a step may write."""
    groups = [(torch.tensor(group["lr"]), torch.tensor(group["step"])) for group in optimizer.param_groups]
    params = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    states = [{name: t.clone() for name, t in state.items()} for state in optimizer.state.values()]
    return [*(t for pair in groups for t in pair), *params, *(t for state in states for t in state.values())]


def unchanged(before, optimizer):
    return all(torch.equal(a, b) for a, b in zip(before, everything(optimizer), strict=True))


def step_by(how, scaler, optimizer):
    if how == "scaler.step":
        scaler.step(optimizer)
    else:
        optimizer.step(grad_scaler=scaler)
    scaler.update()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["scaler.step", "step(grad_scaler=)"])
@SCALERS
@HALVES
def test_the_copies_step_as_the_oracle_in_fp64(dtype, make_scaler, how, device):
    skip_if_it_cannot_unscale(make_scaler, dtype, device)
    params = parameters(dtype, device)
    exact, states = [p.detach().double() for p in params], [{} for _ in params]
    optimizer = FusedMixedPrecisionLamb(params, lr=0.02, reduced_precision_dtype=dtype)
    scaler = make_scaler(device, init_scale=64.0)
    for step in range(50):
        scaler.scale(torch.ones((), device=device))
        give_gradients(params, step, 64.0)
        reference.lamb(exact, [p.grad.double() / 64 for p in params], states, step + 1, lr=0.02)
        step_by(how, scaler, optimizer)
    (copies,) = (group["params"] for group in optimizer.param_groups_full_precision)
    for p, copied, oracle in zip(params, copies, exact, strict=True):
        assert copied.dtype is torch.float32 and torch.equal(p, copied.to(dtype))
        assert torch.allclose(copied.double(), oracle, rtol=1e-5, atol=0)
        assert optimizer.state[p]["exp_avg"].dtype is torch.float32


@pytest.mark.parametrize("device", DEVICES)
@crossed(
    SCALERS,
    {"how": ["scaler.step", "step(grad_scaler=)"]},
    pytest.mark.parametrize("first", [True, False], ids=["first", "later"]),
    pytest.mark.parametrize("flags", [{}, {"adam_w_mode": False}, {"weight_decay": 0.0}], ids=str),
)
def test_an_overflow_changes_nothing(make_scaler, how, first, flags, device):
    params = parameters(torch.float16, device)
    optimizer = FusedMixedPrecisionLamb(params, reduced_precision_dtype=torch.float16, **flags)
    scaler = make_scaler(device, init_scale=64.0)

    def one(step, spoilt=None):
        give_gradients(params, step, 64.0)
        if spoilt is not None:
            params[1].grad[3] = spoilt
        scaler.scale(torch.ones((), device=device))
        step_by(how, scaler, optimizer)

    for step in range(0 if first else 3):
        one(step)
    if first:  # make the state
        optimizer.averages(params, "exp_avg"), optimizer.averages(params, "exp_avg_sq")
        optimizer._masters(params)
    before = everything(optimizer)
    for step, spoilt in ((5, float("inf")), (6, float("nan"))):
        one(step, spoilt)
    assert unchanged(before, optimizer)
    assert scaler.get_scale() == 16.0 and optimizer.param_groups[0]["step"] == (0 if first else 3)
    scaler.update(64.0)
    one(7)
    assert not unchanged(before, optimizer) and all(t.isfinite().all() for t in everything(optimizer))
    assert not hasattr(optimizer, "found_inf") and not hasattr(optimizer, "grad_scale")


@HALVES
def test_a_checkpoint_resumes_to_the_bit(dtype):
    params = parameters(dtype)
    optimizer = FusedMixedPrecisionLamb(params, lr=0.02, reduced_precision_dtype=dtype)
    for step in range(3):
        give_gradients(params, step)
        optimizer.step()
    file = io.BytesIO()
    torch.save((optimizer.state_dict(), [p.detach() for p in params]), file)
    file.seek(0)
    state, weights = torch.load(file)
    assert set(state["state"][0]) == {"exp_avg", "exp_avg_sq", "master_param"}
    resumed = [nn.Parameter(w.clone()) for w in weights]
    other = FusedMixedPrecisionLamb(resumed, lr=1.0, reduced_precision_dtype=dtype)
    other.load_state_dict(state)
    for step in range(3, 6):
        for ps, o in ((params, optimizer), (resumed, other)):
            give_gradients(ps, step)
            o.step()
    assert unchanged(everything(other), optimizer)
    twin = copy.deepcopy(optimizer)
    assert twin.reduced_precision_dtype is dtype and unchanged(everything(twin), optimizer)


def test_a_checkpoint_of_apex_has_no_copies_and_makes_them_at_the_next_step():
    params = parameters(torch.float16)
    optimizer = FusedMixedPrecisionLamb(params, reduced_precision_dtype=torch.float16)
    give_gradients(params, 0)
    optimizer.step()
    state = optimizer.state_dict()
    for entry in state["state"].values():
        del entry["master_param"]
    other = FusedMixedPrecisionLamb(params, reduced_precision_dtype=torch.float16)
    other.load_state_dict(state)
    assert other.param_groups_full_precision == [{"params": [None] * 5}] and other.param_groups[0]["step"] == 1
    with torch.no_grad():
        params[0].fill_(0.5)  # a model's checkpoint, loaded last
    params[0].grad = torch.zeros_like(params[0])
    other.param_groups[0]["weight_decay"] = 0.0
    other.state[params[0]]["exp_avg"].zero_()
    other.step()
    assert torch.equal(params[0], torch.full_like(params[0], 0.5))


def test_steps_are_counted_from_the_one_given():
    optimizer = FusedMixedPrecisionLamb(params := parameters(torch.float32), lr=0.5, step=torch.tensor([2]))
    give_gradients(params, 0)
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 3


def test_types_mix_and_only_the_one_named_has_copies():
    params = [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.float16, torch.bfloat16, torch.float32)]
    optimizer = FusedMixedPrecisionLamb(params, lr=0.5, reduced_precision_dtype=torch.bfloat16)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step(lambda: None)
    copies = optimizer.param_groups_full_precision[0]["params"]
    assert [c is None for c in copies] == [True, False, True] and all((p < 1).all() for p in params)


def test_impossible_arguments_are_refused():
    params = parameters(torch.float32)
    with pytest.raises(ValueError, match=r"reduced_precision_dtype=torch.float32, torch.float16, torch.bfloat16 or"):
        FusedMixedPrecisionLamb(params, reduced_precision_dtype=torch.float32)
    with pytest.raises(RuntimeError, match="amsgrad=True is not supported"):
        FusedMixedPrecisionLamb(params, amsgrad=True)
    with pytest.raises(TypeError, match=r"FusedMixedPrecisionLamb.step: got scale; wanted closure and grad_scaler"):
        FusedMixedPrecisionLamb(params).step(scale=2.0)
