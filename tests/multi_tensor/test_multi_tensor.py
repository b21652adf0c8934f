"""The kernels against the one-liners of reference.py, on both backends, every device and every mix of dtypes.

Other sizes, strides, numbers and overlaps are drawn in test_properties.py.
"""

from __future__ import annotations

import itertools
import math
import re

import pytest
import reference
import torch
from conftest import DTYPES
from on_every_backend import (
    ALL_DTYPES,
    INF,
    NAN,
    backend_fixture,  # noqa: F401  the fixture `backend`
    device,
    draw,
    flag,
    on_every_set,
)
from torch import Tensor
from training import exact

from amp_patch import multi_tensor as mt

SIZES = [0, 1, 7, 8, 511, 512, 513, 16384, 16385, 0]  # around the blocks and chunks of cpu.cpp; an empty one last


@on_every_set
@device
@pytest.mark.parametrize("source, target", [*itertools.product(DTYPES, DTYPES), (torch.float64, torch.float64)])
def test_all_kernels_equal_plain_torch(device, source, target):
    def make() -> tuple[list[Tensor], list[Tensor]]:
        return draw(SIZES, source, device), draw(SIZES, target, device, seed=1)

    (x, y), found, third = make(), flag(device), torch.full((1,), 1 / 3, device=device)
    out = [torch.full_like(t, NAN) for t in y]
    mt.multi_tensor_scale(x, out, 7.3, found)
    results = [reference.scale(t, target, 7.3) for t in x]
    exact(out, results)
    assert found == reference.is_bad(*results)
    mt.multi_tensor_axpby(1 / 3, x, 7.3, y, out)
    exact(out, [reference.axpby(1 / 3, p, 7.3, q, target) for p, q in zip(x, y, strict=True)])
    # 1e-6 is 8 units in the last place of FP32: a block's rounding, not that of 16,000 terms in a row, as in torch.
    rtol = 1e-13 if source is torch.float64 else 1e-6 if mt.backend() == "cpp" else 2e-5
    total, norms = mt.multi_tensor_l2norm(x, per_tensor=True)
    torch.testing.assert_close(total.double(), reference.l2norm(x).to(device), rtol=rtol, atol=0)
    expected = torch.stack([reference.l2norm([t]) for t in x])
    torch.testing.assert_close(norms.double(), expected.to(device), rtol=rtol, atol=0)
    found.zero_()
    unscaled = mt.multi_tensor_unscale_l2norm(x, third, found, per_tensor=True)
    exact(x, [reference.scale(t, source, third.item()) for t in make()[0]])
    exact(unscaled, mt.multi_tensor_l2norm(x, per_tensor=True))  # of the stored values, after rounding
    mt.multi_tensor_unscale(y, third, found)
    exact(y, [reference.scale(t, target, third.item()) for t in make()[1]])
    mt.multi_tensor_check_finite([*x, *y], found)
    assert found == 0.0


@on_every_set
@device
@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("place", [0, 6, 511, 599])
def test_one_bad_element_raises_the_flag(device, dtype, value, place):
    for call in (
        lambda src, found: mt.multi_tensor_scale(src, [torch.empty_like(t) for t in src], 0.0, found),
        lambda src, found: mt.multi_tensor_unscale(src, 1.0, found),
        mt.multi_tensor_check_finite,
    ):
        src, found = draw([3, 600, 0], dtype, device), flag(device)
        src[1][place] = value
        call(src, found)
        assert found == 1.0


@on_every_set
def test_every_half_survives_a_round_trip():
    bits = torch.arange(2**16).to(torch.int32).to(torch.uint16)
    for dtype in (torch.float16, torch.bfloat16):
        low = [bits.view(dtype)]
        wide = [torch.empty(2**16)]
        mt.multi_tensor_scale(low, wide, 1.0)
        exact(wide[0], low[0].float())
        back = [torch.empty(2**16, dtype=dtype)]
        mt.multi_tensor_scale(wide, back, 1.0)
        exact(back[0], low[0])


@on_every_set
@device
@pytest.mark.parametrize(
    "target, largest, overflows",
    [
        (torch.float16, 65519.0, 65520.0),
        (torch.bfloat16, float.fromhex("0x1.fefffep127"), float.fromhex("0x1.ffp127")),
    ],
)
def test_scale_flags_an_overflow_on_the_cast(device, target, largest, overflows):
    for value, expected in [(largest, 0.0), (-largest, 0.0), (overflows, 1.0), (-overflows, 1.0)]:
        found, dst = flag(device), [torch.zeros(9, dtype=target, device=device)]
        mt.multi_tensor_scale([torch.full((9,), value, device=device)], dst, 1.0, found)
        assert (found == expected) and dst[0].isinf().all() == bool(expected)


def test_a_large_finite_sum_is_no_overflow():
    found = flag()  # Apex's CPU path summed, and called this an overflow
    mt.multi_tensor_unscale([torch.full((100,), 3e38)], 1.0, found)
    assert found == 0.0


@on_every_set
def test_axpby_is_not_fused():
    # (1 + 2**-12)**2 = 1 + 2**-11 + 2**-24: the last term is lost in the product, but not in a fused multiply-add.
    x, one = torch.full((40,), 1 + 2.0**-12), torch.full((40,), -1.0)
    out = [torch.empty(40)]
    mt.multi_tensor_axpby(1 + 2.0**-12, [x], 1.0, [one], out)
    assert out[0].tolist() == [2.0**-11] * 40


def test_axpby_refuses_another_check():
    with pytest.raises(ValueError, match=re.escape("multi_tensor_axpby: check='z' is none of 'both', 'x', 'y'")):
        mt.multi_tensor_axpby(1.0, [], 1.0, [], [], check="z")


@on_every_set
@device
@pytest.mark.parametrize("op", ["check_finite", "l2norm"])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_factor_comes_before_the_check(device, op, as_tensor):
    def found(value: float, factor: float) -> bool:
        tensors = [torch.ones(40000, device=device), torch.full((3,), value, device=device)]
        raised, given = flag(device), torch.tensor(factor, device=device) if as_tensor else factor
        if op == "check_finite":
            mt.multi_tensor_check_finite(tensors, raised, given)
        else:
            mt.multi_tensor_l2norm(tensors, factor=given, found_inf=raised)
        return bool(raised)

    assert not found(2.0**127, 1.0) and found(2.0**127, 2.0) and not found(2.0**127, 2.0**-127)
    assert found(INF, 2.0**-127) and found(math.nan, 0.5) and not found(2.0**-149, 0.5)


@on_every_set
@device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_norm_times_a_factor_is_that_of_what_the_factor_makes(device, dtype):
    tensors, factor = draw([*SIZES, 40000], dtype, device), 1 / 3
    made = [torch.empty_like(t, dtype=torch.float32) for t in tensors]
    mt.multi_tensor_scale(tensors, made, factor)
    expected = mt.multi_tensor_l2norm(made, per_tensor=True)
    for found in (None, flag(device)):
        exact(mt.multi_tensor_l2norm(tensors, True, factor, found), expected)
        assert found is None or found == 0.0
