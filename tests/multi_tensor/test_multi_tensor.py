"""The kernels against the one-liners of reference.py, on both backends, every device and every mix of dtypes."""

from __future__ import annotations

import contextlib
import gc
import inspect
import itertools
import math
import re
import subprocess
import sys
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace

import pytest
import reference
import torch
from conftest import DEVICES, DTYPES

from amp_patch import multi_tensor as mt
from amp_patch.multi_tensor import backends
from amp_patch.multi_tensor.checks import Contract

INF, NAN = math.inf, math.nan
SIZES = [0, 1, 7, 8, 511, 512, 513, 16384, 16385, 0]  # around the blocks and chunks of cpu.cpp; an empty one last
ALL_DTYPES = [*DTYPES, torch.float64]


# On "cpp" a test runs with the best of the CPU's instruction sets, one marked `on_every_set` with each of them.
BACKENDS = [b for b in backends.BACKENDS if b == "torch" or mt.backend() == "cpp"]
SETS = backends._C.instruction_sets() if "cpp" in BACKENDS else []


@pytest.fixture(params=BACKENDS, autouse=True)
def backend(request):
    name, _, instructions = request.param.partition("-")
    with mt.use_backend(name):
        before = backends._C.use_instruction_set(instructions or SETS[-1]) if name == "cpp" else None
        try:
            yield name
        finally:
            if before is not None:
                backends._C.use_instruction_set(before)


on_every_set = pytest.mark.parametrize(
    "backend", [*(f"cpp-{name}" for name in SETS), *(["torch"] if "torch" in BACKENDS else [])], indirect=True
)


device = pytest.mark.parametrize("device", DEVICES)


