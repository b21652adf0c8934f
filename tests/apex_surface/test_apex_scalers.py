"""Loss scalers in the ways of Apex's users: several losses, written scales, scalers without `initialize`."""

from __future__ import annotations

import importlib

import pytest
import torch
from apexed import INF, LEVELS, apex_amp, backward_by, make, train_by  # noqa: F401  the fixture `amp`
from conftest import DEVICES
from syncs import Syncs
from torch import nn
from torch.nn import functional as F
from training import SGD, convnet, images, linear


@pytest.mark.parametrize("level", LEVELS)
def test_a_list_of_optimizers_delayed(amp, level):
    """XLM."""
    nets = [linear([[1.0]]) for _ in range(2)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.25) for net in nets]
    nets, optimizers = amp.initialize(nets, optimizers, opt_level=level, loss_scale=4.0)
    opt_a, opt_b = optimizers
    for delay in (True, False):
        loss = sum(net(torch.ones(1, 1)).sum() for net in nets)
        with amp.scale_loss(loss, [opt_a, opt_b], delay_unscale=delay) as s:
            s.backward()
        assert opt_a._amp_stash.params_have_scaled_gradients is delay
    for optimizer in optimizers:
        optimizer.step()
    assert [net.weight.item() for net in nets] == [0.5, 0.5]


@pytest.mark.parametrize("level", LEVELS)
def test_one_scaler_for_each_task_and_the_reduction_inside_of_the_body(amp, level):
    """As in UNITER, gradients are reduced in the body, where the model has scaled gradients."""
    model = linear([[1.0]])
    tasks = {"mlm": 0, "itm": 1}
    model, optimizer = amp.initialize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.25),
        num_losses=len(tasks),
        enabled=True,
        opt_level=level,
        loss_scale=8.0,
    )
    for name in ("mlm", "itm"):
        for micro in range(2):
            loss = model(torch.ones(1, 1)).sum() / 2
            with amp.scale_loss(loss, optimizer, delay_unscale=micro == 0, loss_id=tasks[name]) as s:
                s.backward()
                if micro == 1:
                    grads = [p.grad.data for p in model.parameters() if p.requires_grad and p.grad is not None]
                    assert [g.item() for g in grads] == [8.0]
                    grads[0].mul_(0.5)  # an average over two ranks
        optimizer.step()
        optimizer.zero_grad()
    assert model.weight.item() == 0.75


@pytest.mark.parametrize("level", LEVELS)
def test_loss_id_by_position(amp, level):
    _model, optimizer = make(amp, level, num_losses=2, loss_scale="dynamic")
    amp._amp_state.loss_scalers[1]._loss_scale = 2.0**4
    with amp.scale_loss(torch.ones(()), optimizer, 1) as scaled_loss:
        assert scaled_loss.item() == 16.0


class Wrapper:
    """As Apex's LARC: no Optimizer, holds one as `.optim`."""

    def __init__(self, optimizer):
        self.optim = optimizer

    @property
    def param_groups(self):
        return self.optim.param_groups

    def step(self):
        for group in self.optim.param_groups:
            for p in group["params"]:
                p.grad.data *= 0.5
        self.optim.step()

    def zero_grad(self):
        self.optim.zero_grad()


@pytest.mark.parametrize("level", LEVELS)
def test_a_wrapper_like_larc(amp, level):
    model = linear([[1.0]])
    optimizer = Wrapper(torch.optim.SGD(model.parameters(), lr=0.5))
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=4.0)
    backward_by(amp, model, optimizer, 1.0)
    optimizer.step()
    assert model.weight.item() == 0.75


@pytest.mark.parametrize("level", LEVELS)
def test_the_scale_takes_effect_when_written_and_is_current_when_read(amp, level):
    """The BERT and ViT family, at whatever level the command line says."""
    model, optimizer = make(amp, level)
    amp._amp_state.loss_scalers[0]._loss_scale = 2**20
    with amp.scale_loss(model(torch.ones(1, 1)).sum() * 2**-10, optimizer) as scaled_loss:
        assert scaled_loss.item() == 2**10
        scaled_loss.backward()
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2**20
    optimizer.step()
    assert model.weight.item() == pytest.approx(1 - 2**-12, abs=1e-3)
    amp._amp_state.loss_scalers[0]._loss_scale /= 2
    with amp.scale_loss(torch.ones(()), optimizer) as scaled_loss:
        assert scaled_loss.item() == 2**19
    assert amp._amp_state.loss_scalers[0]._loss_scale == 2**19


@pytest.mark.parametrize("level", LEVELS)
def test_a_scale_written_in_mid_iteration_keeps_the_gradients_that_wait(amp, level):
    model, optimizer = make(amp, level, loss_scale=4.0)
    backward_by(amp, model, optimizer, 1.0, delay_unscale=True)
    amp._amp_state.loss_scalers[0]._loss_scale *= 2
    backward_by(amp, model, optimizer, 1.0)
    optimizer.step()
    assert model.weight.item() == 0.5


