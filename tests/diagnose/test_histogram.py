"""Histogram of exponents: exact counts of given numbers, and predictions compared with casts to FP16 and BF16."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import DEVICES, DTYPES

from amp_patch.diagnose.histogram import Histogram


def histogram(values, **kwargs):
    counted = Histogram()
    counted.add(torch.as_tensor(values), **kwargs)
    return counted


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_is_counted_once_at_its_power_of_two(dtype, device):
    numbers = [0.0, -0.0, 1.0, -1.5, 1.99, 2.0, 0.25, float("inf"), float("-inf"), float("nan")]
    counted = histogram(torch.tensor(numbers, dtype=dtype, device=device))
    assert counted.counts == {-2: 1, 0: 3, 1: 1}
    assert (counted.zeros, counted.not_finite, counted.total) == (2, 3, 10)


def test_subnormal_numbers_share_one_exponent():
    """Subnormal numbers share one exponent, below all others."""
    smallest = torch.tensor([1, 1 << 23], dtype=torch.int32).view(torch.float32)
    largest = torch.tensor([torch.finfo(torch.float32).max])
    counted = histogram(torch.cat([smallest, 1.5 * smallest, largest]))
    assert counted.counts == {-127: 2, -126: 2, 127: 1}
    assert (counted.zeros, counted.not_finite) == (0, 0)


def test_fp64_numbers_beyond_fp32_count_as_finite():
    counted = histogram(torch.tensor([1e-300, -1e300, 0.0, math.inf, math.nan, 3.0], dtype=torch.float64))
    assert counted.counts == {-127: 1, 1: 1, 127: 1}
    assert (counted.zeros, counted.not_finite) == (1, 2)


def test_counts_add_up_over_tensors_of_any_shape():
    counted = Histogram()
    assert (counted.total, counted.counts, counted.best_scale()) == (0, {}, 1.0)
    for values in (torch.ones(2, 3), torch.ones(()), torch.empty(0), torch.full((2, 2), 4.0).t()):
        counted.add(values)
    assert counted.counts == {0: 7, 2: 4}


def test_a_histogram_prints_its_range_and_counts():
    assert repr(Histogram()) == "Histogram(0, 0 zero, 0 not finite)"
    assert repr(histogram([0.0, 0.5, -3.0, math.inf])) == "Histogram(2 in 2**-1 to 2**1, 1 zero, 1 not finite)"


@pytest.mark.parametrize("factor", [2.0**-16, torch.tensor(2.0**-16)])
def test_a_factor_shifts_exponents(factor):
    assert histogram([1.0, 3.0], factor=factor).counts == {-16: 1, -15: 1}


# Around each power of two what a rounding to FP16 or to zero could tell apart, and every bit of the fraction.
POWERS = torch.tensor([2.0**e for e in range(-60, 60)]).view(torch.int32)
EDGES = POWERS[:, None] + torch.cat([torch.tensor([-1, 0, 0xFFF, 0x7FEFFF, 0x7FF000]), 1 << torch.arange(23)])
VALUES = {
    "edges": EDGES.view(-1).to(torch.int32).view(torch.float32),
    "normal": torch.randn(20000, generator=torch.Generator().manual_seed(0)).pow(9) * 2.0**-12,
    "fp16": torch.arange(0x7C00, dtype=torch.int16).view(torch.float16).float(),
}


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_predicted_fp16_losses_are_exact_at_powers_of_two(values):
    counted = histogram(values)
    finite = values[values != 0]
    for power in range(-40, 41):
        cast = (finite * 2.0**power).half()
        assert counted.flushed(2.0**power) == (cast == 0).sum().item() / len(finite), power
        assert counted.overflowed(2.0**power) == cast.isinf().sum().item() / len(finite), power
    best = counted.best_scale()
    assert not (values * best).half().isinf().any() and (values * best * 2).half().isinf().any()


@pytest.mark.parametrize("scale", [1.5, 1000.0, 0.3, 65000.0])
def test_predicted_fp16_losses_at_other_scales_are_never_too_low(scale):
    for values in VALUES.values():
        finite = values[values != 0]
        cast, counted = (finite * scale).half(), histogram(values)
        low, high = 2.0 ** math.floor(math.log2(scale)), 2.0 ** math.ceil(math.log2(scale))
        assert counted.flushed(scale) == counted.flushed(low) >= (cast == 0).sum().item() / len(finite)
        assert counted.overflowed(scale) == counted.overflowed(high) >= cast.isinf().sum().item() / len(finite)


@pytest.mark.parametrize("power", [0, 8, -8])
def test_predicted_bf16_losses_are_exact(power):
    """The numbers 1.5 * 2**e for each e, over more than the range of BF16."""
    values = torch.tensor([1.5 * 2.0**e for e in range(-120, 121)] + [0.0, float("inf")])
    scale = 2.0**power
    finite = values[(values != 0) & values.isfinite()]
    cast = (finite * scale).to(torch.bfloat16)
    counted = histogram(values)
    assert math.isclose(counted.flushed(scale, torch.bfloat16), (cast == 0).double().mean().item())
    assert math.isclose(counted.overflowed(scale, torch.bfloat16), cast.isinf().double().mean().item())


def test_the_best_scale_is_the_largest_without_overflow():
    counted = histogram([2.0**-30, 1.5 * 2.0**-10])
    assert counted.best_scale() == 2.0**25
    assert counted.overflowed(2.0**25) == 0 and counted.overflowed(2.0**26) == 0.5
    assert counted.flushed(1.0) == 0.5 and counted.flushed(2.0**25) == 0
