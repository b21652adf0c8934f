"""amp_C's steps of optimizers."""

from __future__ import annotations

import copy

import pytest
import reference_optimizers
import torch
from apexed import CHUNK, buffer, on_devices, tensors, zeros
from conftest import DTYPES
from syncs import count
from training import same

from amp_patch.apex import amp_C
from amp_patch.apex.multi_tensor_apply import multi_tensor_applier
from amp_patch.optimizers import FusedAdam, FusedLAMB, FusedSGD


def of_optimizer(make, flags, names, steps=3, dtype=torch.float32):
    """Parameters, states and gradients of a fused optimizer after `steps` steps."""
    params = [torch.nn.Parameter(t) for t in tensors(dtype=dtype)]
    optimizer = make(params, **flags)
    for step in range(steps):
        for p, g in zip(params, tensors(10 + step, dtype), strict=True):
            p.grad = g
        optimizer.step()
    return [p.detach() for p in params], [[optimizer.state[p][name] for p in params] for name in names]


@pytest.mark.parametrize("mode", [0, 1])
def test_adam(mode):
    params, m, v, flag = tensors(), zeros(), zeros(), buffer()
    for step in range(3):
        lists = [tensors(10 + step), params, m, v]
        multi_tensor_applier(amp_C.multi_tensor_adam, flag, lists, 0.01, 0.9, 0.99, 1e-8, step + 1, mode, 1, 0.1)
    flags = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1, "adam_w_mode": mode == 1}
    wanted, states = of_optimizer(FusedAdam, flags, ["exp_avg", "exp_avg_sq"])
    assert same(params, wanted) and same(m, states[0]) and same(v, states[1])


@pytest.mark.parametrize("name", ["multi_tensor_adam_capturable", "multi_tensor_adam_capturable_master"])
def test_a_capturable_adam_is_refused_when_it_is_called(name):
    with pytest.raises(NotImplementedError, match=r"torch.optim.AdamW\(.*capturable=True"):
        multi_tensor_applier(getattr(amp_C, name), buffer(), [tensors()] * 5, torch.ones(1))


@pytest.mark.parametrize("after", [False, True])
def test_sgd(after):
    params, buffers, flag = tensors(), zeros(), buffer()
    for step in range(3):
        lists = [tensors(10 + step), params, buffers]
        multi_tensor_applier(amp_C.multi_tensor_sgd, flag, lists, 0.1, 0.9, 0.0, 0.05, True, step == 0, after, 1.0)
    flags = {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "wd_after_momentum": after}
    wanted, states = of_optimizer(FusedSGD, flags, ["momentum_buffer"])
    # The flag, read on the device, takes another rounding of the decay.
    close = all(
        torch.allclose(p, q, rtol=1e-6) for p, q in zip([*params, *buffers], [*wanted, *states[0]], strict=True)
    )
    assert close if after else same(params, wanted) and same(buffers, states[0])


@on_devices
@pytest.mark.parametrize("after", [False, True])
def test_sgd_of_half_gradients_masters_and_copies_obeys_the_flag(after, device):
    masters = tensors(device=device)
    copies, buffers = [t.half() for t in masters], [torch.zeros_like(t) for t in masters]
    copies[0][0, 0] = 77.0  # not its master's value: a skipped step must leave it
    grads, flag = tensors(10, torch.float16, device), buffer(device, value=1)
    lists = [grads, masters, buffers, copies]
    before = copy.deepcopy(lists)
    run = lambda: amp_C.multi_tensor_sgd(CHUNK, flag, lists, 0.1, 0.9, 0.0, 0.05, False, True, after, 0.5)  # noqa: E731
    run()
    assert all(map(same, lists, before)) and flag.item() == 1
    flag.zero_()
    assert count(device, run) == 0
    twins = [t.double() for t in before[1]]
    reference_optimizers.sgd(
        twins,
        [t.double() / 2 for t in grads],
        [{} for _ in twins],
        1,
        lr=0.05,
        momentum=0.9,
        weight_decay=0.1,
        wd_after_momentum=after,
    )
    assert all(torch.allclose(p.double(), q, rtol=1e-6) for p, q in zip(masters, twins, strict=True))
    assert same(copies, [t.half() for t in masters])


@pytest.mark.parametrize("mode", [0, 1])
def test_lamb(mode):
    params, m, v, flag = tensors(), zeros(), zeros(), buffer()
    for step in range(3):
        grads = tensors(10 + step)
        norm, _ = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag, [grads], False)
        arguments = (0.01, 0.9, 0.99, 1e-6, step + 1, 1, 0.01, 1, mode, norm, 1.0, False)
        multi_tensor_applier(amp_C.multi_tensor_lamb, flag, [grads, params, m, v], *arguments)
    flags = {"lr": 0.01, "betas": (0.9, 0.99), "adam_w_mode": mode == 1}
    wanted, states = of_optimizer(FusedLAMB, flags, ["exp_avg", "exp_avg_sq"])
    assert same(params, wanted) and same(m, states[0]) and same(v, states[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_states_may_have_the_parameters_type(dtype):
    """Apex's kernels take one type for all lists: states in half precision are rounded once a step."""
    params, m, v = tensors(dtype=dtype), zeros(dtype), zeros(dtype)
    wide = [t.float() for t in params]
    wide_m, wide_v = zeros(), zeros()
    rest = (0.01, 0.9, 0.99, 1e-8, 1, 1, 1, 0.1)
    amp_C.multi_tensor_adam(CHUNK, buffer(), [tensors(10, dtype), params, m, v], *rest)
    grads = [t.float() for t in tensors(10, dtype)]
    amp_C.multi_tensor_adam(CHUNK, buffer(), [grads, wide, wide_m, wide_v], *rest)
    for low, full in ((params, wide), (m, wide_m), (v, wide_v)):
        assert same(low, [t.to(dtype) for t in full])


@on_devices
def test_update_scale_hysteresis(device):
    scale = torch.tensor([8.0], device=device)
    growth, patience = (torch.tensor([n], dtype=torch.int32, device=device) for n in (0, 2))
    seen = []
    for bad in (1.0, 1.0, 0.0, 0.0, 1.0):
        found = torch.tensor([bad], device=device)
        result = amp_C.update_scale_hysteresis(scale, growth, patience, found, 2.0, 0.5, 2, 2)
        assert result is scale
        seen.append((scale.item(), growth.item(), patience.item()))
    assert seen == [(8.0, 0, 1), (4.0, 0, 0), (4.0, 1, 2), (8.0, 0, 2), (8.0, 0, 1)]
