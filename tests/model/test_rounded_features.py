"""Inputs of cast models of which rounding removes the variation are warned about, and ordinary inputs are not."""

from __future__ import annotations

import pytest
import torch
from conftest import DEVICES
from crossed import crossed
from low_models import Echo
from torch import Tensor, nn

from amp_patch import amp

CAST = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16, "O7": torch.bfloat16}


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_feature(feature: Tensor, axis: int = 1) -> Tensor:
    """Seven features of noise, and behind them `feature`."""
    shape = list(feature.unsqueeze(axis).shape)
    shape[axis] = 7
    return torch.cat([noise(*shape, seed=1), feature.unsqueeze(axis)], axis)


def lost(x: Tensor, low: torch.dtype) -> float:
    """The share of the variance of `x` that its rounded values do not explain, by a straight line through both."""
    x, rounded = x.double().flatten(), x.to(low).double().flatten()
    if bool((rounded == rounded[0]).all()):
        return 1.0
    return 1 - float(torch.corrcoef(torch.stack([x, rounded]))[0, 1]) ** 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", ["O5", "O7"])
@pytest.mark.parametrize(
    ("x", "which"),
    [
        (1000 + noise(64, 1), ""),
        (with_feature(1000 + noise(64)), "feature 7 (of dimension 1)"),
        (with_feature(1000 + noise(4, 16), 2), "feature 7 (of dimension 2)"),
        (with_feature(1000 + noise(4, 32), 1), "feature 7 (of dimension 1)"),
        (with_feature(1000 + noise(2, 9, 9), 1), "feature 7 (of dimension 1)"),
        (with_feature(1000 + noise(2, 9, 9), 3), "feature 7 (of dimension 3)"),
        (1.5 + 1e-3 * noise(64, 8), ""),
        (with_feature(20 + 0.02 * noise(64)), "feature 7 (of dimension 1)"),
        (with_feature(-1013 + 4 * noise(64)), "feature 7 (of dimension 1)"),
        (with_feature(101.37 + 0.2 * noise(64).cumsum(0)), "feature 7 (of dimension 1)"),
        (with_feature((1.7e9 + 3600 * noise(64).double()).float()), "feature 7 (of dimension 1)"),
        (1000 + noise(1, 24), "all its numbers"),
        (1000 + noise(64, 300), ""),
    ],
)
def test_an_input_that_rounding_makes_constant_is_warned_about_once(x, which, level, device):
    model = amp.initialize(Echo().to(device), opt_level=level)
    with pytest.warns(UserWarning, match="of the variance") as caught:
        [model(x.to(device)) for _ in range(3)]
    said = str(caught[0].message)
    assert len(caught) == 1 and which in said and "keep_fp32=" in said and CAST[level].__str__() in said


@pytest.mark.parametrize(("level", "other", "spread"), [("O5", "O4", 1.0), ("O5", "O4", 12.0), ("O2", "O1", 1.0)])
def test_the_warning_has_the_share_of_the_variance(level, other, spread):
    x = 1000 + spread * noise(256)
    model = amp.initialize(Echo(), opt_level=level)
    with pytest.warns(UserWarning, match=f"removes {lost(x, CAST[level]):.0%} of the variance") as caught:
        model(with_feature(x))
    assert f"opt_level={other!r}" in str(caught[0].message)


def ordinary(rows: int) -> dict[str, Tensor]:
    x, u = noise(rows, 24), torch.rand(rows, 24, generator=torch.Generator().manual_seed(2))
    return {
        "noise": x,
        "noise around 5": x + 5,
        "probabilities": x.softmax(-1),
        "positions": u,
        "sorted positions": u.sort(1).values,
        "a grid": torch.linspace(0, 1, 24).expand(rows, 24),
        "one-hot": nn.functional.one_hot((u[:, 0] * 24).long(), 24).float(),
        "tokens": (u * 256).floor(),
        "two values": (u < 0.1).float() * 3.3 - 0.3,
        "two near values": 100.2 + 0.7 * (u < 0.1),
        "a constant": torch.cat([x, torch.full((rows, 1), 0.1)], 1),
        "a constant with rounding errors": 1000.1 * (1 + 1e-7 * x),
        "an outlier": torch.cat([x, torch.full((1, 24), 1e4)]),
        "log-normal": (2 * x).exp() * 10,
        "few entries": x * (u < 0.05),
        "a sequence": noise(rows, 5, 64),
        "padded": noise(rows, 12, 8) * (torch.arange(12)[:, None] < 7),
        "walks": noise(rows, 30, 3).cumsum(1),
        "points": torch.rand(rows, 50, 3, generator=torch.Generator().manual_seed(3)),
        "standardized images": (torch.rand(rows, 3, 8, 8, generator=torch.Generator().manual_seed(4)) - 0.45) / 0.22,
        "images to 255": torch.rand(rows, 8, 8, 3, generator=torch.Generator().manual_seed(5)) * 255,
        "white borders": nn.functional.pad(noise(rows, 20, 20).clamp(-2, 2.25), (3,) * 4, value=2.25).flatten(1)
        - 0.0157 * (torch.rand(rows, 676, generator=torch.Generator().manual_seed(6)) < 0.5),
        "a table of positions": torch.outer(torch.arange(rows * 1.0), 0.001 ** torch.linspace(0, 1, 16)).cos(),
        "a waveform": 0.1 * noise(rows, 1, 400) * torch.linspace(0, 1, 400),
        "biases of positions": -0.5 * torch.arange(9.0).expand(rows, 2, 9, 9),
    }


@crossed({"kind": list(ordinary(1)), "rows": [1, 8, 64], "level": ["O2", "O5"]})
def test_ordinary_inputs_are_not_warned_about(kind, level, rows):
    amp.initialize(Echo(), opt_level=level)(ordinary(rows)[kind].clone())


def test_features_with_a_nan_or_an_infinity_are_not_judged():
    x = torch.stack([1000 + noise(64), noise(64)], 1)
    x[3, 0], x[4, 1] = float("nan"), float("inf")
    assert not amp.initialize(Echo(), opt_level="O5")(x).isfinite().all()