def exact(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def draw(sizes, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [size if isinstance(size, tuple) else (size,) for size in sizes]
    return [(torch.randn(shape, generator=generator) * 100).to(device, dtype) for shape in shapes]


def flag(device="cpu"):
    return torch.zeros((), device=device)


def versions(tensors):
    return [t._version for t in tensors]


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


def test_scale_by_hand():
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
# Lists of any shape


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_no_tensors(dtype):
    found = flag()
    mt.multi_tensor_scale([], [], 2.0, found)
    mt.multi_tensor_unscale([], 2.0, found)
    mt.multi_tensor_axpby(1.0, [], 1.0, [], [], found)
    mt.multi_tensor_check_finite([], found)
    mt.multi_tensor_adopt([], [])
    total, norms = mt.multi_tensor_l2norm([], per_tensor=True)
    assert total == 0.0 and total.shape == () and norms.shape == (0,)
    assert mt.multi_tensor_unscale_l2norm([], 2.0, found) == 0.0
    empty = [torch.empty(0, dtype=dtype), torch.empty(3, 0, dtype=dtype)]
    mt.multi_tensor_scale(empty, empty, 2.0, found)
    assert mt.multi_tensor_unscale_l2norm(empty, 2.0, found, per_tensor=True)[1].tolist() == [0.0, 0.0]
    assert found == 0.0


@device
def test_norms_have_the_places_of_their_tensors(device):
    tensors = [torch.empty(0), torch.full((4,), 2.0), torch.full((9,), 3.0, dtype=torch.float64), torch.empty(2, 0)]
    tensors = [t.to(device) for t in [*tensors, torch.full((40_000,), 1.0, dtype=torch.float16)]]
    assert mt.multi_tensor_l2norm(tensors, per_tensor=True)[1].tolist() == [0.0, 4.0, 9.0, 0.0, 200.0]


@device
def test_lazy_copies_become_real_where_they_are_written(device):
    base = torch.arange(6.0, device=device).reshape(2, 3)
    for view in (lambda t: t, lambda t: t.t(), lambda t: t[:, ::2]):
        copy = view(torch._lazy_clone(base))
        mt.multi_tensor_unscale([copy], 2.0, None)
        exact(copy, view(base) * 2)
        read = torch._lazy_clone(base)
        mt.multi_tensor_l2norm([read])
        assert torch._C._is_cow_tensor(read)
    found = torch.zeros((), device=device)
    lazy = torch._lazy_clone(found)
    mt.multi_tensor_check_finite([torch.full((3,), NAN, device=device)], lazy)
    assert (found.item(), lazy.item()) == (0.0, 1.0)
    exact(base, torch.arange(6.0, device=device).reshape(2, 3))


@device
def test_four_thousand_tiny_tensors(device):
    src = [torch.full((i % 5,), float(i), device=device) for i in range(4000)]  # i is exact in FP16 up to 2048
    dst = [torch.empty_like(t, dtype=torch.float16 if i <= 2048 else torch.float32) for i, t in enumerate(src)]
    found = flag(device)
    mt.multi_tensor_scale(tuple(src), tuple(dst), 0.5, found)
    assert all(d.tolist() == [i / 2] * (i % 5) for i, d in enumerate(dst))
    assert found == 0.0
    src[3999][3] = NAN
    mt.multi_tensor_check_finite(src, found)
    assert found == 1.0


def layouts(dtype, seed=0):
    """Views of all kinds, none of them a plain row of elements."""
    base = [
        t.to(dtype)
        for t in draw(
            [(6, 20, 33), (4, 3, 5, 7), (64, 9), (1100,), (3, 1, 1, 5), (100,), (6, 20, 33), (64, 9), (6, 20, 33)],
            torch.float32,
            "cpu",
            seed,
        )
    ]
    return [
        base[0].transpose(0, 2),
        base[6][1:5, ::2, 3:],
        base[1].to(memory_format=torch.channels_last),
        base[2].t(),
        base[7][:, 4],
        base[3][::2],
        base[5][99],  # zero-dim
        base[4].to(memory_format=torch.channels_last),
        base[8].permute(1, 0, 2)[:, 2],
    ]


@on_every_set
@device
@pytest.mark.parametrize("source, target", [*itertools.product(DTYPES, DTYPES), (torch.float64, torch.float64)])
def test_any_strides(device, source, target):
    for same in (True, False):
        src = [t.to(device) for t in layouts(source)]
        if same:
            dst = [t.to(device) for t in layouts(target, seed=1)]
        else:
            dst = [torch.empty(t.shape, dtype=target, device=device) for t in src]
        mt.multi_tensor_scale(src, dst, 1 / 3)
        for s, d in zip(src, dst, strict=True):
            exact(d, reference.scale(s, target, 1 / 3))
        mt.multi_tensor_scale(dst, src, 1 / 3)  # and the other way round
        for s, d in zip(src, dst, strict=True):
            exact(s, reference.scale(d, source, 1 / 3))


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_a_dimension_of_one_element_may_have_any_stride(dtype):
    out = torch.ones(3, dtype=dtype).expand(1, 3)  # strides (0, 1)
    mt.multi_tensor_scale([torch.ones(1, 3, dtype=dtype)], [out], 2.0)
    assert out.tolist() == [[2.0] * 3]


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_writing_a_view_leaves_its_neighbours(dtype):
    base = torch.zeros(40, 40, dtype=dtype)
    mt.multi_tensor_scale([torch.ones(13, 20, dtype=dtype)], [base[1::3, ::2]], 2.0)
    expected = torch.zeros(40, 40, dtype=dtype)
    expected[1::3, ::2] = 2.0
    exact(base, expected)


@on_every_set
def test_strided_lists_in_every_kernel():
    x, y, out = layouts(torch.float16), layouts(torch.float32, seed=1), layouts(torch.bfloat16, seed=2)
    mt.multi_tensor_axpby(0.5, x, 3.0, y, out)
    for p, q, z in zip(x, y, out, strict=True):
        exact(z, reference.axpby(0.5, p, 3.0, q, torch.bfloat16))
    norms = mt.multi_tensor_l2norm(x, per_tensor=True)[1]
    torch.testing.assert_close(norms, torch.stack([reference.l2norm([t]) for t in x]).float(), rtol=1e-6, atol=0)
    masters = [t.float().contiguous() for t in x]
    x[1].add_(1)
    mt.multi_tensor_adopt(x, masters)
    for p, m in zip(x, masters, strict=True):
        exact(m, p.float())
    found = flag()
    x[0][-1, -1, -1] = INF
    mt.multi_tensor_check_finite(x, found)
    assert found == 1.0


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
def test_l2norm_by_hand(device, dtype):
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
def test_adopt_by_hand():
    master = torch.tensor([1 + 2.0**-20, 1 + 2.0**-20, 5.0])
    mt.multi_tensor_adopt([torch.tensor([1.0, 2.0, 5.0], dtype=torch.float16)], [master])
    assert master.tolist() == [1 + 2.0**-20, 2.0, 5.0]


def test_adopt_wants_float32_masters():
    half = [torch.ones(1, dtype=torch.float16)]
    message = "multi_tensor_adopt: tensor 0 of masters is torch.float16, float32 is wanted"
    with pytest.raises(TypeError, match=re.escape(message)):
        mt.multi_tensor_adopt(half, half)


# ---------------------------------------------------------------------------------------------------------------------
# update_scale


def scaler(scale, device="cpu", tracker=0):
    return torch.tensor([scale], device=device), torch.tensor([tracker], dtype=torch.int32, device=device)


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


def test_update_scale_names_what_is_wrong():
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


# ---------------------------------------------------------------------------------------------------------------------
# Autograd, versions, threads


@device
def test_writes_bump_the_version_counter_and_reads_do_not(device):
    x, y, out = (draw([4, 0, 700], torch.float32, device) for _ in range(3))
    for call, written, read in [
        (lambda: mt.multi_tensor_scale(x, out, 2.0), out, x),
        (lambda: mt.multi_tensor_unscale(out, 2.0, flag(device)), out, []),
        (lambda: mt.multi_tensor_axpby(1.0, x, 1.0, y, out), out, x + y),
        (lambda: mt.multi_tensor_unscale_l2norm(out, 2.0, flag(device)), out, []),
        (lambda: mt.multi_tensor_adopt(x, out), out, x),
        (lambda: mt.multi_tensor_l2norm(out), [], out),
    ]:
        before, before_read = versions(written), versions(read)
        call()
        assert all(now > then for now, then in zip(versions(written), before, strict=True))
        assert versions(read) == before_read


def test_flags_and_scales_have_versions_too():
    tensors, found = [torch.ones(3)], flag()
    for call in (
        lambda: mt.multi_tensor_check_finite([torch.tensor([INF])], found),
        lambda: mt.multi_tensor_unscale([torch.tensor([INF])], 1.0, found),
    ):
        before = found._version
        call()
        assert found._version > before
    scale, tracker = scaler(8.0)
    patience = torch.ones(1, dtype=torch.int32)
    before = versions([scale, tracker, patience, found, *tensors])
    mt.update_scale(scale, tracker, found, hysteresis=2, hysteresis_tracker=patience)
    after = versions([scale, tracker, patience, found, *tensors])
    assert [now > then for now, then in zip(after, before, strict=True)] == [True, True, True, False, False]


def test_autograd_notices_a_write():
    weight = torch.ones(3, requires_grad=True)
    hidden = weight * 2
    loss = (hidden * hidden).sum()
    with torch.no_grad():
        mt.multi_tensor_unscale([hidden], 0.5, flag())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_leaves_that_require_grad_are_written_under_no_grad_alone():
    master = torch.nn.Parameter(torch.ones(3))
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    for call in (
        lambda: mt.multi_tensor_scale([master], [param], 3.0),
        lambda: mt.multi_tensor_adopt([param], [master]),
        lambda: mt.multi_tensor_axpby(1.0, [param], 1.0, [master], [master]),
    ):
        before = versions([master, param])
        with pytest.raises(
            ValueError, match=r"^multi_tensor_\w+: tensor 0 of \w+ requires grad.*under torch.no_grad\(\)$"
        ):
            call()
        assert versions([master, param]) == before
        with torch.no_grad():
            call()
    assert master.tolist() == [6.0] * 3 and param.tolist() == [3.0] * 3
    assert master.is_leaf and param.is_leaf and master.grad_fn is None
    assert not mt.multi_tensor_l2norm([master]).requires_grad


def test_inference_tensors():
    with torch.inference_mode():
        tensors = [torch.ones(3)]
        mt.multi_tensor_unscale(tensors, 2.0, flag())
    assert tensors[0].tolist() == [2.0] * 3


def test_results_do_not_depend_on_the_number_of_threads():
    def everything():
        x, y = (
            draw([300_000, 5, 40_001, 0], torch.float16, "cpu"),
            draw([300_000, 5, 40_001, 0], torch.float32, "cpu", 1),
        )
        found = flag()
        mt.multi_tensor_axpby(0.3, x, 0.7, y, y)
        total, norms = mt.multi_tensor_unscale_l2norm(y, 1 / 3, found, per_tensor=True)
        return [*y, total, norms, found]

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = everything()
        for threads in (2, 3, 7):
            torch.set_num_threads(threads)
            if mt.backend() == "cpp":
                exact(everything(), one)
            else:  # torch's own norm splits its sum among the threads
                torch.testing.assert_close(everything(), one, rtol=1e-6, atol=0)
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(len(SETS) < 2, reason="this machine's extension has one instruction set")
def test_instruction_sets_give_the_same_bits():
    sizes = [*range(140), 511, 16384, 16385, 40000]

    def everything(name):
        backends._C.use_instruction_set(name)
        results = []
        for low, target in itertools.product(DTYPES, DTYPES):
            x, y, out = draw(sizes, low, "cpu"), draw(sizes, torch.float32, "cpu", 1), draw(sizes, target, "cpu", 2)
            found = flag()
            mt.multi_tensor_scale(x, out, 1 / 3, found)
            sums = [t.clone() for t in out]
            mt.multi_tensor_axpby(1 / 3, x, 3.0, y, sums, found)
            mt.multi_tensor_axpby(1 / 7, x, 3.0, y, y, found)
            results += [*out, *sums, *(t.clone() for t in y), *mt.multi_tensor_l2norm(x, per_tensor=True)]
            y[-1][77] = NAN
            mt.multi_tensor_adopt(x, y)
            results += [*y, *mt.multi_tensor_unscale_l2norm(x, 1 / 3, found, per_tensor=True), *x, found]
        return results

    first, *others = map(everything, SETS)
    for other in others:
        for a, b in zip(first, other, strict=True):
            exact(a, b)


@on_every_set
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_outputs_at_any_address(backend, dtype):
    n = (33 << 20) // dtype.itemsize  # past the caches, where the loop takes another store
    base = torch.zeros(n + 70, dtype=dtype)
    src = torch.arange(n, dtype=torch.int32).remainder_(255).float()
    for offset in (0, 1, 5):
        base.zero_()
        mt.multi_tensor_scale([src], [base[offset : offset + n]], 0.5)
        exact(base[offset : offset + n], (src * 0.5).to(dtype))
        assert not base[:offset].any() and not base[offset + n :].any()


def test_threads_share_no_chunk():
    before = torch.get_num_threads()
    try:
        # Two chunks of cpu.cpp on two threads end exactly where the threads do; a chunk done twice is halved twice.
        for threads, chunks in itertools.product((2, 3, 4), range(1, 9)):
            torch.set_num_threads(threads)
            grads = [torch.ones(16384 * chunks)]
            mt.multi_tensor_unscale(grads, 0.5, flag())
            assert (grads[0] == 0.5).all()
    finally:
        torch.set_num_threads(before)


@on_every_set
def test_the_flag_is_found_wherever_it_hides():
    for place in range(0, 200_000, 9_973):
        tensor, found = torch.zeros(200_000, dtype=torch.bfloat16), flag()
        tensor[place] = NAN
        mt.multi_tensor_check_finite([torch.zeros(3), tensor], found)
        assert found == 1.0


def test_no_reference_is_kept():
    import weakref

    tensor = torch.ones(3)
    alive = weakref.ref(tensor)
    mt.multi_tensor_unscale([tensor], 1.0, flag())
    with pytest.raises(ValueError):
        mt.multi_tensor_scale([tensor], [], 1.0)
    del tensor
    gc.collect()
    assert alive() is None


# ---------------------------------------------------------------------------------------------------------------------
# Errors: what came, what was wanted, and nothing written


F32, F16 = torch.ones(3), torch.ones(3, dtype=torch.float16)
BAD_CALLS = [
    (([F32], [F32, F32]), ValueError, "multi_tensor_scale: dst has 2 tensors, src has 1"),
    (
        ([F32] * 4, [F32, F32, F32, torch.ones(2)]),
        ValueError,
        "multi_tensor_scale: tensor 3 of dst has shape [2], src has [3]",
    ),
    ((F32, [F32]), TypeError, "multi_tensor_scale: src is a Tensor, a list or tuple of tensors is wanted"),
    (([F32], F32), TypeError, "multi_tensor_scale: dst is a Tensor, a list or tuple of tensors is wanted"),
    (([F32, None], [F32, F32]), TypeError, "multi_tensor_scale: tensor 1 of src is a NoneType, a tensor is wanted"),
    (
        ([F32.int()], [F32]),
        TypeError,
        "multi_tensor_scale: tensor 0 of src is torch.int32, one of float32, float16, bfloat16, float64 is wanted: ",
    ),
    (([F32], [F32.cfloat()]), TypeError, "multi_tensor_scale: tensor 0 of dst is torch.complex64, one of float32"),
    (
        ([F32.to_sparse()], [F32]),
        TypeError,
        "multi_tensor_scale: tensor 0 of src is sparse (torch.sparse_coo), a dense one is wanted: hand over its "
        "coalesced values (`t.coalesce().values()`)",
    ),
    (
        ([F32, F32.double()], [F32, F32]),
        TypeError,
        "multi_tensor_scale: tensor 1 of dst is torch.float32, src has torch.float64: float64 stays float64",
    ),
    (
        ([F32, F32.to("meta")], [F32, F32]),
        ValueError,
        "multi_tensor_scale: tensor 1 of src is on meta, tensor 0 of src on cpu: one call takes one device",
    ),
    (
        ([F32.expand(2, 3)], [F16.expand(2, 3)]),
        ValueError,
        "multi_tensor_scale: tensor 0 of dst overlaps itself (an expanded tensor, strides [0, 1])",
    ),
    (
        ([torch.ones(2, dtype=torch.cfloat).conj().imag], [torch.ones(2)]),
        ValueError,
        "multi_tensor_scale: tensor 0 of src is a lazily negated view, call `.resolve_neg()` on it first",
    ),
]


@pytest.mark.parametrize("lists, error, message", BAD_CALLS, ids=lambda value: value if isinstance(value, str) else "")
def test_errors_name_the_list_and_the_index_and_change_nothing(lists, error, message):
    tensors = [t for ts in lists for t in (ts if isinstance(ts, list) else [ts]) if isinstance(t, torch.Tensor)]
    before, found = versions(tensors), flag()
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        mt.multi_tensor_scale(*lists, 2.0, found)
    assert versions(tensors) == before
    assert found == 0.0 and F32.tolist() == [1.0] * 3 and F16.tolist() == [1.0] * 3


def test_tensors_without_their_memory_are_refused():
    tensors = [torch.ones(6), torch.ones(2, 3).t(), torch.ones(6)[2:]]
    for t in tensors:
        t.untyped_storage().resize_(t.untyped_storage().nbytes() - 4)
    for t in tensors:
        shape = re.escape(str(list(t.shape)))
        with pytest.raises(
            ValueError, match=f"^multi_tensor_unscale: tensor 1 of grads has shape {shape} but its storage"
        ):
            mt.multi_tensor_unscale([torch.ones(3), t], 2.0, flag())
    empty = torch.ones(0, 3)
    empty.untyped_storage().resize_(0)
    mt.multi_tensor_unscale([empty], 2.0, flag())


def test_overlapping_outputs_are_refused():
    base, twice = torch.zeros(10), torch.ones(4)
    apart = [base[:3], base[5:], base[3:5]]
    mt.multi_tensor_scale([torch.ones_like(t) for t in apart], apart, 2.0)
    assert base.tolist() == [2.0] * 10
    mt.multi_tensor_scale([base, base[4:4]], [base, base[4:4]], 1.0)  # no elements, none shared
    for outs, which in [((base[:5], twice, base[4:]), "0 and 2"), ((twice, base, twice), "0 and 2")]:
        message = f"multi_tensor_scale: tensors {which} of dst overlap in memory: hand over each element once"
        with pytest.raises(ValueError, match=f"^{message}$"):
            mt.multi_tensor_scale([torch.ones_like(t) for t in outs], list(outs), 3.0)
    with pytest.raises(ValueError, match=r"^multi_tensor_unscale: tensors 0 and 1 of grads overlap"):
        mt.multi_tensor_unscale([twice, twice], 3.0, flag())
    assert base.tolist() == [2.0] * 10 and twice.tolist() == [1.0] * 4


def test_overlapping_lists_are_refused():
    base = torch.arange(10.0)
    message = "multi_tensor_scale: tensor 0 of dst overlaps tensor 0 of src in memory"
    with pytest.raises(ValueError, match=message):
        mt.multi_tensor_scale([base[:8]], [base[1:9]], 2.0)
    with pytest.raises(ValueError, match=message):
        mt.multi_tensor_scale([base[:9].view(3, 3)], [base[:9].view(3, 3).t()], 2.0)
    assert base.tolist() == list(range(10))
    mt.multi_tensor_scale([base[:5]], [base[5:]], 2.0)  # neighbours in one buffer are apart
    assert base.tolist() == [0, 1, 2, 3, 4, 0, 2, 4, 6, 8]
    halves = base.view(torch.float16)[:10]
    with pytest.raises(ValueError, match=message):
        mt.multi_tensor_scale([base], [halves], 2.0)  # one address, two dtypes


def test_lists_that_overlap_through_two_storages_are_refused():
    base = torch.arange(200.0)
    one, other, same = base[:100], torch.from_dlpack(base.numpy()[4:104]), torch.from_dlpack(base.numpy()[:100])
    with pytest.raises(ValueError, match=r"^multi_tensor_scale: tensor 0 of dst overlaps tensor 0 of src in memory"):
        mt.multi_tensor_scale([one], [other], 2.0)
    assert base.tolist() == list(range(200))
    mt.multi_tensor_scale([one], [same], 2.0)  # the very same elements
    assert one.tolist() == list(range(0, 200, 2))


@pytest.mark.parametrize(
    "found, error",
    [
        (torch.zeros(2), ValueError),
        (torch.zeros((), dtype=torch.int32), ValueError),
        (torch.zeros((), device="meta"), ValueError),
        (torch.zeros((), dtype=torch.cfloat).conj().imag, ValueError),
        (0.0, TypeError),
    ],
)
def test_found_inf_is_checked(found, error):
    tensors = [torch.ones(3)]
    for call in (
        lambda: mt.multi_tensor_unscale(tensors, 2.0, found),
        lambda: mt.multi_tensor_check_finite(tensors, found),
        lambda: mt.multi_tensor_unscale_l2norm(tensors, 2.0, found),
        lambda: mt.multi_tensor_axpby(2.0, tensors, 2.0, tensors, tensors, found),
    ):
        with pytest.raises(
            error, match=r"^multi_tensor_\w+: found_inf is a .*, a float32 tensor of one element on cpu"
        ):
            call()
    assert tensors[0].tolist() == [1.0] * 3


@pytest.mark.parametrize(
    "factor, error",
    [
        (torch.ones(2), ValueError),
        (torch.ones((), dtype=torch.float16), ValueError),
        (torch.ones((), device="meta"), ValueError),
        (torch.ones((), dtype=torch.cfloat).conj().imag, ValueError),
        ("2", TypeError),
        (None, TypeError),
    ],
)
def test_factors_are_checked(factor, error):
    tensors = [torch.ones(3)]
    with pytest.raises(error, match=r"^multi_tensor_scale: factor is a "):
        mt.multi_tensor_scale(tensors, tensors, factor)
    with pytest.raises(error, match=r"^multi_tensor_axpby: b is a "):
        mt.multi_tensor_axpby(1.0, tensors, factor, tensors, tensors)
    assert tensors[0].tolist() == [1.0] * 3


def test_a_subclass_without_memory_of_its_own_is_refused():
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls):
            return torch.Tensor._make_wrapper_subclass(cls, (3,), dtype=torch.float32)

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise AssertionError("nothing may be computed")

    with pytest.raises(
        TypeError, match=r"^multi_tensor_unscale: tensor 1 of grads is a Wrapper, a plain tensor is wanted"
    ):
        mt.multi_tensor_unscale([torch.ones(3), Wrapper()], 2.0, flag())


def seen_through_vmap():
    seen = []
    torch.func.vmap(lambda t: (seen.append(t), t)[1])(torch.ones(3, 3))
    return seen[0]


def test_wrapped_tensors_without_elements_are_refused():
    wrapped = []
    torch.func.vmap(lambda t: (wrapped.append(t), t)[1])(torch.ones(3, 0))
    with pytest.raises(TypeError, match=r"^multi_tensor_unscale: tensor 0 of grads has no memory of its own"):
        mt.multi_tensor_unscale(wrapped, 2.0, flag())


def freed():
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    "make",
    [seen_through_vmap, freed, lambda: torch._efficientzerotensor((3,)), lambda: torch._to_functional_tensor(F32)],
    ids=["vmap", "freed", "lazy zero", "functionalized"],
)
def test_tensors_without_memory_are_refused(make):
    tensors, found = [torch.ones(3)] * 2, flag()
    lists = [torch.ones(3), make()]
    for call, label in [
        (lambda: mt.multi_tensor_unscale(lists, 2.0, found), "tensor 1 of grads"),
        (lambda: mt.multi_tensor_scale(lists, tensors, 2.0, found), "tensor 1 of src"),
        (lambda: mt.multi_tensor_scale(tensors, lists, 2.0, found), "tensor 1 of dst"),
        (lambda: mt.multi_tensor_l2norm(lists), "tensor 1 of tensors"),
    ]:
        with pytest.raises(
            TypeError, match=rf"^multi_tensor_\w+: {label} has no memory of its own .*a plain tensor is"
        ):
            call()
    assert lists[0].tolist() == tensors[0].tolist() == [1.0] * 3 and found == found._version == 0


