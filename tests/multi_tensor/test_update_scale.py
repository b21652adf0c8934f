"""The kernel that moves a loss scale on the device."""

from __future__ import annotations

import re

import pytest
import torch
from on_every_backend import (
    INF,
    NAN,
    backend_fixture,  # noqa: F401  the fixture `backend`
    device,
    scaler,
)
from training import exact

from amp_patch import multi_tensor as mt


@device
def test_update_scale_tells_a_story(device):
    scale, tracker = scaler(8.0, device)
    story = [(0, 8.0, 1), (0, 16.0, 0), (0, 16.0, 1), (1, 8.0, 0), (1, 4.0, 0), (0, 4.0, 1), (0, 8.0, 0)]
    for overflow, expected_scale, expected_tracker in story:
        found = torch.tensor(float(overflow), device=device)
        mt.update_scale(scale, tracker, found, growth_interval=2)
        assert (scale.item(), tracker.item()) == (expected_scale, expected_tracker)
        assert found == overflow  # the caller's to zero


@device
def test_update_scale_is_torch_s(device):
    ours, theirs = scaler(3.0, device), scaler(3.0, device)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        found = (torch.rand(1, generator=generator) < 0.2).float().to(device)
        mt.update_scale(*ours, found, growth_factor=1.7, backoff_factor=0.3, growth_interval=3)
        torch._amp_update_scale_(*theirs, found, 1.7, 0.3, 3)
        exact(ours, theirs)


@pytest.mark.parametrize("found", [1.0, 2.0, -1.0, INF, NAN])
def test_any_non_zero_found_inf_is_an_overflow(found):
    scale, tracker = scaler(8.0, tracker=5)
    mt.update_scale(scale, tracker, torch.tensor(found))
    assert (scale.item(), tracker.item()) == (4.0, 0)


@device
@pytest.mark.parametrize("newest", [0.0, 1.0])
@pytest.mark.parametrize("earlier", [0.0, 1.0, INF, NAN])
def test_a_flag_of_earlier_passes_counts_and_is_zeroed(newest, earlier, device):
    scale, tracker = scaler(8.0, device)
    found, before = torch.tensor([newest], device=device), torch.tensor(earlier, device=device)
    version = before._version
    mt.update_scale(scale, tracker, found, earlier_inf=before)
    assert (scale.item(), tracker.item()) == ((4.0, 0) if newest or earlier else (8.0, 1))
    assert (found.item(), before.item()) == (newest, 0.0) and before._version > version


@device
def test_one_flag_may_be_both(device):
    scale, tracker = scaler(8.0, device)
    found = torch.tensor(1.0, device=device)
    for expected in (4.0, 0), (4.0, 1):
        mt.update_scale(scale, tracker, found, earlier_inf=found)
        assert (scale.item(), tracker.item(), found.item()) == (*expected, 0.0)


def test_the_scale_stays_finite_positive_and_between_its_bounds():
    clean, overflow = torch.tensor(0.0), torch.tensor(1.0)
    scale, tracker = scaler(3e38)
    mt.update_scale(scale, tracker, clean, growth_interval=1)
    assert scale.tolist() == torch.tensor([3e38]).tolist() and tracker == 0
    scale, tracker = scaler(8.0)
    mt.update_scale(scale, tracker, clean, growth_interval=1, max_scale=10.0)
    assert scale.item() == 10.0
    mt.update_scale(scale, tracker, overflow, min_scale=6.0)
    assert scale.item() == 6.0
    mt.update_scale(scale, tracker, clean, min_scale=7.0)  # bounds hold at every call
    assert scale.item() == 7.0


@device
@pytest.mark.parametrize("start", [2.0**-125, 1e-37, 2.0**-149])
@pytest.mark.parametrize("backoff", [0.5, 0.3, 1e-9])
def test_a_scale_that_backs_off_for_ever_keeps_an_inverse_that_is_finite(backoff, start, device):
    """Of the powers of two 2**-127 is the last one that has one."""
    scale, tracker = scaler(start, device)
    for _ in range(30):
        mt.update_scale(scale, tracker, torch.tensor(1.0, device=device), backoff_factor=backoff, min_scale=2.0**-149)
    assert scale.item() == 2.0**-127 and tracker.item() == 0
    inverse = scale.double().reciprocal().float()
    assert inverse.isfinite().all() and inverse * scale == 1.0
    assert (scale.double() / 2).reciprocal().float().isinf().all()
    mt.update_scale(scale, tracker, torch.tensor(0.0, device=device), growth_interval=1)
    assert scale.item() == 2.0**-126


def test_a_tracker_past_the_interval_grows():
    scale, tracker = scaler(8.0, tracker=50)  # the interval was lowered, or a checkpoint says so
    mt.update_scale(scale, tracker, torch.tensor(0.0), growth_interval=10)
    assert (scale.item(), tracker.item()) == (16.0, 0)


@device
def test_hysteresis_tells_a_story(device):
    scale, tracker = scaler(64.0, device)
    patience = torch.tensor([3], dtype=torch.int32, device=device)
    story = [  # found, scale, growth tracker, patience
        (0, 64.0, 1, 3),
        (1, 64.0, 0, 2),
        (1, 64.0, 0, 1),
        (1, 32.0, 0, 0),
        (1, 16.0, 0, -1),
        (0, 16.0, 1, 3),
        (1, 16.0, 0, 2),
        (0, 16.0, 1, 3),
        (0, 32.0, 0, 3),
    ]
    for overflow, *expected in story:
        found = torch.full((1,), float(overflow), device=device)
        mt.update_scale(scale, tracker, found, growth_interval=2, hysteresis=3, hysteresis_tracker=patience)
        assert [scale.item(), tracker.item(), patience.item()] == expected


def test_update_scale_names_the_wrong_argument():
    scale, tracker = scaler(8.0)
    found = torch.tensor(0.0)
    for arguments, options, error, message in [
        (
            (tracker, tracker, found),
            {},
            ValueError,
            "update_scale: scale is a torch.int32 tensor of shape [1] on cpu, ",
        ),
        ((scale, scale, found), {}, ValueError, "update_scale: growth_tracker is a torch.float32 tensor"),
        (
            (scale, tracker, torch.zeros(2)),
            {},
            ValueError,
            "update_scale: found_inf is a torch.float32 tensor of shape [2]",
        ),
        ((scale, tracker, 0.0), {}, TypeError, "update_scale: found_inf is a float, a float32 tensor of one element"),
        ((8.0, tracker, found), {}, TypeError, "update_scale: scale is a float"),
        (
            (scale, tracker, found),
            {"hysteresis": 2},
            ValueError,
            "update_scale: hysteresis=2 needs a hysteresis_tracker",
        ),
        ((scale, tracker, found), {"hysteresis": 0}, ValueError, "update_scale: hysteresis is 0, at least 1 is wanted"),
        (
            (scale, tracker, found),
            {"min_scale": 4.0, "max_scale": 2.0},
            ValueError,
            "update_scale: min_scale=4.0 is above",
        ),
    ]:
        with pytest.raises(error, match=re.escape(message)):
            mt.update_scale(*arguments, **options)
    assert (scale.item(), tracker.item(), scale._version, tracker._version) == (8.0, 0, 0, 0)
