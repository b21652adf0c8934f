"""Loss scalers in the ways of Apex's users: several losses, written scales, scalers without `initialize`."""

from __future__ import annotations

import pytest
import torch
from apexed import INF, LEVELS, apex_amp, backward_by, make, train_by  # noqa: F401  the fixture `amp`
from conftest import DEVICES


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
    scaler.unscale(model_grads, master_grads, scale_override=2.0)
    assert master_grads[0].tolist() == [2.0, 4.0]
    assert scaler.update_scale() is False and scaler._has_overflow is False


def test_a_separate_scaler_keeps_its_overflow_until_it_is_cleared(amp):
    scaler = amp.scaler.LossScaler("dynamic")
    bad, good, out = torch.tensor([INF]), torch.tensor([2.0**16]), torch.tensor([7.0])
    scaler.unscale([bad], [out], None)
    assert scaler.update_scale() is True and scaler.loss_scale() == 2.0**15
    out.fill_(7.0)
    scaler.unscale([good], [out], None)
    assert out.item() == 7.0
    scaler.clear_overflow_state()
    scaler.unscale([good], [out], None)
    assert out.item() == 2.0 and scaler.update_scale() is False


def test_the_list_of_scalers_may_be_written(amp):
    """Plug-ins for other devices put scalers of their own there."""
    with pytest.raises(AttributeError, match="loss_scalers"):
        _ = amp._amp_state.loss_scalers
    with pytest.raises(AttributeError, match="loss_scalers"):
        amp._amp_state.loss_scalers = []
    _model, optimizer = make(amp, "O2")
    amp._amp_state.loss_scalers[0] = amp.scaler.LossScaler(32.0)
    with amp.scale_loss(torch.ones(()), optimizer) as scaled_loss:
        assert scaled_loss.item() == 32.0
    amp._amp_state.loss_scalers = [amp.scaler.LossScaler(64.0)]
    with amp.scale_loss(torch.ones(()), optimizer) as scaled_loss:
        assert scaled_loss.item() == 64.0
