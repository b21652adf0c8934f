"""The CUDA kernels without their launches (rows.h and chunk.h in csrc/kernels), run on the host thread by thread."""

from __future__ import annotations

import ctypes
import itertools
import math

import emulated
import pytest
import reference
import torch
from conftest import DTYPES
from emulated import Options, Seen, given
from training import exact

if emulated.COMPILER is None:
    pytest.skip("no C++ compiler here to build tests/cuda/emulate.cpp with", allow_module_level=True)

INF, NAN = math.inf, math.nan
PASS = 4096  # elements of the smallest chunk
SIZES = [0, 1, 3, 8, 255, 257, 2047, PASS - 1, PASS, PASS + 1, 3 * PASS + 7, 0]


@pytest.fixture(scope="module")
def library():
    return emulated.build()


@pytest.fixture
def emulate(library):
    def call(op, x, out=None, y=None, a=1.0, b=1.0, watch=3, **options):
        """(whether found_inf was raised, sums of squares, Seen)."""
        found, squares = ctypes.c_float(0.0), (ctypes.c_double * len(x))()
        options = Options(**{"max_rows": 2**40, "max_blocks": 2**31 - 1, "last_blocks": 2**40, **options})
        seen = Seen()
        status = library.emulate(
            *(op.encode(), ctypes.c_int64(len(x)), given(x), given(y or []), given(out or []), ctypes.c_double(a)),
            *(ctypes.c_double(b), ctypes.c_int64(watch), ctypes.byref(found), squares, ctypes.byref(options)),
            ctypes.byref(seen),
        )
        assert status != 2, f"{op}: a grid that no GPU takes"
        assert status == 0, f"emulate() knows no {op}"
        assert found.value in (0.0, 1.0)
        return bool(found.value), list(squares), seen

    return call


