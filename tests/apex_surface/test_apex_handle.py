"""Apex's casts, and its API before `initialize`: decorators, lists, the handle of `init`, wrapped optimizers."""

from __future__ import annotations

import importlib

import pytest
import torch
import training
from apexed import INF, LEVELS, apex_amp, backward_by, make  # noqa: F401  the fixture `amp`
from torch import nn
from torch.nn import functional as F
from training import SGD, linear, mm_dtype


def test_disable_casts_reaches_into_models(amp):
    """progan's penalty, ONNX export, evaluation "in pure fp32"."""
    model, optimizer = make(amp, "O1")
    inputs = torch.full((1, 1), 1 + 2**-12)
    assert model(inputs).dtype is torch.float16
    with amp.disable_casts():
        assert mm_dtype() is torch.float32
        output = model(inputs)
        assert output.dtype is torch.float32 and output.item() == 1 + 2**-12
        with amp.scale_loss(output.sum(), optimizer) as scaled_loss:
            assert model(inputs).dtype is torch.float32
            assert mm_dtype() is torch.float32
            scaled_loss.backward()
        assert mm_dtype() is torch.float32
    assert mm_dtype() is torch.float16 and model(inputs).dtype is torch.float16

    @amp.disable_casts()
    def evaluate():
        raise KeyError(str(model(inputs).dtype))

    with pytest.raises(KeyError, match="float32"):
        evaluate()
    assert model(inputs).dtype is torch.float16
    with amp.handle.disable_casts(), amp._amp_state.handle._disable_casts():
        assert mm_dtype() is torch.float32


def test_the_handle_of_an_o1_training_deactivates_it(amp):
    """fairseq's pre_export; the tearDown of Apex's own tests."""
    model, optimizer = make(amp, "O1")
    other = linear([[1.0]])
    handle = amp._amp_state.handle
    assert handle.is_active() is True and handle.has_cache is True and handle.verbose is False
    handle._clear_cache()
    with pytest.raises(AttributeError, match="_is_active"):
        handle._is_active = False
    assert handle._is_active is True
    handle._deactivate()
    assert handle.is_active() is handle._is_active is False
    assert mm_dtype() is torch.float32 and model(torch.ones(1, 1)).dtype is torch.float32
    with amp.scale_loss(model(torch.ones(1, 1)).sum() / 8, optimizer) as scaled_loss:
        assert mm_dtype() is torch.float32
        scaled_loss.backward()
    optimizer.step()
    assert model.weight.item() == 1 - 0.25 / 8
    other, _ = amp.initialize(other, SGD(other.parameters()), opt_level="O1")
    assert amp._amp_state.handle is not handle
    assert other(torch.ones(1, 1)).dtype is torch.float16 and model(torch.ones(1, 1)).dtype is torch.float32


def test_init_casts_and_deactivate_undoes_it(amp):
    handle = amp.init(enabled=True)
    assert amp._amp_state.handle is handle and handle.is_active()
    assert mm_dtype() is torch.float16 and torch.exp(torch.ones(1).half()).dtype is torch.float32
    with pytest.raises(NotImplementedError, match="binary_cross_entropy"):
        F.binary_cross_entropy(torch.ones(1).half(), torch.ones(1).half())
    handle._deactivate()
    assert mm_dtype() is torch.float32 and not handle.is_active()
    handle = amp.init(enabled=True, allow_banned=True)
    assert F.binary_cross_entropy(torch.ones(1).half(), torch.ones(1).half()).dtype is torch.float32
    handle._deactivate()


def test_init_disabled_does_nothing(amp):
    handle = amp.init(enabled=False)
    assert not handle.is_active() and mm_dtype() is torch.float32
    model = linear([[1.0]])
    optimizer = handle.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.25))
    loss = model(torch.ones(1, 1)).sum()
    with optimizer.scale_loss(loss) as scaled_loss:
        assert scaled_loss is loss
        scaled_loss.backward()
    optimizer.step()
    assert model.weight.item() == 0.75
    with handle.scale_loss(loss, optimizer) as scaled_loss, handle._disable_casts():
        assert scaled_loss is loss
    handle._clear_cache()
    handle._deactivate()


@pytest.mark.parametrize("overflow", [None, 0, 1])
def test_a_wrapped_optimizer_scales_each_of_its_losses(amp, overflow):
    model = linear([[1.0]])
    handle = amp.init(loss_scale=4.0)
    optimizer = handle.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.25), num_loss=2)
    assert isinstance(optimizer, amp.opt.OptimWrapper) and optimizer.param_groups[0]["lr"] == 0.25
    assert repr(optimizer).startswith("SGD (")
    expected = 1.0
    for iteration in range(2):
        optimizer.zero_grad()
        for index in range(2):
            with optimizer.scale_loss(model(torch.ones(1, 1)).sum()) as scaled_loss:
                assert scaled_loss.item() == 4.0 * model.weight.item()
                (scaled_loss * (INF if overflow == index and iteration == 0 else 1.0)).backward()
        optimizer.step()
        expected -= 0.0 if overflow is not None and iteration == 0 else 0.5
        assert model.weight.item() == expected
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.25


def test_an_initialized_optimizer_can_be_wrapped(amp):
    model, optimizer = make(amp, "O1")
    wrapped = amp._amp_state.handle.wrap_optimizer(optimizer, num_loss=2)
    assert len(amp._amp_state.loss_scalers) == 2
    for _ in range(2):
        with wrapped.scale_loss(model(torch.ones(1, 1)).float().sum() / 8) as scaled_loss:
            scaled_loss.backward()
    wrapped.step()
    assert model.weight.item() == 1 - 0.25 / 4


def test_more_losses_than_announced_are_refused(amp):
    model = linear([[1.0]])
    optimizer = amp.init().wrap_optimizer(SGD(model.parameters()))
    with optimizer.scale_loss(model(torch.ones(1, 1)).sum() / 8) as scaled_loss:
        scaled_loss.backward()
    with pytest.raises(RuntimeError, match="num_loss=2"), optimizer.scale_loss(model(torch.ones(1, 1)).sum()):
        pass


def test_restore_undoes_the_old_api_too(amp):
    model = linear([[1.0]])
    optimizer = SGD(model.parameters())
    plain = type(optimizer)
    amp.init().wrap_optimizer(optimizer)
    assert type(optimizer) is not plain
    training.amp.restore()
    assert type(optimizer) is plain and mm_dtype() is torch.float32


def test_an_fp16_optimizer_is_refused(amp):
    model = nn.Linear(2, 2).half()
    optimizer = importlib.import_module("apex.fp16_utils").FP16_Optimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), verbose=False
    )
    with pytest.raises(RuntimeError, match="pass the optimizer that it was made from"):
        amp.initialize(nn.Linear(2, 2), [optimizer])
