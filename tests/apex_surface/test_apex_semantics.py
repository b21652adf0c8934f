"""Behaviour that scripts for Apex rely on beyond its signatures. Letters in the names of the tests number it."""

from __future__ import annotations

import pytest
import torch
from apexed import LEVELS, apex_amp  # noqa: F401  the fixture `amp`
from torch import nn
from training import SGD, convnet, linear, same, weights


def test_a_state_dict_is_a_name_of_the_module(amp):
    """timm's ApexScaler looks into the module's own dict."""
    assert {"state_dict", "load_state_dict", "scale_loss", "initialize", "master_params"} <= amp.__dict__.keys()


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