def draw(sizes, dtype, offset=0, seed=0):
    """Tensors that begin `offset` elements after an aligned address."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [size if isinstance(size, tuple) else (size,) for size in sizes]
    whole = [torch.randn(offset + math.prod(shape), generator=generator) * 100 for shape in shapes]
    return [w.to(dtype)[offset:].view(shape) for w, shape in zip(whole, shapes, strict=True)]


class Guarded:
    """Outputs with room before and behind that must stay as it was."""

    def __init__(self, like, dtype, offset=0):
        self.whole = [torch.full((t.numel() + offset + 64,), 77.0, dtype=dtype) for t in like]
        self.offset = offset
        self.tensors = [w[offset : offset + t.numel()].view(t.shape) for w, t in zip(self.whole, like, strict=True)]

    def check(self, expected):
        for whole, e in zip(self.whole, expected, strict=True):
            exact(whole[self.offset : self.offset + e.numel()].view(e.shape), e)
            assert (whole[: self.offset] == 77).all() and (whole[self.offset + e.numel() :] == 77).all()


@pytest.mark.parametrize("source, target", [*itertools.product(DTYPES, DTYPES), (torch.float64, torch.float64)])
@pytest.mark.parametrize("offset", [0, 1, 2, 4])
def test_scale_covers_every_element_and_no_other(emulate, source, target, offset):
    for source_offset, target_offset in ((offset, offset), (0, offset), (offset, 0)):
        src, out = draw(SIZES, source, source_offset), None
        out = Guarded(src, target, target_offset)
        y = draw(SIZES, source, seed=1)
        emulate("axpby", src, out.tensors, y, a=1 / 3, b=-0.7)
        out.check([reference.axpby(1 / 3, p, -0.7, q, target) for p, q in zip(src, y, strict=True)])
        bad, _, seen = emulate("scale", src, out.tensors, a=1 / 3)
        expected = [reference.scale(t, target, 1 / 3) for t in src]
        out.check(expected)
        assert bad == reference.is_bad(*expected)
        assert (seen.linear, seen.strided, seen.scattered, seen.launches) == (10, 0, 0, 1)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("offset", [0, 1, 4])
def test_in_place_each_element_once_in_any_order_of_threads(emulate, dtype, offset):
    for backwards in (False, True):
        tensors = draw(SIZES, dtype, offset)
        expected = [t * 2 for t in tensors]
        emulate("scale", tensors, tensors, a=2.0, backwards=backwards)  # twice would be four times
        for t, e in zip(tensors, expected, strict=True):
            exact(t, e)


def test_accesses_are_as_wide_as_alignment_allows(emulate):
    def widest(source, target, source_offset=0, target_offset=0):
        src = draw([64], source, source_offset)
        return emulate("scale", src, Guarded(src, target, target_offset).tensors)[2].widest

    half, bf16, single, double = torch.float16, torch.bfloat16, torch.float32, torch.float64
    assert widest(half, half) == widest(half, bf16) == 8
    assert widest(half, single) == widest(single, half) == widest(single, single) == 4
    assert widest(half, half, 4, 4) == widest(half, half, 0, 4) == widest(half, single, 4, 0) == 4
    assert widest(half, half, 0, 1) == widest(half, half, 2, 2) == widest(single, single, 1) == 1
    assert widest(double, double) == 2 and widest(double, double, 1) == 1


@pytest.mark.parametrize("param", DTYPES)
@pytest.mark.parametrize("step", [1, 2])
def test_adopt_writes_only_packs_that_change(emulate, param, step):
    master = draw([PASS * 2 + 3], torch.float32)[0]
    weight = master.to(param).repeat_interleave(step)[::step]  # of step 2 no row in memory
    edited = [0, 5, PASS - 1, PASS + 8, PASS * 2 + 1]
    weight[edited] += 1
    out = torch.full_like(master, 77.0)  # stands for the masters: where it is 77, nothing was written
    emulate("adopt", [weight], [out], [master])
    written = out != 77
    exact(out[written], reference.adopt(weight, master)[written])
    assert written[edited].all()
    assert written.sum() <= len(edited) * (4 if step == 1 else 1)  # elements of a pack


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("offset", [0, 1])
def test_a_copy_between_equal_dtypes_keeps_every_bit(emulate, dtype, offset):
    src = [torch.arange(offset + 2**16).to(torch.int32).to(torch.uint16).view(dtype)[offset:]]
    out = Guarded(src, dtype, offset)
    emulate("copy", src, out.tensors)
    assert torch.equal(out.tensors[0].view(torch.int16), src[0].view(torch.int16))  # NaN's payload too
    wide = torch.empty(2**16)
    emulate("copy", src, [wide])
    exact(wide, src[0].float())


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_one_bad_element_anywhere_raises_the_flag(emulate, dtype, value):
    for place in (0, 7, 2048, PASS - 1, PASS, PASS + 4):
        tensors = draw([3, PASS + 5, 9], dtype)
        for op in ("scale", "check_finite", "unscale_l2norm"):
            assert not emulate(op, tensors, [torch.empty_like(t) for t in tensors])[0]
        tensors[1][place] = value
        for op in ("scale", "check_finite", "unscale_l2norm"):
            assert emulate(op, tensors, [torch.empty_like(t) for t in tensors])[0]


def test_lanes_beyond_the_end_raise_no_flag(emulate):
    # Their x would be 0, and infinity times 0 a NaN of finite origin.
    x, y = [torch.full((3,), INF)], [torch.ones(3)]
    assert not emulate("axpby", x, [torch.empty(3)], y, a=INF, watch=2)[0]
    assert emulate("axpby", x, [torch.empty(3)], y, a=INF, watch=1)[0]
    assert emulate("unscale_l2norm", y, [torch.empty(3)], a=INF)[1] == [INF]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("offset", [0, 1])
def test_sums_of_squares(emulate, dtype, offset):
    tensors = draw(SIZES, dtype, offset)
    for op, factor in (("l2norm", 1.0), ("unscale_l2norm", 1 / 3)):
        out = Guarded(tensors, dtype, offset)
        squares = emulate(op, tensors, out.tensors, a=factor)[1]
        assert squares == emulate(op, tensors, out.tensors, a=factor, backwards=True)[1]
        split = emulate(op, tensors, out.tensors, a=factor, max_rows=2)[1]
        assert squares == split
        stored = tensors if op == "l2norm" else out.tensors
        expected = torch.tensor([t.double().square().sum() for t in stored], dtype=torch.float64)
        torch.testing.assert_close(torch.tensor(squares, dtype=torch.float64), expected, rtol=1e-6, atol=0)


def test_chunks_grow_with_the_work(emulate):
    src = draw([2**23, 2**23 + 1], torch.float16)
    out = Guarded(src, torch.float16)
    blocks = emulate("scale", src, out.tensors, a=2.0)[2].blocks
    out.check([t * 2 for t in src])
    assert blocks == 2**23 // 8192 * 2 + 1
    assert emulate("check_finite", [src[0][:1]] * 3)[2].blocks == 3


@pytest.mark.parametrize(("coded", "slots"), [(False, 528), (True, 396)])  # blocks that run at once on an H100
def test_no_wave_is_begun_for_a_few_blocks(library, coded, slots):
    library.count_blocks.restype = ctypes.c_int64
    for total in (8_000_000, 100_000_000, *range(20_000_000, 200_000_000, 7_654_321)):
        for tensors in (1, 50, 300):
            sizes = (ctypes.c_int64 * tensors)(*([total // tensors] * tensors))
            waves = library.count_blocks(tensors, sizes, ctypes.c_int64(coded)) / slots
            assert (3.7 if tensors == 1 else 3) < waves <= 4, (total, tensors)


def layouts(dtype, seed=0):
    a, b, c, d, e = draw([(6, 20, 33), (4, 3, 5, 7), (64, 9), (1100,), (3, 1, 1, 5)], dtype, seed=seed)
    return {
        "transposed": a.transpose(0, 2),
        "sliced": a[1:5, ::2, 3:],
        "channels_last": b.to(memory_format=torch.channels_last),
        "matrix": c.t(),
        "column": c[:, 4],
        "every other": d[::2],
        "zero-dim": d[99],
        "ones": e.to(memory_format=torch.channels_last),
        "tail": a.permute(1, 0, 2)[:, 2],
        "5-d": torch.stack([b, b + 1]).permute(4, 0, 2, 1, 3)[::2],
    }


@pytest.mark.parametrize("source, target", [*itertools.product(DTYPES, DTYPES), (torch.float64, torch.float64)])
def test_any_strides(emulate, source, target):
    names = list(layouts(source))
    for same in (True, False):
        src = list(layouts(source).values())
        dst = list(layouts(target, seed=1).values()) if same else [torch.empty(t.shape, dtype=target) for t in src]
        emulate("scale", src, dst, a=1 / 3)
        for name, s, d in zip(names, src, dst, strict=True):
            assert torch.equal(d, reference.scale(s, target, 1 / 3)), name
        emulate("scale", dst, src, a=3.0)
        for name, s, d in zip(names, src, dst, strict=True):
            assert torch.equal(s, reference.scale(d, source, 3.0)), name
        emulate("axpby", src, dst, dst, a=0.5, b=0.0)
        for name, s, d in zip(names, src, dst, strict=True):
            assert torch.equal(d, reference.scale(s, target, 0.5)), name


def test_dense_tensors_of_one_memory_order_are_rows(emulate):
    def kinds(x, out):
        seen = emulate("scale", [x], [out])[2]
        return seen.linear, seen.strided, seen.scattered

    base = torch.randn(4, 3, 5, 7)
    last = base.to(memory_format=torch.channels_last)
    assert kinds(last, torch.empty_like(last)) == (1, 0, 0)
    assert kinds(base.permute(3, 1, 0, 2), torch.empty_like(base).permute(3, 1, 0, 2)) == (1, 0, 0)
    assert kinds(last, torch.empty_like(base)) == (0, 1, 0)
    assert kinds(base[:, :2], torch.empty(4, 2, 5, 7)) == (0, 1, 0)
    assert kinds(torch.ones(1).expand(9), torch.empty(9)) == (0, 1, 0)
    assert kinds(base[1:3], torch.empty(2, 3, 5, 7)) == (1, 0, 0)
    assert kinds(base[2, 1, 3, 5], torch.empty(())) == (1, 0, 0)
    assert kinds(torch.randn(1, 5, 1).transpose(0, 2), torch.empty(1, 5, 1)) == (1, 0, 0)


def test_more_dimensions_than_index_arithmetic_has(emulate):
    crowded = torch.randn((2, 3) * 4)[(slice(None), slice(0, 3, 2)) * 4]  # cuda.cu copies such a tensor first
    assert emulate("scale", [crowded], [torch.empty(crowded.shape)])[2].scattered == 1
    plain = torch.randn((1,) * 40 + (2,) * 12 + (1,) * 12)  # 64 dimensions that merge into one
    seen = emulate("scale", [plain], [torch.empty_like(plain)])[2]
    assert (seen.linear, seen.scattered) == (1, 0)


@pytest.mark.parametrize("sizes", [[], [0], [(3, 0), (0,)]])
@pytest.mark.parametrize("op", ["copy", "scale", "check_finite", "l2norm", "unscale_l2norm", "axpby", "adopt"])
def test_nothing_to_do(emulate, op, sizes):
    """A GPU refuses a launch of no blocks."""
    lists = [draw(sizes, torch.float32) for _ in range(3)]
    found, squares, seen = emulate(op, *lists)
    assert not found and squares == [0.0] * len(sizes) and seen.launches == 0


def test_past_31_bits(emulate):
    size = 2**31 + PASS + 5
    huge = torch.empty(size, dtype=torch.float16)  # of whose pages only the last are touched
    huge[-70000:] = 1.0
    for backwards in (False, True):
        emulate("scale", [huge], [huge], a=2.0, last_blocks=1, backwards=backwards)
    last = (size - 1) % 65536 + 1
    assert (huge[-last:] == 4.0).all() and (huge[-70000:-last] == 1.0).all()
    assert not emulate("check_finite", [huge], last_blocks=1)[0]
    huge[-1] = INF
    assert emulate("check_finite", [huge], last_blocks=1)[0]

    overlapping = huge.as_strided((size // 2 - 2, 5), (2, 1))  # 5.4e9 elements, in 4.3 GB
    assert overlapping.numel() > 2**32
    assert not emulate("check_finite", [overlapping], last_blocks=1)[0]
    huge[(size // 2 - 3) * 2 + 4] = NAN
    assert emulate("check_finite", [overlapping], last_blocks=1)[0]
