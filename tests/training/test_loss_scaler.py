from __future__ import annotations

import logging

import pytest
import torch
from conftest import DEVICES

from amp_patch import amp
from amp_patch.policy import Policy
from amp_patch.training.loss_scaler import LossScaler


def scaler(loss_scale="dynamic", *, minimum=2.0**-24, maximum=2.0**24, **kwargs):
    return LossScaler(loss_scale, min_loss_scale=minimum, max_loss_scale=maximum, **kwargs)


def after(subject, overflow):
    subject.record(torch.tensor(float(overflow), device=subject.scale_tensor.device))
    subject.update()
    return subject.loss_scale(), subject.unskipped()


@pytest.mark.parametrize("device", DEVICES)
def test_the_story_of_a_dynamic_scale(device):
    subject = scaler().to(torch.device(device))
    assert subject.loss_scale() == 65536.0
    assert after(subject, False) == (65536.0, 1)
    assert after(subject, False) == (65536.0, 2)
    assert after(subject, True) == (32768.0, 0)
    assert after(subject, True) == (16384.0, 0)
    for clean in range(1, Policy.growth_interval):
        assert after(subject, False) == (16384.0, clean)
    assert after(subject, False) == (32768.0, 0)
    assert after(subject, False) == (32768.0, 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("overflowing", [0, 1, 2])
def test_flags_before_one_update_count_once(overflowing, device):
    subject = scaler()
    flags = [torch.tensor(float(index == overflowing)) for index in range(2)]
    subject.record(flags[0])
    subject.defer()  # a delayed exit
    subject.record(flags[1])  # an exit that an error ended before its update
    subject.to(torch.device(device))
    assert after(subject, overflowing == 2) == (32768.0, 0)
    assert after(subject, False) == (32768.0, 1)
    assert [flag.item() for flag in flags] == [float(index == overflowing) for index in range(2)]


def test_a_deferred_flag_is_in_one_tensor_for_the_graph_that_updates():
    """A replay of the delayed exit alone, without the host's `record`, is seen by the next update."""
    subject = scaler()
    subject.record(torch.tensor(0.0))
    subject.defer()
    replayed = subject._found_inf
    assert after(subject, False) == (65536.0, 1)
    replayed.clamp_min_(torch.tensor(1.0))
    assert after(subject, False) == (32768.0, 0) and replayed.item() == 0.0


def test_the_scale_stays_in_its_range():
    subject = scaler(minimum=2.0**15, maximum=2.0**16)
    assert after(subject, True) == (2.0**15, 0)
    assert after(subject, True) == (2.0**15, 0)
    subject.load_state_dict({"loss_scale": 2.0**16, "unskipped": Policy.growth_interval - 1})
    assert after(subject, False) == (2.0**16, 0)


@pytest.mark.parametrize(("low", "high", "start"), [(1.0, 2.0**24, 65536.0), (1.0, 512.0, 512.0), (2e5, 2e6, 2e5)])
def test_the_initial_scale_is_in_the_range(low, high, start):
    assert scaler(minimum=low, maximum=high).loss_scale() == start


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_loss_is_scaled_in_fp32_or_its_fp64(dtype):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    amp.initialize(model, optimizer, opt_level="O2", loss_scale=1024.0, verbosity=0)
    with amp.scale_loss(torch.tensor(3.0, dtype=dtype), optimizer) as scaled:
        pass
    assert scaled.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    assert scaled.item() == 3072.0


def test_state_dict_has_apex_s_form_and_loads():
    subject, other = scaler(), scaler()
    after(subject, True)
    after(subject, False)
    assert subject.state_dict() == {"loss_scale": 32768.0, "unskipped": 1}
    other.load_state_dict(subject.state_dict())
    assert other.state_dict() == subject.state_dict()
    with pytest.raises(KeyError):
        other.load_state_dict({"loss_scale": 1.0})
    assert other.state_dict() == subject.state_dict()


def test_messages_are_rate_limited_and_name_the_scaler(caplog):
    subject = scaler(2.0**20, loss_id=7)
    with caplog.at_level(logging.WARNING, "amp_patch"):
        for _ in range(9):
            subject.skipped(lambda: pytest.fail("nothing looks wrong yet"))
            subject.stepped()
    assert [record.getMessage().split("(")[1].split(")")[0] for record in caplog.records] == [
        f"skip {n} of loss scaler 7" for n in (1, 2, 4, 8)
    ]


def test_many_skips_in_a_row_name_the_parameters(caplog):
    subject = scaler(2.0**20)
    with caplog.at_level(logging.WARNING, "amp_patch"):
        for _ in range(10):
            subject.skipped(lambda: "head.weight (NaN)")
    assert "10 in a row; not finite: head.weight (NaN)" in caplog.records[-1].getMessage()


def test_a_scale_below_one_names_the_parameters(caplog):
    with caplog.at_level(logging.WARNING, "amp_patch"):
        scaler(0.5).skipped(lambda: "head.weight (Inf)")
    assert "head.weight (Inf)" in caplog.text


def test_verbosity_0_is_silent(caplog):
    with caplog.at_level(logging.WARNING, "amp_patch"):
        scaler(verbosity=0).skipped(lambda: "x")
    assert caplog.text == ""