def test_single_tensors_without_memory_are_refused():
    from torch._subclasses.fake_tensor import FakeTensorMode

    tensors = [torch.ones(3)]
    with FakeTensorMode():
        fake = torch.zeros(())
    for bad in (fake, torch._efficientzerotensor(())):
        with pytest.raises(TypeError, match=r"^multi_tensor_unscale: found_inf is a \w+ without memory of its own"):
            mt.multi_tensor_unscale(tensors, 2.0, bad)
        with pytest.raises(TypeError, match=r"^multi_tensor_unscale: inv_scale is a \w+ without memory of its own"):
            mt.multi_tensor_unscale(tensors, bad, flag())
        with pytest.raises(TypeError, match=r"^update_scale: scale is a \w+ without memory of its own"):
            mt.update_scale(bad, torch.zeros(1, dtype=torch.int32), flag())
    assert tensors[0].tolist() == [1.0] * 3


def test_flags_and_scales_that_require_grad_are_written_under_no_grad_alone():
    tensors, found = [torch.tensor([1.0, INF])], torch.zeros((), requires_grad=True)
    with pytest.raises(ValueError, match=r"^multi_tensor_check_finite: found_inf requires grad.*torch.no_grad\(\)$"):
        mt.multi_tensor_check_finite(tensors, found)
    scale, tracker = scaler(8.0)
    scale.requires_grad_()
    with pytest.raises(ValueError, match=r"^update_scale: scale requires grad.*torch.no_grad\(\)$"):
        mt.update_scale(scale, tracker, torch.ones(()))
    assert (found.item(), scale.item(), found._version, scale._version) == (0.0, 8.0, 0, 0)
    with torch.no_grad():
        mt.multi_tensor_check_finite(tensors, found)
        mt.update_scale(scale, tracker, found)
    assert (found.item(), scale.item()) == (1.0, 4.0)


