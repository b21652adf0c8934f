"""apex.parallel.LARC."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
import training
from conftest import DEVICES, DTYPES
from crossed import crossed
from torch import nn
from training import backward, convnet, images, skipped

from amp_patch import amp
from amp_patch.apex.parallel.LARC import LARC


def larc_by_hand(param, grad, lr, decay, trust, clip, eps=1e-8):
    """Return the weight after one step of plain SGD, in FP64, by You et al. 2017, equation 6 and section 4."""
    w, g = param.double(), grad.double()
    if w.norm() == 0 or g.norm() == 0:
        return w - lr * g
    local = trust * w.norm() / (g.norm() + decay * w.norm() + eps)
    return w - (min(local, lr) if clip else lr * local) * (g + decay * w)


def weights_and_grads(dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(size, generator=generator) for size in ((3, 4), (5,), (2, 2), (3,), ())]
    grads = [torch.randn(p.shape, generator=generator) * 10.0 ** (i - 1) for i, p in enumerate(params)]
    params[2].zero_()
    grads[3].zero_()
    return [nn.Parameter(p.to(device, dtype)) for p in params], [g.to(device, dtype) for g in grads]


@pytest.mark.parametrize("device", DEVICES)
@crossed(
    {
        "decay": [0.0, 1e-1],
        "clip, trust": [(True, 0.02), (False, 0.001), (True, 100.0)],
        "dtype": [*DTYPES, torch.float64],
    }
)
def test_larc_is_the_paper_s(device, dtype, clip, trust, decay):
    params, grads = weights_and_grads(dtype, device)
    optimizer = LARC(optimizer=torch.optim.SGD(params, lr=0.5, weight_decay=decay), trust_coefficient=trust, clip=clip)
    wanted = [larc_by_hand(p.detach(), g, 0.5, decay, trust, clip) for p, g in zip(params, grads, strict=True)]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    optimizer.step()
    eps = torch.finfo(torch.float32 if dtype is torch.float64 else dtype).eps
    for param, want in zip(params, wanted, strict=True):
        torch.testing.assert_close(param.detach().double(), want, rtol=8 * eps, atol=8 * eps)
    assert optimizer.param_groups[0]["weight_decay"] == decay


def test_larc_gives_weight_decay_back_when_a_step_fails():
    table = nn.Embedding(3, 2, sparse=True)
    optimizer = LARC(torch.optim.SGD(table.parameters(), lr=1.0, weight_decay=0.5))
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="group 0 has a sparse gradient"):
        optimizer.step()
    assert optimizer.param_groups[0]["weight_decay"] == 0.5
    optimizer.zero_grad()
    optimizer.step()


def test_larc_is_an_optimizer_to_schedulers_and_hides_nothing_of_the_inner_one():
    params, grads = weights_and_grads()
    inner = torch.optim.Adam(params, lr=0.1)
    optimizer = LARC(inner)
    assert isinstance(optimizer, torch.optim.Optimizer) and repr(optimizer) == repr(inner)
    assert optimizer.optim is inner and optimizer.state is inner.state and optimizer.defaults is inner.defaults
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    assert optimizer.step(lambda: 7.0) == 7.0
    scheduler.step()
    assert inner.param_groups[0]["lr"] == 0.05
    optimizer.param_groups[0]["lr"] = 0.3
    assert inner.param_groups[0]["lr"] == 0.3
    optimizer.zero_grad(set_to_none=True)
    assert params[0].grad is None
    extra = nn.Parameter(torch.ones(1))
    optimizer.add_param_group({"params": [extra]})
    assert inner.param_groups[1]["params"] == [extra]
    twin = LARC(torch.optim.Adam([{"params": params}, {"params": [extra]}]))
    twin.load_state_dict(optimizer.state_dict())
    assert str(twin.state_dict()) == str(inner.state_dict())
    for clone in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert clone.optim is not inner and clone.trust_coefficient == 0.02
        assert str(clone.state_dict()) == str(inner.state_dict())
    optimizer.param_groups = inner.param_groups[:1]
    assert len(inner.param_groups) == 1
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = optimizer.nothing


def larc_training(order, level, steps=6, bad=(), **kwargs):
    """A model and its LARC made before or after `initialize`; the scale is small enough for every step not in `bad`."""
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    if order == "LARC first":
        optimizer = LARC(optimizer, trust_coefficient=0.1, clip=False)
        model, same = amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, **kwargs)
        assert same is optimizer
    else:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, **kwargs)
        optimizer = LARC(optimizer, trust_coefficient=0.1, clip=False)
    for step in range(steps):
        inputs, targets = images(step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets) * (math.inf if step in bad else 1.0)
        backward(loss, optimizer)
        before = training.weights(model), copy.deepcopy(optimizer.state_dict())
        optimizer.step()
        assert skipped(optimizer) is (step in bad)
        if step in bad:
            assert training.same(before[0], training.weights(model))
            assert str(before[1]) == str(optimizer.state_dict())
        assert optimizer.param_groups[0]["weight_decay"] == 0.1
    return model, optimizer


@pytest.mark.parametrize("order", ["LARC first", "initialize first"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_larc_under_amp_is_larc_on_unscaled_gradients_and_skips_whole_steps(order, level):
    model, _ = larc_training(order, level)
    plain, _ = larc_training(order, "O0")
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name].to(value.dtype), value, rtol=0.05, atol=0.03)
    larc_training(order, level, bad=(0, 3))
