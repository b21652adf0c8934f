"""Behaviour that scripts for Apex rely on beyond its signatures. Letters in the names of the tests number it."""

from __future__ import annotations

import warnings

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


class Small(nn.Module):
    """A convolution and a batch norm, of whose outputs the mean is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images).mean()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_inputs_beyond_fp16_lower_the_scale_of_their_loss_alone(amp, level):
    """Apex's suite: three losses, of which each gets another number of batches that FP16 cannot hold."""
    torch.manual_seed(0)
    model = Small()
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=1.0), opt_level=level, num_losses=3, verbosity=0
    )
    start = [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers]
    before = [p.detach().clone() for p in amp.master_params(optimizer)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for index, overflows in enumerate((0, 1, 2)):
            for _ in range(overflows):
                optimizer.zero_grad()
                loss = model(torch.randn(4, 3, 8, 8) * 2.0**20)
                with amp.scale_loss(loss, optimizer, loss_id=index) as scaled_loss:
                    scaled_loss.backward()
                optimizer.step()
    told = [each for each in caught if "cannot hold" in str(each.message)]
    if level == "O2":
        assert len(told) == 1 and told[0].filename == __file__ and "argument 'images' holds" in str(told[0].message)
        ends = [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers]
        assert ends == [scale / 2**overflows for overflows, scale in enumerate(start)]
        assert same(before, [p.detach() for p in amp.master_params(optimizer)])
    else:
        assert not told  # O1 casts no inputs of the model
