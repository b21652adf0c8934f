"""GradScaler: the checks of torch's own tests, gradients that it has not scaled, and torch.compile."""

from __future__ import annotations

import collections
import functools

import pytest
import torch
from conftest import DEVICES
from crossed import crossed
from scaled_loops import INF, iterate, model_and_optimizer, scalers
from torch import nn

from amp_patch import amp, grad_scaler

sparse = functools.partial(torch.sparse_coo_tensor, check_invariants=True)


# ---------------------------------------------------------------------------------------------------------------------
# What torch's own tests of its scaler ask for, and what was left of its interface


def test_integers_are_refused_by_name_and_complex_numbers_scaled():
    scaler = amp.GradScaler("cpu", init_scale=4.0)
    for wrong in (torch.ones((), dtype=torch.int64), [torch.ones(()), (torch.ones((), dtype=torch.bool),)]):
        with pytest.raises(TypeError, match=r"GradScaler.scale: outputs holds a tensor of torch\.(int64|bool)"):
            scaler.scale(wrong)
    assert scaler.scale(torch.tensor(1 + 2j)) == 4 + 8j
    for wrong in (1.0, None, "loss", {"loss": torch.ones(())}):
        with pytest.raises(ValueError, match="Tensor or an iterable of Tensors, got a"):
            scaler.scale(wrong)
    assert amp.GradScaler("cpu", enabled=False).scale(3) == 3


def test_iterables_of_all_kinds_are_scaled():
    Pair = collections.namedtuple("Pair", "first second")
    scaler = amp.GradScaler("cpu", init_scale=4.0)
    one = torch.ones(())
    pair = scaler.scale(Pair(one, [one]))
    assert isinstance(pair, Pair) and pair.first == 4.0 and pair.second == [4.0]
    lazy = scaler.scale(t for t in (one, (one, one * 2)))
    assert list(lazy) == [4.0, (4.0, 8.0)]
    for dtype, expected in ((torch.float16, torch.float32), (torch.float64, torch.float64)):
        # A half loss without dimensions would overflow in its own type.
        loss = torch.full((), 2.0, dtype=dtype, requires_grad=True)
        theirs, ours = (s.scale(loss) for s in scalers())
        assert ours.dtype is theirs.dtype is expected and ours == theirs == 2.0**17


def test_getters_and_setters():
    for scaler in scalers(init_scale=8.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=7):
        assert scaler.get_scale() == 8.0 and scaler.is_enabled()
        assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (3.0, 0.25, 7)
        scaler.set_growth_factor(2.5)
        scaler.set_backoff_factor(0.5)
        scaler.set_growth_interval(2)
        assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (2.5, 0.5, 2)


@pytest.mark.parametrize("scaled_before", [False, True])
def test_a_state_is_loaded_before_and_after_the_first_scale(scaled_before):
    states = []
    for kind in (torch.amp.GradScaler, amp.GradScaler):
        one = kind("cpu", init_scale=3.0, growth_factor=4.0, backoff_factor=0.5, growth_interval=2)
        other = kind("cpu", init_scale=6.0, growth_factor=7.0, backoff_factor=0.8, growth_interval=1)
        if scaled_before:
            one.scale(torch.ones(()))
            other.scale(torch.ones(()))
        one._init_growth_tracker = 0
        other.load_state_dict(one.state_dict())
        states.append((other.state_dict(), other.get_scale(), other._get_growth_tracker()))
        with pytest.raises(RuntimeError, match="source state dict is empty"):
            other.load_state_dict({})
        disabled = kind("cpu", enabled=False)
        disabled.load_state_dict(one.state_dict())
        assert disabled.state_dict() == {}
    assert states[0] == states[1] and states[0][1] == 3.0


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # torch 2.11, once a process
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_all_layouts_and_types_at_once(device):
    """Transposed, strided, sparse with doubles, complex and FP64 ones, some of them not finite."""

    def gradients(spoilt):
        plain = torch.arange(1.0, 7.0, device=device).reshape(2, 3)
        index = torch.tensor([[0, 1, 1], [2, 0, 0]], device=device)
        return [
            plain,
            plain.clone().t(),
            torch.arange(12.0, device=device).reshape(3, 4)[:, ::2],
            plain.double(),
            torch.full((2,), 3 + 4j, device=device),
            sparse(index, torch.tensor([1.0, 2.0, INF if spoilt else 4.0], device=device), (2, 3)),
        ]

    for spoilt in (False, True):
        params = [nn.Parameter(torch.zeros(g.shape, dtype=g.dtype, device=device)) for g in gradients(False)]
        for param, grad in zip(params, gradients(spoilt), strict=True):
            param.grad = grad
        scaler = amp.GradScaler(device, init_scale=4.0)
        scaler.scale(torch.ones((), device=device))
        optimizer = torch.optim.SGD(params, lr=1.0)
        scaler.unscale_(optimizer)
        if not spoilt:
            for param, grad in zip(params, gradients(False), strict=True):
                assert torch.equal(param.grad.to_dense(), grad.to_dense() / 4)
        assert scaler.step(optimizer) is not spoilt
        scaler.update()
        assert scaler.get_scale() == (2.0 if spoilt else 4.0)


