"""apex.fp16_utils: models and masters by hand, the loss scalers, FP16_Optimizer."""

from __future__ import annotations

import math

import pytest
import torch
from apexed import LOW
from conftest import DEVICES
from torch import nn

from amp_patch.apex import fp16_utils
from amp_patch.apex.fp16_utils import *  # noqa: F403  scripts do, and it must give everything
from amp_patch.apex.fp16_utils import (
    BN_convert_float,
    DynamicLossScaler,
    FP16Model,
    LossScaler,
    clip_grad_norm,
    convert_module,
    convert_network,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
    to_python_float,
    tofp16,
)


def test_import_star_gives_what_the_imagenet_template_uses():
    for name in fp16_utils.__all__:
        assert globals()[name] is getattr(fp16_utils, name)
    assert {"network_to_half", "prep_param_lists", "to_python_float", "FP16_Optimizer"} <= set(fp16_utils.__all__)


# ---------------------------------------------------------------------------------------------------------------------
# Models


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(3, affine=False), nn.Sequential(nn.Linear(3, 2))
    )


def dtypes(module):
    return {name: tensor.dtype for name, tensor in module.state_dict().items() if tensor.is_floating_point()}


HALF_NET = {
    **dict.fromkeys(("0.weight", "0.bias", "3.0.weight", "3.0.bias"), torch.float16),
    **dict.fromkeys(("1.weight", "1.bias", "1.running_mean", "1.running_var"), torch.float32),
    **dict.fromkeys(("2.running_mean", "2.running_var"), torch.float16),  # no weights: not kept, as in Apex
}


def test_network_to_half_casts_the_input_and_keeps_batch_norms():
    network = net()
    params = list(network.parameters())
    model = network_to_half(network)
    assert isinstance(model[0], tofp16) and model[1] is network and dtypes(network) == HALF_NET
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    assert BN_convert_float(nn.BatchNorm2d(3).half()).weight.dtype is torch.float32
    assert nn.Sequential(*model[1][:2])(torch.randn(5, 4).half()).dtype is torch.float16
    assert tofp16()(torch.randn(3)).dtype is torch.float16


@pytest.mark.parametrize("dtype", LOW)
def test_convert_network_casts_gradients_too(dtype):
    network = net()
    network[0](torch.randn(5, 4)).sum().backward()
    before = network[0].weight.grad.clone()
    assert convert_network(network, dtype) is network
    assert network[0].weight.dtype is network[0].weight.grad.dtype is dtype
    torch.testing.assert_close(network[0].weight.grad.float(), before, rtol=1e-2, atol=1e-2)
    assert network[3][0].weight.grad is None and network[1].weight.dtype is torch.float32
    network = net()
    convert_module(network, dtype)
    assert network[0].weight.dtype is torch.float32, "a child's"
    recurrent = convert_network(nn.LSTM(2, 2), dtype)
    assert {p.dtype for p in recurrent.parameters()} == {dtype}


def test_fp16model_casts_its_inputs():
    model = FP16Model(nn.Bilinear(2, 3, 1))
    assert model(torch.randn(4, 2), torch.randn(4, 3)).dtype is torch.float16
    assert model.network.weight.dtype is torch.float16


# ---------------------------------------------------------------------------------------------------------------------
# Masters by hand


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", LOW)
def test_training_with_prep_param_lists(device, dtype):
    model = nn.Linear(2, 2, bias=False).to(device, dtype)
    frozen = nn.Linear(2, 2).to(device, dtype).requires_grad_(False)
    both = nn.ModuleList([model, frozen])
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    model_params, master_params = prep_param_lists(both)
    assert model_params == [model.weight]
    (master,) = master_params
    assert master.dtype is torch.float32 and master.requires_grad and master.shape == (2, 2)
    optimizer = torch.optim.SGD(master_params, lr=2.0**-12)
    model(torch.tensor([[1.0, 2.0]], device=device, dtype=dtype)).sum().backward()
    model_grads_to_master_grads(model_params, master_params)
    assert master.grad.dtype is torch.float32 and master.grad.flatten().tolist() == [1.0, 2.0, 1.0, 2.0]
    gradient = master.grad
    for _ in range(2):
        model_grads_to_master_grads(model_params, master_params)
        assert master.grad is gradient and gradient.flatten().tolist() == [1.0, 2.0, 1.0, 2.0]
        optimizer.step()
    expected = torch.tensor([1.0, 2.0, 3.0, 4.0]) - torch.tensor([1.0, 2.0, 1.0, 2.0]) * 2.0**-11
    assert master.flatten().tolist() == expected.tolist()
    master_params_to_model_params(model_params, master_params)
    assert model.weight.flatten().tolist() == expected.to(dtype).tolist()