@pytest.mark.parametrize(
    "factor", [10**400, 2j, torch.ones(2).numpy(), [2.0]], ids=["huge", "complex", "array", "list"]
)
def test_numbers_that_are_no_float_are_refused(factor):
    tensors = [torch.ones(3)]
    with pytest.raises(TypeError, match=r"^multi_tensor_unscale: inv_scale is a \w+, a float is wanted"):
        mt.multi_tensor_unscale(tensors, factor, flag())
    scale, tracker = scaler(8.0)
    with pytest.raises(TypeError, match=r"^update_scale: backoff_factor is .*, a float is wanted$"):
        mt.update_scale(scale, tracker, flag(), backoff_factor=factor)
    assert tensors[0].tolist() == [1.0] * 3 and scale.item() == 8.0


@pytest.mark.parametrize("count", [2.5, "3", 2**31])
def test_counts_that_are_no_int_are_refused(count):
    scale, tracker = scaler(8.0)
    with pytest.raises(TypeError, match=r"^update_scale: growth_interval is .*, an int of 32 bits is wanted$"):
        mt.update_scale(scale, tracker, flag(), growth_interval=count)
    assert (scale.item(), tracker.item()) == (8.0, 0)


@pytest.mark.parametrize("factor", [2, True, Fraction(1, 2), Decimal("0.5"), torch.tensor(0.5).numpy()], ids=str)
def test_any_number_is_a_factor(factor):
    tensors = [torch.full((3,), 4.0)]
    mt.multi_tensor_unscale(tensors, factor, flag())
    assert tensors[0].tolist() == [4.0 * float(factor)] * 3


