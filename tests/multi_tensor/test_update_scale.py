"""The kernel that moves a loss scale on the device."""

from __future__ import annotations

import pytest
import torch
from on_every_backend import (
    INF,
    NAN,
    backend_fixture,  # noqa: F401  the fixture `backend`
    device,
    scaler,
)

from amp_patch import multi_tensor as mt


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hysteresis": 2}, "update_scale: hysteresis=2 needs a hysteresis_tracker"),
        ({"hysteresis": 0}, "update_scale: hysteresis is 0, at least 1 is wanted"),
        ({"min_scale": 4.0, "max_scale": 2.0}, "update_scale: min_scale=4.0 is above"),
    ],
)
def test_options_that_contradict_are_refused(options, message):
    scale, tracker = scaler(8.0)
    with pytest.raises(ValueError, match=f"^{message}"):
        mt.update_scale(scale, tracker, torch.tensor(0.0), **options)
    assert (scale.item(), tracker.item(), scale._version, tracker._version) == (8.0, 0, 0, 0)