def test_a_stale_gradient_does_not_stay_in_a_master():
    model = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)]).half()
    params, masters = prep_param_lists(model)
    for param in params:
        param.grad = torch.ones_like(param)
    model_grads_to_master_grads(params, masters)
    params[0].grad = None
    model_grads_to_master_grads(params, masters)
    assert masters[0].grad is None and masters[1].grad.tolist() == [[1.0]]


def test_one_flat_master_is_refused():
    params, masters = prep_param_lists(model := nn.Linear(1, 1))
    calls = (
        lambda: prep_param_lists(model, flat_master=True),
        lambda: model_grads_to_master_grads(params, masters, True),
    )
    for call in (*calls, lambda: master_params_to_model_params(params, masters, True)):
        with pytest.raises(ValueError, match=r"^\w+: flat_master=True is not supported; use flat_master=False"):
            call()


def test_to_python_float_and_clip_grad_norm():
    assert to_python_float(torch.tensor([2.5])) == 2.5 and to_python_float([2.5]) == 2.5
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.tensor([3.0, 4.0])
    assert clip_grad_norm([param], 1.0) == 5.0
    torch.testing.assert_close(param.grad, torch.tensor([0.6, 0.8]))


# ---------------------------------------------------------------------------------------------------------------------
# Loss scalers


def test_the_static_scaler():
    scaler = LossScaler(128.0)
    bad = nn.Parameter(torch.zeros(1))
    bad.grad = torch.tensor([math.inf])
    assert scaler.has_overflow([bad]) is False
    scaler.update_scale(True)
    assert scaler.loss_scale == scaler.cur_scale == 128.0 and LossScaler().loss_scale == 1
    assert scaler.scale_gradient(None, (torch.ones(1), None), None) == (torch.tensor([128.0]), None)
    weight = nn.Parameter(torch.ones(1))
    scaler.backward((weight * 2).sum())
    assert weight.grad.tolist() == [256.0]
    with pytest.raises(ValueError, match="scale is 0; wanted a finite positive"):
        LossScaler(0)


def test_the_story_of_a_dynamic_scaler():
    scaler = DynamicLossScaler(init_scale=8.0, scale_factor=2.0, scale_window=3)
    story = [  # overflow -> scale, cur_iter, last_overflow_iter
        (True, 4.0, 1, 0),
        (False, 4.0, 2, 0),
        (False, 4.0, 3, 0),
        (False, 8.0, 4, 0),
        (False, 8.0, 5, 0),
        (True, 4.0, 6, 5),
        (True, 2.0, 7, 6),
        (True, 1.0, 8, 7),
        (True, 1.0, 9, 8),  # Apex's floor
    ]
    for overflow, scale, iteration, last in story:
        scaler.update_scale(overflow)
        assert (scaler.cur_scale, scaler.loss_scale, scaler.cur_iter, scaler.last_overflow_iter) == (
            scale,
            scale,
            iteration,
            last,
        )
    assert DynamicLossScaler().loss_scale == 2.0**32
    capped = DynamicLossScaler(init_scale=8.0, scale_window=1, max_loss_scale=16.0)
    for _ in range(3):
        capped.update_scale(False)
    assert capped.loss_scale == 16.0
    low = DynamicLossScaler(init_scale=2.0**-126, min_loss_scale=2.0**-140)
    for _ in range(3):
        low.update_scale(True)
    assert low.loss_scale == 2.0**-127  # the inverse of less is infinite in FP32


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, *LOW])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_has_overflow(device, dtype, value):
    scaler = DynamicLossScaler()
    params = [nn.Parameter(torch.zeros(3, dtype=dtype, device=device)) for _ in range(3)]
    assert not scaler.has_overflow(params)
    params[1].grad = torch.ones_like(params[1])
    params[2].grad = torch.ones_like(params[2]) * torch.finfo(torch.float16).max  # the sum is past FP16
    assert not scaler.has_overflow(p for p in params)
    params[2].grad[1] = value
    assert scaler.has_overflow(p for p in params)


def test_a_sparse_gradient_is_looked_at():
    table = nn.Embedding(3, 2, sparse=True)
    (table(torch.tensor([1, 1])) * math.inf).sum().backward()
    assert table.weight.grad.is_sparse and DynamicLossScaler().has_overflow(table.parameters())