def test_contracts_have_the_names_of_the_functions_arguments():
    contracts = [c for module in (mt, mt.steps) for c in vars(module).values() if isinstance(c, Contract)]
    assert {c.name for c in contracts} == {name for name in mt.__all__ if name.startswith(("multi_tensor_", "update_"))}
    for contract in contracts:
        taken = inspect.signature(getattr(mt, contract.name)).parameters
        assert {part.name for part in (*contract.lists, *contract.arguments)} <= set(taken), contract.name


# ---------------------------------------------------------------------------------------------------------------------
# Backends


def test_the_backend_says_what_and_why(backend):
    assert mt.backend() == backend
    assert "\n" not in mt.backend_reason() and mt.backend_reason()
    with (
        pytest.raises(ValueError, match=re.escape("use_backend: 'cuda' is none of cpp, torch")),
        mt.use_backend("cuda"),
    ):
        pass
    assert mt.backend() == backend


@pytest.mark.parametrize("left_by", [None, KeyError])
def test_a_backend_is_in_use_inside_of_its_block_alone(backend, left_by):
    with contextlib.suppress(KeyError), mt.use_backend("torch"):
        assert mt.backend() == "torch" and mt.extension() is None
        if left_by is not None:
            raise left_by
    assert mt.backend() == backend and (mt.extension() is None) == (backend == "torch")


def test_the_environment_forces_torch_and_the_import_touches_no_cuda():
    program = (
        "import torch; from amp_patch import multi_tensor as mt;"
        "print(mt.backend(), torch.cuda.is_initialized(), mt.backend_reason())"
    )

    def run(**environment):
        import os

        return subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
            capture_output=True,
            text=True,
        )

    assert run(AMP_PATCH_BACKEND="torch").stdout.startswith("torch False ")
    assert "AMP_PATCH_BACKEND='nonsense' is none of cpp, torch" in run(AMP_PATCH_BACKEND="nonsense").stderr


def test_why_the_extension_is_absent_is_remembered(monkeypatch):
    monkeypatch.setitem(sys.modules, "amp_patch._C", None)
    monkeypatch.setitem(sys.modules, "amp_patch._build", SimpleNamespace(REASON="its build failed: no compiler"))
    assert backends._load() == (None, "amp_patch._C is absent: its build failed: no compiler")
    monkeypatch.setitem(sys.modules, "amp_patch._build", None)
    extension, reason = backends._load()
    assert extension is None and reason.startswith("amp_patch._C cannot be imported: ")
