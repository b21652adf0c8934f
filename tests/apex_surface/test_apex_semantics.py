"""Behaviour that scripts for Apex rely on beyond its signatures. Letters in the names of the tests number it."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from apexed import LEVELS, apex_amp  # noqa: F401  the fixture `amp`
from conftest import DEVICES
from torch import nn
from training import ADAM, SGD, convnet, images, linear, same, weights


def micro_step(amp, model, optimizer, number=0, factor=1.0, **kwargs):
    inputs, targets = images(number, next(model.parameters()).device.type)
    loss = nn.functional.cross_entropy(model(inputs), targets) * factor
    with amp.scale_loss(loss, optimizer, **kwargs) as scaled_loss:
        scaled_loss.backward()
    return loss.item()


def test_a_state_dict_is_a_name_of_the_module(amp):
    """timm's ApexScaler looks into the module's own dict."""
    assert {"state_dict", "load_state_dict", "scale_loss", "initialize", "master_params"} <= amp.__dict__.keys()


def test_b_load_state_dict_takes_no_other_arguments(amp):
    """swav's restart_from_checkpoint tries strict=False on everything and falls back on a TypeError."""
    model = linear([[1.0]])
    amp.initialize(model, SGD(model.parameters()), opt_level="O1")
    state = amp.state_dict()
    amp._amp_state.loss_scalers[0]._loss_scale = 4.0
    with pytest.raises(TypeError):
        amp.load_state_dict(state, strict=False)
    assert amp._amp_state.loss_scalers[0].loss_scale() == 4.0
    amp.load_state_dict(state)
    assert amp._amp_state.loss_scalers[0].loss_scale() == 2.0**16


@pytest.mark.parametrize("level", LEVELS)
def test_c_scale_loss_is_looked_up_on_the_module_and_the_stash_is_probed(amp, level):
    """pytorch-lr-finder and its test."""
    model = linear([[1.0]])
    optimizer = SGD(model.parameters())
    assert not hasattr(optimizer, "_amp_stash")
    model, optimizer = amp.initialize(model, optimizer, opt_level=level)
    assert hasattr(optimizer, "_amp_stash")
    loss = model(torch.ones(1, 1)).sum() / 8
    with mock.patch.object(amp, "scale_loss", wraps=amp.scale_loss) as spy, amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    spy.assert_called_once()
    optimizer.step()
    assert model.weight.item() < 1.0


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("clear", ["model.zero_grad", "param.grad = None"])
def test_f_gradients_never_pile_up_where_only_the_models_are_cleared(amp, level, clear):
    """tacotron2, Transformer-XL, dcgan; after a step (test_users.py, too) and after a skipped one."""
    model = linear([[1.0]])
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.25), opt_level=level, loss_scale=4.0
    )
    with amp.scale_loss(model(torch.ones(1, 1)).sum(), optimizer) as scaled_loss:
        (scaled_loss * math.inf).backward()
    optimizer.step()
    assert model.weight.item() == 1.0
    for expected in (0.75, 0.5, 0.25):
        if clear == "model.zero_grad":
            model.zero_grad()
        else:
            for param in model.parameters():
                param.grad = None
        with amp.scale_loss(model(torch.ones(1, 1)).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        assert model.weight.item() == expected


@pytest.mark.parametrize("level", LEVELS)
def test_g_micro_batches_accumulate_without_delay_unscale_clipped_each_time(amp, level):
    """conv-ai (clips the masters every micro-step), MS-G3D, MiB."""
    model = linear([[1.0, 1.0]])
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.125), opt_level=level)
    oracle = nn.Parameter(torch.ones(1, 2))
    for inputs in ([[1.0, 0.0]], [[1.0, 2.0]], [[0.5, 1.0]]):
        with amp.scale_loss(model(torch.tensor(inputs)).sum() / 8, optimizer) as scaled_loss:
            scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.125)
        (oracle * torch.tensor(inputs) / 8).sum().backward()
        torch.nn.utils.clip_grad_norm_([oracle], 0.125)
    (master,) = amp.master_params(optimizer)
    assert torch.allclose(master.grad.float(), oracle.grad, rtol=2e-3)
    optimizer.step()
    assert torch.allclose(model.weight.float(), 1.0 - 0.125 * oracle.grad, rtol=2e-3)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("where", ["model", "masters"])
