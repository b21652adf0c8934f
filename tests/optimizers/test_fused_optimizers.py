"""The fused optimizers: Apex's arithmetic, arguments and state names; torch's manners; exact under amp."""

from __future__ import annotations

import pytest
import torch
from conftest import DEVICES, DTYPES
from crossed import crossed
from reference_optimizers import (
    ORACLES,
    SHAPES,
    cases,
    every,
    give_gradients,
    parameters,
    relative,
    required,
)
from torch import nn

from amp_patch.optimizers import (
    FusedLAMB,
    FusedSGD,
)

# ---------------------------------------------------------------------------------------------------------------------
# Arithmetic


@pytest.mark.parametrize("device", DEVICES)
@crossed(
    cases,
    pytest.mark.parametrize(
        ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-13)], ids=["FP32", "FP64"]
    ),
    meet=1,
)
def test_30_steps_match_the_oracle(make, flags, dtype, tolerance, device):
    params = parameters(dtype, device, [s for s in SHAPES if s != (0,)])
    exact, states = [p.detach().double() for p in params], [{} for _ in params]
    start = [p.clone() for p in exact]
    optimizer = make(params, **flags)
    for step in range(30):
        give_gradients(params, step)
        ORACLES[make](exact, [p.grad.double() for p in params], states, step + 1, **flags)
        optimizer.step()
    for p, oracle, before in zip(params, exact, start, strict=True):
        assert relative(p, oracle) <= tolerance
        assert relative(p, before) > 1e-4  # it went somewhere


@pytest.mark.parametrize("device", DEVICES)
@crossed(cases, {"dtype": DTYPES[1:]}, meet=1)
def test_low_precision_parameters_are_stepped_in_fp32_and_rounded_once(make, flags, dtype, device):
    params = parameters(dtype, device)
    optimizer = make(params, **flags)
    give_gradients(params, 0)
    twins = [nn.Parameter(p.detach().float()) for p in params]
    for p, twin in zip(params, twins, strict=True):
        twin.grad = p.grad.float()
    versions = [p.grad._version for p in params]
    optimizer.step()
    assert [p.grad._version for p in params] == versions  # gradients are only read
    make(twins, **flags).step()
    for p, twin in zip(params, twins, strict=True):
        assert torch.equal(p, twin.to(dtype)) and p.dtype is dtype
        assert all(v.dtype is torch.float32 for v in optimizer.state[p].values())


@every
def test_any_layout_gives_the_same(make):
    """torch's fused kernels on a CPU mix up the elements of tensors that are laid out differently."""
    plain = parameters(shapes=[(4, 6), (2, 3, 4, 5), (5, 3)])
    odd = [
        nn.Parameter(plain[0].detach().t().contiguous().t()),
        nn.Parameter(plain[1].detach().to(memory_format=torch.channels_last)),
        nn.Parameter(torch.zeros(5, 6)[:, ::2]),
    ]
    with torch.no_grad():
        odd[2].copy_(plain[2])
    one, other = make(plain, **required(make)), make(odd, **required(make))
    for step in range(3):
        give_gradients(plain, step)
        for p, q in zip(plain, odd, strict=True):
            q.grad = p.grad.clone()
        one.step()
        other.step()
    assert all(relative(q, p) <= 1e-6 for p, q in zip(plain, odd, strict=True))


def test_lamb_takes_no_trust_ratio_from_a_norm_of_zero():
    p = nn.Parameter(torch.zeros(3))
    p.grad = torch.ones(3)
    FusedLAMB([p], lr=0.5, max_grad_norm=None).step()
    assert torch.allclose(p, torch.full((3,), -0.5), atol=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# Under amp


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_announces_a_first_step_only_of_a_momentum(momentum, monkeypatch):
    """torch's kernel for CUDA warns about `is_first_step` if there is no buffer."""
    param, announced, kernel = nn.Parameter(torch.ones(2)), [], torch._fused_sgd_

    def spied(*args, is_first_step, **kwargs):
        announced.append(is_first_step)
        kernel(*args, is_first_step=is_first_step, **kwargs)

    monkeypatch.setattr(torch, "_fused_sgd_", spied)
    optimizer = FusedSGD([param], lr=0.5, momentum=momentum)
    for _ in range(2):
        param.grad = torch.ones(2)
        optimizer.step()
    assert announced == [momentum > 0, False]