def test_a_scale_written_at_o0_holds_wherever_scaling_matters(amp):
    model, optimizer = make(amp, "O0")
    amp._amp_state.loss_scalers[0]._loss_scale = 8.0
    with pytest.raises(RuntimeError, match="closure"):
        optimizer.step(lambda: None)
    backward_by(amp, model, optimizer, 1.0, delay_unscale=True)
    grown = nn.Parameter(torch.ones(1))
    grown.grad = torch.full((1,), 8.0)  # of the backward pass above
    optimizer.add_param_group({"params": [grown]})
    assert grown.grad is None
    optimizer.step()
    assert model.weight.item() == 0.75


def test_a_static_scaler_reports_an_overflow_and_asks_for_no_skip(amp):
    scaler = amp.scaler.LossScaler(4.0)
    scaler._overflow_buf.fill_(1)
    assert scaler.update_scale() is False and scaler._has_overflow is True and scaler.loss_scale() == 4.0


def test_a_scale_that_cannot_be_is_refused_and_the_old_one_kept(amp):
    scaler = amp.scaler.LossScaler("dynamic")
    for value in (0, -1.0, INF, float("nan")):
        with pytest.raises(ValueError, match="_loss_scale"):
            scaler._loss_scale = value
    assert scaler._loss_scale == 2.0**16


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_growth_interval_and_the_count_are_honoured(amp, level):
    """GNMT: loss_scaler._scale_seq_len = 128."""
    model, optimizer = make(amp, level)
    loss_scaler = amp._amp_state.loss_scalers[0]
    assert loss_scaler._scale_seq_len == 2000
    loss_scaler._scale_seq_len = 3
    seen = []
    for _ in range(3):
        backward_by(amp, model, optimizer)
        seen.append((loss_scaler._unskipped, loss_scaler.loss_scale()))
    assert seen == [(1, 2.0**16), (2, 2.0**16), (0, 2.0**17)]
    loss_scaler._unskipped = 2
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 2.0**17, "unskipped": 2}}
    backward_by(amp, model, optimizer)
    assert loss_scaler.loss_scale() == 2.0**18
    loss_scaler._max_loss_scale, loss_scaler._unskipped = 2.0**18, 2
    backward_by(amp, model, optimizer)
    assert loss_scaler.loss_scale() == 2.0**18
    loss_scaler._min_loss_scale = 2.0**18
    backward_by(amp, model, optimizer, INF)
    assert loss_scaler.loss_scale() == 2.0**18


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_shows_in_the_scaler_and_in_the_stash_until_it_is_over(amp, level):
    """NVIDIA's BERT counts steps by `_has_overflow` after the step; other scripts read `already_patched` before it."""
    model, optimizer = make(amp, level)
    loss_scaler = amp._amp_state.loss_scalers[0]
    for grad, overflow in ((0.125, False), (INF, True), (0.125, False)):
        before = model.weight.item()
        optimizer.zero_grad()
        backward_by(amp, model, optimizer, grad)
        assert optimizer._amp_stash.already_patched is overflow
        optimizer.step()
        assert optimizer._amp_stash.already_patched is False
        assert loss_scaler._has_overflow is overflow and bool(loss_scaler._overflow_buf.item()) is overflow
        assert (model.weight.item() == before) is overflow


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("overflow", [False, True])
def test_overflow_checked_by_the_script_after_its_own_reduction(amp, level, overflow):
    """NVIDIA's BERT with allreduce_post_accumulation: its buffer in the scaler's place, then update_scale()."""
    _amp_state = importlib.import_module("apex.amp._amp_state")._amp_state
    model, optimizer = make(amp, level)
    overflow_buf = torch.zeros(1, dtype=torch.int32)
    steps = 0
    for iteration in range(3):
        for _ in range(2):
            backward_by(amp, model, optimizer, delay_overflow_check=True)
        loss_scale = _amp_state.loss_scalers[0].loss_scale()
        master_grads = [p.grad for p in amp.master_params(optimizer) if p.grad is not None]
        flat = torch.cat([g.reshape(-1) for g in master_grads]).float() * loss_scale
        if overflow and iteration == 1:
            flat.fill_(INF)
        overflow_buf.zero_()
        overflow_buf.copy_((~torch.isfinite(flat)).any())
        master_grads[0].copy_((flat / loss_scale).view_as(master_grads[0]))
        scaler = _amp_state.loss_scalers[0]
        scaler._overflow_buf = overflow_buf
        had_overflow = scaler.update_scale()
        if had_overflow == 0:
            optimizer.step()
            steps += 1
        elif _amp_state.opt_properties.master_weights:
            for param in optimizer._amp_stash.all_fp32_from_fp16_params:
                param.grad = None
        for param in model.parameters():
            param.grad = None
    assert steps == (2 if overflow else 3)
    assert model.weight.item() == 1.0 - steps * 0.25 * 0.25
    assert scaler.loss_scale() == (2.0**15 if overflow else 2.0**16)
    assert scaler._unskipped == (1 if overflow else 3)