def test_two_optimizers_of_one_scaler_step_and_skip_each_for_itself():
    scales = []
    for scaler in scalers(init_scale=8.0):
        (model, optimizer), (other, other_optimizer) = model_and_optimizer(), model_and_optimizer()
        before = model.weight.detach().clone()
        first, second = model(torch.ones(1, 3)).sum() * INF, other(torch.ones(1, 3)).sum()
        for loss in scaler.scale([first, second]):
            loss.backward()
        scaler.unscale_(other_optimizer)
        scaler.step(optimizer)
        scaler.step(other_optimizer)
        scaler.update()
        assert torch.equal(model.weight, before) and not torch.equal(other.weight, before)
        scales.append(scaler.get_scale())
    assert scales == [4.0, 4.0]


def test_a_scaler_for_cuda_without_cuda_warns_and_is_disabled():
    if not torch.cuda.is_available():
        for kind in (torch.amp.GradScaler, amp.GradScaler):
            with pytest.warns(UserWarning, match="CUDA is not available"):
                assert not kind("cuda").is_enabled()
    assert amp.GradScaler().is_enabled()
    assert amp.GradScaler(torch.device("cpu")).is_enabled()
    assert amp.GradScaler(init_scale=4.0, enabled=False).get_scale() == 1.0


# ---------------------------------------------------------------------------------------------------------------------
# Gradients that are not this scaler's


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_that_another_scaler_has_unscaled_are_refused(fused):
    one, other = amp.GradScaler("cpu"), amp.GradScaler("cpu")
    model, optimizer = model_and_optimizer(fused=fused)
    other.scale(one.scale(model(torch.ones(1, 3)).sum())).detach()
    one.scale(model(torch.ones(1, 3)).sum()).backward()
    one.unscale_(optimizer)
    for call in (other.unscale_, other.step):
        with pytest.raises(RuntimeError, match=r"another GradScaler has unscaled the gradients of this (SGD|Adam)"):
            call(optimizer)
    before = model.weight.detach().clone()
    one.step(optimizer)
    assert not torch.equal(model.weight, before), "a refusal changes nothing"
    with pytest.raises(RuntimeError, match="another GradScaler has unscaled"):
        other.step(optimizer)
    optimizer.zero_grad()  # and gradients of its own are
    other.scale(model(torch.ones(1, 3)).sum()).backward()
    other.step(optimizer)
    one.update()
    other.update()


def test_gradients_that_another_scaler_has_scaled_are_refused():
    model, optimizer = model_and_optimizer()
    one, other = amp.GradScaler("cpu", init_scale=8.0), amp.GradScaler("cpu", init_scale=2.0)
    iterate(one, model, optimizer)
    optimizer.zero_grad()
    other.scale(model(torch.ones(1, 3)).sum()).backward()
    for call in (one.unscale_, one.step):
        with pytest.raises(RuntimeError, match=r"this scaler has scaled nothing since its last update\(\)"):
            call(optimizer)
    assert model.weight.grad.eq(2).all()
    assert other.step(optimizer) is True
    other.update()
    iterate(one, model, optimizer)


@crossed({"level": ["O0", "O1", "O2", "O3", "O4", "O5"], "nested": [False, True], "delay": [False, True]}, meet=1)
def test_gradients_that_came_through_scale_loss_are_refused(level, nested, delay):
    model, optimizer = model_and_optimizer()
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    scaler = amp.GradScaler("cpu", init_scale=4.0)
    scaled = scaler.scale(model(torch.ones(1, 3)).float().sum())
    loss = scaled if nested else model(torch.ones(1, 3)).float().sum()
    with amp.scale_loss(loss / 1024, optimizer, delay_unscale=delay) as scaled_loss:
        scaled_loss.backward()
    for call in (scaler.unscale_, scaler.step):
        with pytest.raises(RuntimeError, match=r"of this SGD came through amp\.scale_loss"):
            call(optimizer)
    optimizer.step()
    for set_to_none in (False, True):
        optimizer.zero_grad(set_to_none=set_to_none)
        scaler.scale(model(torch.ones(1, 3)).float().sum()).backward()
        assert scaler.step(optimizer) is True, "the next iteration is the scaler's"
        scaler.update()
        with amp.scale_loss(model(torch.ones(1, 3)).float().sum() / 1024, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()


# ---------------------------------------------------------------------------------------------------------------------
# Beside torch.compile


@pytest.mark.parametrize("end", ["step", "zero_grad"])
def test_the_effects_of_scale_loss_end_with_its_iteration(end):
    """Also where the gradients of the next one are the same tensors."""
    model, optimizer = amp.initialize(*model_and_optimizer(), opt_level="O4")
    scaler = amp.GradScaler("cpu", init_scale=4.0)
    with amp.scale_loss(model(torch.ones(1, 3)).float().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    grad = model.weight.grad
    if end == "step":
        optimizer.step()
        for param in model.parameters():
            param.grad.zero_()
    else:
        optimizer.zero_grad(set_to_none=False)
    scaler.scale(model(torch.ones(1, 3)).float().sum()).backward()
    assert model.weight.grad is grad
    assert scaler.step(optimizer) is True


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_two_devices_that_overflow_at_once_skip_as_one_does(kind, monkeypatch):
    """torch adds up the flags of two devices, and its fused Adam does not skip if the sum is 2."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = kind([weight], lr=0.1, fused=True)
    devices = [torch.device("cuda", index) for index in range(2)]
    monkeypatch.setattr(grad_scaler, "gather", lambda *_, **__: {device: torch.ones(()) for device in devices})
    scaler = amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(weight.sum() * INF).backward()
    scaler.unscale_(optimizer)
    assert not scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [1.0] * 3 and scaler.get_scale() == 512.0
