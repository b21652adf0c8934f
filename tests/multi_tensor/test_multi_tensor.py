"""The kernels against the one-liners of reference.py, on both backends, every device and every mix of dtypes."""

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
    versions,
)
from training import exact

from amp_patch import multi_tensor as mt

SIZES = [0, 1, 7, 8, 511, 512, 513, 16384, 16385, 0]  # around the blocks and chunks of cpu.cpp; an empty one last


# ---------------------------------------------------------------------------------------------------------------------
# scale


@on_every_set
@device
@pytest.mark.parametrize("factor", [1.0, 1 / 3, 7.3, 2.0**-16])
@pytest.mark.parametrize("source, target", [*itertools.product(DTYPES, DTYPES)])
def test_scale_is_torch_s_product_and_rounding(device, source, target, factor):
    src = draw(SIZES, source, device)
    dst = [torch.full_like(t, NAN, dtype=target) for t in src]
    found = flag(device)
    mt.multi_tensor_scale(src, dst, factor, found)
    expected = [reference.scale(t, target, factor) for t in src]
    for d, e in zip(dst, expected, strict=True):
        exact(d, e)
    assert found == reference.is_bad(*expected)


def test_scale_equals_plain_torch():
    src = [torch.tensor([1.0, -2.0, 65504.0]), torch.tensor([[4.0]], dtype=torch.bfloat16)]
    dst = [torch.zeros(3, dtype=torch.float16), torch.zeros(1, 1)]
    mt.multi_tensor_scale(src, dst, 0.5)
    exact(dst[0], torch.tensor([0.5, -1.0, 32752.0], dtype=torch.float16))
    exact(dst[1], torch.tensor([[2.0]]))


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
def test_ties_go_to_even():
    # Halfway between neighbours of FP16 (step 2 at 2048) and of BF16 (step 2 at 256).
    src = [torch.tensor([2049.0, 2051.0] * 8), torch.tensor([257.0, 259.0] * 8)]
    dst = [torch.empty(16, dtype=torch.float16), torch.empty(16, dtype=torch.bfloat16)]
    mt.multi_tensor_scale(src, dst, 1.0)
    assert dst[0].tolist() == [2048.0, 2052.0] * 8
    assert dst[1].tolist() == [256.0, 260.0] * 8


@device
def test_the_factor_may_live_on_the_device(device):
    src = draw([5, 600], torch.float16, device)
    expected = [t.float() / 3 for t in src]
    third = torch.tensor(1 / 3)
    for factor in (third, third.reshape(1), third.double()):
        dst = [torch.empty_like(t, dtype=torch.float32) for t in src]
        mt.multi_tensor_scale(src, dst, factor.to(device))
        for d, t in zip(dst, src, strict=True):
            exact(d, t.float() * torch.tensor(1 / 3, device=device))
    del expected


@on_every_set
@device
@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("place", [0, 6, 511, 599])
def test_scale_flags_a_non_finite_source(device, dtype, value, place):
    src = draw([3, 600, 0], dtype, device)
    src[1][place] = value
    for factor in (1.0, 0.0):
        found = flag(device)
        mt.multi_tensor_scale(src, [torch.empty_like(t) for t in src], factor, found)
        assert found == 1.0


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


def test_scale_flags_an_overflow_in_fp32():
    found = flag()
    mt.multi_tensor_scale([torch.tensor([3e38])], [torch.zeros(1)], 2.0, found)
    assert found == 1.0


def test_a_large_finite_sum_is_no_overflow():
    found = flag()  # Apex's CPU path summed, and called this an overflow
    mt.multi_tensor_unscale([torch.full((100,), 3e38)], 1.0, found)
    assert found == 0.0


@device
def test_float64_stays_float64(device):
    src = draw([700, 0, 1], torch.float64, device)
    mixed = [*src, torch.ones(2, device=device, dtype=torch.float16)]
    dst = [torch.empty_like(t) for t in src] + [torch.empty(2, device=device)]
    mt.multi_tensor_scale(mixed, dst, 1 / 3)
    for d, t in zip(dst, mixed, strict=True):
        exact(d, reference.scale(t, d.dtype, 1 / 3))
    assert not torch.equal(dst[0], (src[0].float() / 3).double())