def test_has_overflow_and_the_buffer_may_be_written(amp):
    scaler = amp.scaler.LossScaler("dynamic", init_scale=2.0**10, scale_window=2)
    scaler._has_overflow = True
    assert scaler.update_scale() is True and scaler.loss_scale() == 2.0**9
    scaler.clear_overflow_state()
    assert scaler._has_overflow is False and scaler.update_scale() is False
    scaler._overflow_buf.fill_(1)
    assert scaler.update_scale() is True and scaler._has_overflow is True and scaler.loss_scale() == 2.0**8
    scaler.clear_overflow_state()
    assert scaler._overflow_buf.tolist() == [0]
    assert [scaler.update_scale() for _ in range(2)] == [False, False] and scaler.loss_scale() == 2.0**9


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_separate_scaler_unscales(amp, device, dtype):
    scaler = amp.scaler.LossScaler(4.0)
    model_grads = [torch.tensor([4.0, 8.0], dtype=dtype, device=device), None]
    master_grads = [torch.empty(2, device=device), None]
    scaler.unscale(model_grads, master_grads, scaler.loss_scale())
    assert master_grads[0].tolist() == [1.0, 2.0]
    stashed = [torch.tensor([0.5, 0.5], device=device)]
    scaler.unscale_with_stashed(model_grads[:1], stashed, master_grads[:1])
    assert master_grads[0].tolist() == [1.5, 2.5]
    scaler.unscale_with_stashed(model_grads[:1], stashed, master_grads[:1], scale_override=(2.0, 0.5, 1.0))
    assert master_grads[0].tolist() == [3.0, 5.0]
    assert scaler.update_scale() is False and scaler._has_overflow is False


@pytest.mark.parametrize("stashed", [False, True])
def test_a_separate_scaler_keeps_its_overflow_until_it_is_cleared(amp, stashed):
    scaler = amp.scaler.LossScaler("dynamic")
    bad, good, out = torch.tensor([INF]), torch.tensor([2.0**16]), torch.tensor([7.0])
    if stashed:
        scaler.unscale_with_stashed([bad], [torch.zeros(1)], [out])
    else:
        scaler.unscale([bad], [out], None)
    assert scaler.update_scale() is True and scaler.loss_scale() == 2.0**15
    out.fill_(7.0)
    scaler.unscale([good], [out], None)
    assert out.item() == 7.0
    scaler.clear_overflow_state()
    scaler.unscale([good], [out], None)
    assert out.item() == 2.0 and scaler.update_scale() is False


@pytest.mark.parametrize("start", [1, 2**14, "dynamic"])
def test_a_separate_scaler_scales_a_gradient_penalty(amp, start):
    """progan: the scale of its own WGAN-GP term."""
    scaler = amp.scaler.LossScaler(start)
    inputs = torch.ones(2, 3, requires_grad=True)
    (grad,) = torch.autograd.grad((inputs**2).sum() * scaler.loss_scale(), inputs, create_graph=True)
    assert torch.equal(grad / scaler.loss_scale(), 2 * inputs)
    before = scaler.loss_scale()
    scaler._loss_scale /= 2
    assert scaler.loss_scale() == before / 2


def test_a_static_scale_of_1_leaves_gradients_that_are_masters_alone(amp):
    scaler = amp.scaler.LossScaler(1.0)
    grad = torch.tensor([INF])
    scaler.unscale([grad], [grad], None, models_are_masters=True)
    assert grad.item() == INF and not scaler._overflow_buf.any()


def test_the_list_of_scalers_may_be_written(amp):
    """Plug-ins for other devices put scalers of their own there."""
    with pytest.raises(AttributeError, match="loss_scalers"):
        _ = amp._amp_state.loss_scalers
    amp._amp_state.loss_scalers = []
    amp._amp_state.loss_scalers.append(amp.scaler.LossScaler(1.0))
    assert len(amp._amp_state.loss_scalers) == 1
    _model, optimizer = make(amp, "O2")
    amp._amp_state.loss_scalers[0] = amp.scaler.LossScaler(32.0)
    with amp.scale_loss(torch.ones(()), optimizer) as scaled_loss:
        assert scaled_loss.item() == 32.0
    amp._amp_state.loss_scalers = [amp.scaler.LossScaler(64.0)]
    with amp.scale_loss(torch.ones(()), optimizer) as scaled_loss:
        assert scaled_loss.item() == 64.0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_private_names_cost_no_wait_for_the_device(amp, level, device):
    """One in the step, as without them."""
    model = convnet(device=device)
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level=level)
    train_by(amp, model, optimizer, 2)
    inputs, targets = images(0, device)
    syncs = Syncs(device)
    for delayed in (False, True):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        with syncs.counting():
            context = amp.scale_loss(loss, optimizer, delay_overflow_check=delayed)
            scaled_loss = context.__enter__()
        assert syncs.count == 0
        scaled_loss.backward()
        with syncs.counting():
            context.__exit__(None, None, None)
        assert syncs.count == 0
        with syncs.counting():
            optimizer.step()
        assert syncs.count == 1