def test_h_gradients_removed_between_scale_loss_and_step_are_not_applied(amp, level, where):
    """As in swav, which freezes its prototypes by `p.grad = None` for some parameters of the model."""
    model = nn.Sequential(linear([[1.0]]), linear([[1.0]]))
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.25), opt_level=level, loss_scale=4.0
    )
    with amp.scale_loss(model(torch.ones(1, 1)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    frozen = model[1].weight if where == "model" else list(amp.master_params(optimizer))[1]
    assert frozen.grad is not None
    frozen.grad = None
    optimizer.step()
    assert (model[0].weight.item(), model[1].weight.item()) == (0.75, 1.0)


@pytest.mark.parametrize("level", LEVELS)
def test_h_gradients_of_the_whole_model_removed_before_the_step_leave_it_nothing(amp, level):
    """As without amp. In Apex the masters of O2 had theirs still."""
    model = linear([[1.0]])
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.25), opt_level=level, loss_scale=4.0
    )
    with amp.scale_loss(model(torch.ones(1, 1)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    model.weight.grad = None
    optimizer.step()
    assert model.weight.item() == 1.0


def test_h_a_parameter_that_only_the_first_micro_batch_used_is_not_taken_for_removed(amp):
    model = nn.ModuleList([linear([[1.0]]), linear([[1.0]])])
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.25), opt_level="O2", loss_scale=4.0
    )
    for used in model:
        with amp.scale_loss(used(torch.ones(1, 1).half()).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
    optimizer.step()
    assert [part.weight.item() for part in model] == [0.75, 0.75]


@pytest.mark.parametrize("level", LEVELS)
def test_h_an_edit_of_the_models_gradients_after_scale_loss_is_what_the_step_takes(amp, level):
    """As in hysts' scripts, which divide param.grad.data after the unscaling. In Apex this had no effect at O2."""
    model = linear([[1.0]])
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.25), opt_level=level, loss_scale=4.0
    )
    for expected in (0.875, 0.75):
        with amp.scale_loss(model(torch.ones(1, 1)).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        for param in model.parameters():
            assert param.grad.item() == 1.0
            param.grad.data.div_(2)
        optimizer.step()
        assert model.weight.item() == expected
        assert model.weight.grad is not None, "scripts log it after the step"
        optimizer.zero_grad()
        assert model.weight.grad is None


@pytest.mark.parametrize("level", LEVELS)
def test_j_an_ema_of_state_dicts_moves_and_initialize_may_be_called_twice(amp, level):
    """CMC: moment_update over two models, a second initialize on load; stylegan2 too."""
    model, ema = linear([[1.0]]), linear([[1.0]])
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.5), opt_level=level, loss_scale=4.0
    )
    ema = amp.initialize(ema, opt_level=level)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=4.0)
    with amp.scale_loss(model(torch.ones(1, 1)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert model.weight.item() == 0.5
    averaged = ema.state_dict()
    assert averaged["weight"].dtype is torch.float32
    for _ in range(100):
        for name, value in model.state_dict().items():
            averaged[name].mul_(0.9999).add_(value, alpha=1e-4)
    assert averaged["weight"].item() == pytest.approx(0.5 + 0.5 * 0.9999**100, rel=1e-5)
    ema.load_state_dict(averaged)
    assert ema(torch.ones(1, 1)).item() == pytest.approx(averaged["weight"].item(), rel=1e-3)


@pytest.mark.parametrize("level", LEVELS)
def test_k_losses_may_be_skipped_and_the_training_initialized_again_after_growing(amp, level):
    """progan, DeepPrivacy: some loss_ids stay unused, a scaler of the script's own, initialize for the grown nets."""
    wgan_gp_scaler = amp.scaler.LossScaler(1 if level == "O0" else 2**14)
    wgan_gp_scaler._loss_scale /= 2
    assert wgan_gp_scaler.loss_scale() == (0.5 if level == "O0" else 2**13)

    discriminator, generator = nn.Sequential(linear([[1.0]])), linear([[1.0]])
    for stage in range(2):
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.0625) for net in (discriminator, generator)]
        losses = [None, discriminator, None]
        [discriminator, generator], [opt_d, _opt_g] = amp.initialize(
            [discriminator, generator],
            optimizers,
            opt_level=level,
            num_losses=len(losses),
            max_loss_scale=2.0**17,
        )
        assert len(amp._amp_state.loss_scalers) == 3
        assert all(s._max_loss_scale == 2.0**17 for s in amp._amp_state.loss_scalers)
        before = weights(discriminator)
        for _ in range(3):
            for loss_id, loss in enumerate(losses):
                if loss is not None:  # its model
                    opt_d.zero_grad()
                    with amp.scale_loss(loss(torch.ones(1, 1)).sum() / 8, opt_d, loss_id) as scaled_loss:
                        scaled_loss.backward()
                    opt_d.step()
        assert not same(weights(discriminator), before) and generator.weight.item() == 1.0
        counts = [entry["unskipped"] for entry in amp.state_dict().values()]
        assert counts == ([0, 0, 0] if level in ("O0", "O3") else [0, 3, 0])
        if stage == 0:  # grow
            discriminator.append(linear([[0.5]]))


@pytest.mark.parametrize("level", LEVELS)
def test_l_a_scheduler_built_before_initialize_and_a_bool_verbosity(amp, level):
    """srvp."""
    model = linear([[1.0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda=lambda step: 0.5**step)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=False, loss_scale=4.0)
    for expected in (0.5, 0.25, 0.125):
        optimizer.zero_grad()
        with amp.scale_loss(model(torch.ones(1, 1)).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        scheduler.step()
        assert model.weight.item() == expected


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_of_this_needs_a_gpu(amp, device):
    """Apex refused models on a CPU."""
    model = convnet(device=device)
    model, optimizer = amp.initialize(model, ADAM(model.parameters()), opt_level="O2")
    losses = []
    for number in range(30):
        optimizer.zero_grad()
        losses.append(micro_step(amp, model, optimizer, number % 3))
        optimizer.step()
    assert losses[-1] < losses[0]


def test_the_amp_module_works_as_a_state_object(amp):
    """swav: restart_from_checkpoint(..., amp=apex.amp) for every name that the checkpoint has."""
    model = convnet()
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level="O1")
    amp._amp_state.loss_scalers[0]._loss_scale = 2.0**10
    checkpoint = {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}
    amp._amp_state.loss_scalers[0]._loss_scale = 2.0**5
    for name, thing in {"state_dict": model, "optimizer": optimizer, "amp": amp}.items():
        try:
            thing.load_state_dict(checkpoint[name], strict=False)
        except TypeError:
            thing.load_state_dict(checkpoint[name])
    assert amp._amp_state.loss_scalers[0]._loss_scale == 2.0**10