@on_every_set
def test_a_nan_stays_one_whatever_its_bits():
    # The lowest 16 bits set: rounding to BF16 as if it were a number would carry into the sign.
    for place, bits in itertools.product(range(0, 70, 3), (0x7FFFFFFF, -1, 0x7F800001)):
        src, found = torch.ones(70), flag()
        src.view(torch.int32)[place] = bits
        for dtype in DTYPES:
            dst = [torch.empty(70, dtype=dtype)]
            mt.multi_tensor_scale([src], dst, 1.0)
            assert dst[0].isnan().nonzero().tolist() == [[place]]
        mt.multi_tensor_scale([src], dst, 0.5, found)
        assert found == 1.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_copy_keeps_every_bit_of_a_nan(backend, dtype):
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    copy = [torch.empty(2**16, dtype=dtype)]
    mt.multi_tensor_scale([bits.view(dtype)], copy, 1.0)
    if backend == "cpp":  # plain torch multiplies, which makes signalling NaNs quiet
        assert torch.equal(copy[0].view(torch.int16), bits)
    exact(copy[0], bits.view(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_factor_that_is_an_element_of_the_output_is_read_before_the_first_write(dtype):
    x = torch.full((50_000,), 3.0, dtype=dtype)
    mt.multi_tensor_unscale([x], x[0], flag())
    assert (x == 9.0).all()
    y = torch.full((50_000,), 3.0, dtype=dtype)
    mt.multi_tensor_axpby(y[7], [y], y[49_999], [torch.ones_like(y)], [y])
    assert (y == 12.0).all()


# ---------------------------------------------------------------------------------------------------------------------
# unscale, axpby, check_finite


@on_every_set
@device
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_unscale_is_in_place_scale(device, dtype):
    grads = draw(SIZES, dtype, device)
    expected = [reference.scale(t, dtype, 2.0**-3) for t in grads]
    found = flag(device)
    mt.multi_tensor_unscale(grads, torch.full((1,), 2.0**-3, device=device), found)
    for g, e in zip(grads, expected, strict=True):
        exact(g, e)
    assert found == 0.0
    grads[4][300] = NAN
    mt.multi_tensor_unscale(grads, 1.0, found)
    assert found == 1.0


@on_every_set
@device
@pytest.mark.parametrize("a, b", [(1.0, 1.0), (1 / 3, 7.3), (2.0**-16, 1.0)])
@pytest.mark.parametrize("dtypes", [*itertools.product(DTYPES, DTYPES, DTYPES), (torch.float64,) * 3])
def test_axpby_rounds_both_products_and_the_sum(device, dtypes, a, b):
    x, y = draw(SIZES, dtypes[0], device), draw(SIZES, dtypes[1], device, seed=1)
    out = [torch.empty_like(t, dtype=dtypes[2]) for t in x]
    mt.multi_tensor_axpby(a, x, b, y, out)
    for p, q, z in zip(x, y, out, strict=True):
        exact(z, reference.axpby(a, p, b, q, dtypes[2]))


@on_every_set
def test_axpby_is_not_fused():
    # (1 + 2**-12)**2 = 1 + 2**-11 + 2**-24: the last term is lost in the product, but not in a fused multiply-add.
    x, one = torch.full((40,), 1 + 2.0**-12), torch.full((40,), -1.0)
    out = [torch.empty(40)]
    mt.multi_tensor_axpby(1 + 2.0**-12, [x], 1.0, [one], out)
    assert out[0].tolist() == [2.0**-11] * 40


def test_axpby_may_write_into_an_input():
    x, y = draw([700], torch.float16, "cpu"), draw([700], torch.float32, "cpu", seed=1)
    expected = reference.axpby(0.5, x[0], 1.0, y[0], torch.float32)
    mt.multi_tensor_axpby(torch.tensor(0.5), x, torch.tensor([1.0]), y, y)
    exact(y[0], expected)


@on_every_set
@pytest.mark.parametrize(
    "x, y, flagged_by",
    [
        (1.0, 1.0, set()),
        (INF, 1.0, {"x", "both"}),
        (1.0, NAN, {"y", "both"}),
        (INF, NAN, {"x", "y", "both"}),
        (INF, -INF, {"x", "y", "both"}),
        (60000.0, 60000.0, {"x", "y", "both"}),  # the sum overflows FP16, neither list did
    ],
)
@pytest.mark.parametrize("check", ["x", "y", "both"])
def test_axpby_flags_the_lists_that_check_names(x, y, flagged_by, check):
    out, found = [torch.empty(600, dtype=torch.float16)], flag()
    xs, ys = [torch.ones(600)], [torch.ones(600)]
    xs[0][77], ys[0][77] = x, y
    mt.multi_tensor_axpby(1.0, xs, 1.0, ys, out, found, check=check)
    assert found == float(check in flagged_by)


def test_axpby_refuses_another_check():
    with pytest.raises(ValueError, match=re.escape("multi_tensor_axpby: check='z' is none of 'both', 'x', 'y'")):
        mt.multi_tensor_axpby(1.0, [], 1.0, [], [], check="z")


@on_every_set
@device
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_check_finite_writes_the_flag_alone(device, dtype):
    tensors = draw([*SIZES, 40000], dtype, device)
    before, counters, found = [t.clone() for t in tensors], versions(tensors), flag(device)
    mt.multi_tensor_check_finite(tensors, found)
    assert found == 0.0
    tensors[-1][39999] = -INF
    mt.multi_tensor_check_finite(tensors, found)
    assert found == 1.0
    for t, b in zip(tensors[:-1], before, strict=False):
        exact(t, b)
    assert versions(tensors)[:-1] == counters[:-1]


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


@device
def test_found_inf_is_never_reset(device):
    found, clean, out = torch.ones(1, device=device), draw([9], torch.float32, device), draw([9], torch.float32, device)
    mt.multi_tensor_scale(clean, out, 1.0, found)
    mt.multi_tensor_unscale(clean, 1.0, found)
    mt.multi_tensor_axpby(1.0, clean, 1.0, clean, out, found)
    mt.multi_tensor_check_finite(clean, found)
    mt.multi_tensor_unscale_l2norm(clean, 1.0, found)
    assert found.tolist() == [1.0]


# ---------------------------------------------------------------------------------------------------------------------
# Norms


@on_every_set
@device
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_l2norm_equals_plain_torch(device, dtype):
    tensors = [torch.tensor([3.0, 4.0]), torch.empty(0), torch.full((144,), 1.0), torch.tensor(0.0)]
    total, norms = mt.multi_tensor_l2norm([t.to(device, dtype) for t in tensors], per_tensor=True)
    assert norms.tolist() == [5.0, 0.0, 12.0, 0.0]
    assert total.item() == 13.0 and total.shape == () and total.device.type == device
    assert total.dtype == norms.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


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


@on_every_set
@device
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_l2norm_is_near_the_fp64_norm(device, dtype):
    tensors = draw([*SIZES, 200_000], dtype, device)
    # 1e-6 is 8 units in the last place of FP32: a block's rounding, not that of 200,000 terms in a row, as in torch.
    fp32 = 1e-6 if mt.backend() == "cpp" else 2e-5
    rtol = 1e-13 if dtype == torch.float64 else fp32
    total, norms = mt.multi_tensor_l2norm(tensors, per_tensor=True)
    torch.testing.assert_close(total.double(), reference.l2norm(tensors), rtol=rtol, atol=0)
    for norm, t in zip(norms, tensors, strict=True):
        torch.testing.assert_close(norm.double(), reference.l2norm([t]), rtol=rtol, atol=0)
    exact(mt.multi_tensor_l2norm(tensors), total)


def test_one_float64_tensor_makes_the_norms_float64():
    total = mt.multi_tensor_l2norm([torch.ones(2, dtype=torch.float16), torch.ones(2, dtype=torch.float64)])
    assert total.dtype == torch.float64 and total == 2.0


@on_every_set
@pytest.mark.parametrize("value", [INF, NAN])
def test_l2norm_shows_a_non_finite_element(value):
    total, norms = mt.multi_tensor_l2norm([torch.ones(4), torch.tensor([1.0, value])], per_tensor=True)
    assert not total.isfinite() and norms[0] == 2.0 and not norms[1].isfinite()


@on_every_set
@device
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_unscale_l2norm_is_the_two_calls(device, dtype):
    one, two = draw(SIZES, dtype, device), draw(SIZES, dtype, device)
    found_one, found_two = flag(device), flag(device)
    total, norms = mt.multi_tensor_unscale_l2norm(one, 1 / 3, found_one, per_tensor=True)
    mt.multi_tensor_unscale(two, 1 / 3, found_two)
    for a, b in zip(one, two, strict=True):
        exact(a, b)
    expected_total, expected_norms = mt.multi_tensor_l2norm(two, per_tensor=True)
    exact(total, expected_total)  # of the stored values, after rounding
    exact(norms, expected_norms)
    assert found_one == found_two == 0.0
    one[3][0] = INF
    assert mt.multi_tensor_unscale_l2norm(one, 1.0, found_one) == INF and found_one == 1.0


# ---------------------------------------------------------------------------------------------------------------------
# adopt


@on_every_set
@device
@pytest.mark.parametrize("dtype", DTYPES)
def test_adopt_takes_edits_and_keeps_precision(device, dtype):
    masters = draw([600], torch.float32, device)
    published = [masters[0].to(dtype)]
    mt.multi_tensor_adopt(published, masters)
    exact(masters, draw([600], torch.float32, device))  # nothing was edited
    published[0].clamp_(-10, 10)
    published[0][5] = NAN
    expected = [reference.adopt(published[0], masters[0])]
    mt.multi_tensor_adopt(published, masters)
    exact(masters, expected)
    assert masters[0][5].isnan() and masters[0].nan_to_num().abs().max() <= 10


@on_every_set
def test_adopt_equals_plain_torch():
    master = torch.tensor([1 + 2.0**-20, 1 + 2.0**-20, 5.0])
    mt.multi_tensor_adopt([torch.tensor([1.0, 2.0, 5.0], dtype=torch.float16)], [master])
    assert master.tolist() == [1 + 2.0**-20, 2.0, 5.0]


def test_adopt_wants_float32_masters():
    half = [torch.ones(1, dtype=torch.float16)]
    message = "multi_tensor_adopt: tensor 0 of masters is torch.float16, float32 is wanted"
    with pytest.raises(TypeError, match=re.escape(message)):
        mt.multi_tensor_adopt(half, half)
