"""Every kernel against reference.py, on lists that hypothesis draws: sizes, strides, dtypes, values, aliasing, faults.

An example runs on each backend and each instruction set of this machine, every time from the same bits. All the memory
around the tensors is compared too, bit by bit.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import reference
import torch
from conftest import DTYPES
from hunts import hunt
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

from amp_patch import multi_tensor as mt
from amp_patch.multi_tensor import backends

INF, NAN = math.inf, math.nan
F64 = torch.float64
BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32, F64: torch.int64}
MANTISSA = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23, F64: 52}
SIZES = [0, 1, 2, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513]
LARGE = [16383, 16384, 16385]  # around a chunk of cpu.cpp


# ---------------------------------------------------------------------------------------------------------------------
# Backends


def everywhere() -> Iterator[str]:
    """Each backend in turn, in use while the caller's loop is at it; "cpp" once for each instruction set."""
    names = [f"cpp-{name}" for name in backends._C.instruction_sets()] if mt.backend() == "cpp" else []
    for name in [*names, "torch"]:
        with backend(name):
            yield name


@contextmanager
def backend(name: str) -> Iterator[None]:
    kind, _, instructions = name.partition("-")
    with mt.use_backend(kind):
        before = backends._C.use_instruction_set(instructions) if instructions else None
        try:
            yield
        finally:
            if before is not None:
                backends._C.use_instruction_set(before)


# ---------------------------------------------------------------------------------------------------------------------
# Memory, and tensors in it


@dataclass(frozen=True)
class Buffer:
    """A row of memory. `poison` puts single values into it, by their place as a fraction of the whole."""

    dtype: torch.dtype
    size: int
    values: str
    seed: int
    poison: tuple[tuple[float, float], ...] = ()

    def make(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        largest, kind = torch.finfo(self.dtype).max, BITS[self.dtype]
        sign = torch.randint(0, 2, (self.size,), generator=generator) * 2.0 - 1.0
        if self.values == "any bits":
            info = torch.iinfo(kind)
            data = torch.randint(info.min, info.max, (self.size,), generator=generator, dtype=kind).view(self.dtype)
        elif self.values == "subnormal":
            mantissa = torch.randint(0, 2 ** MANTISSA[self.dtype], (self.size,), generator=generator)
            data = mantissa.to(kind).view(self.dtype).copysign(sign.to(self.dtype))
        elif self.values == "near overflow":
            data = (sign * largest * (1 + torch.rand(self.size, generator=generator, dtype=F64)) / 2).to(self.dtype)
        elif self.values == "edges":
            edges = torch.tensor(
                [
                    *(0.0, -0.0, 1.0, torch.finfo(self.dtype).tiny, largest, -largest, INF, -INF, NAN),
                    *(65504.0, 65519.0, -65520.0, (2 - 2.0**-8) * 2.0**127, 2.0**-24, 2.0**-25, 2049.0, 257.0),
                ],
                dtype=F64,
            )
            data = edges[torch.randint(0, len(edges), (self.size,), generator=generator)].to(self.dtype)
        else:
            data = (torch.randn(self.size, generator=generator) * 100).to(self.dtype)
        for fraction, value in self.poison:
            data[int(fraction * (self.size - 1))] = value
        return data


@dataclass(frozen=True)
class Place:
    """Where a tensor lies."""

    buffer: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def of(self, buffers: list[Tensor]) -> Tensor:
        return buffers[self.buffer].as_strided(self.shape, self.strides, self.offset)

    @property
    def span(self) -> int:
        """Elements of memory between the first and the last, both included."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))


@dataclass(frozen=True)
class Case:
    """The lists of one call, as places in fresh buffers."""

    buffers: tuple[Buffer, ...]
    lists: dict[str, tuple[Place, ...]]
    same_object: bool  # tensors at one place are one Python object, else views of their own

    def make(self) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        buffers = [b.make() for b in self.buffers]
        known: dict[Place, Tensor] = {}
        lists: dict[str, list[Tensor]] = {}
        for role, places in self.lists.items():
            lists[role] = [
                known.setdefault(place, place.of(buffers)) if self.same_object else place.of(buffers)
                for place in places
            ]
        return buffers, lists

    def after(self, written: str, values: list[Tensor]) -> list[Tensor]:
        """The buffers when `values` have been stored in the list `written`, and nothing else."""
        buffers = [b.make() for b in self.buffers]
        for place, value in zip(self.lists[written], values, strict=True):
            place.of(buffers).copy_(value)
        return buffers


def same(actual: list[Tensor], expected: list[Tensor], nan_bits: bool = False) -> bool:
    """Equal bit by bit, the sign of zero too; NaN equals NaN unless `nan_bits`."""
    assert [(t.dtype, t.shape) for t in actual] == [(t.dtype, t.shape) for t in expected]
    for a, e in zip(actual, expected, strict=True):
        equal = a.view(BITS[a.dtype]) == e.view(BITS[e.dtype])
        if not (equal if nan_bits else equal | (a.isnan() & e.isnan())).all():
            return False
    return True


shapes = st.one_of(
    st.sampled_from(SIZES).map(lambda n: (n,)),
    st.sampled_from(SIZES).map(lambda n: (n,)),
    st.just(()),
    st.tuples(st.integers(0, 40), st.integers(0, 40)),
    st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(1, 6), st.integers(1, 6)),
    st.sampled_from([*LARGE, (130, 127), (3, 16384 // 2)]).map(lambda n: n if isinstance(n, tuple) else (n,)),
)
seeds = st.integers(0, 2**16)
values = st.sampled_from(["normal", "normal", "normal", "any bits", "subnormal", "near overflow", "edges"])
poisons = st.lists(st.tuples(st.floats(0, 1), st.sampled_from([INF, -INF, NAN])), max_size=2).map(tuple)
narrow = st.sampled_from(DTYPES)


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(max(size, 1) for size in shape[d + 1 :]) for d in range(len(shape)))


@st.composite
def strides(draw: Any, shape: tuple[int, ...], expands: bool) -> tuple[int, ...]:
    """Any memory order of the dimensions (transposed, channels_last), with gaps (sliced) and, if `expands`, none."""
    if draw(st.booleans()):
        return contiguous(shape)
    result = [0] * len(shape)
    stride = draw(st.sampled_from([1, 1, 1, 2, 3]))
    for d in draw(st.permutations(range(len(shape)))):
        if shape[d] == 1 and draw(st.booleans()):
            result[d] = draw(st.integers(0, 9))  # never used, and torch leaves all sorts of things there
        elif not (expands and draw(st.sampled_from([False, False, True]))):
            result[d] = stride
            stride = stride * max(shape[d], 1) + draw(st.sampled_from([0, 0, 1, 5]))
    return tuple(result)


def _place_near(
    other: Place,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    how: str,
    buffers: list[Buffer],
    here: dict[str, tuple[torch.dtype, Place]],
) -> Place:
    """A place in the buffer of `other`: "beside" it, right behind, or "between" its elements.

    The buffer grows; places of `here` move apart to let the new elements in.
    """
    source = buffers[other.buffer]
    if how == "beside":
        place = Place(other.buffer, source.size - 9, shape, other.strides)
        grown = source.size + place.span
        buffers[other.buffer] = Buffer(dtype, grown, source.values, source.seed, source.poison)
        return place
    doubled = tuple(2 * stride for stride in other.strides)
    moved = Place(other.buffer, 2 * other.offset, shape, doubled)
    buffers[other.buffer] = Buffer(dtype, 2 * source.size, source.values, source.seed, source.poison)
    spread = {
        r: Place(p.buffer, 2 * p.offset, p.shape, tuple(2 * s for s in p.strides))
        for r, (_, p) in here.items()
        if p.buffer == other.buffer
    }
    here.update((r, (here[r][0], p)) for r, p in spread.items())
    assert here and moved in spread.values()
    return Place(other.buffer, 2 * other.offset + 1, shape, doubled)


@st.composite
def cases(
    draw: Any,
    *roles: str,
    written: str | None = None,
    dtypes: dict[str, Any] | None = None,
    double: bool = True,
    contents: Any = values,
) -> Case:
    """Lists by the names `roles`. `written` may be where another list is, beside it, or between its elements."""
    buffers: list[Buffer] = []
    lists: dict[str, list[Place]] = {role: [] for role in roles}

    def room(dtype: torch.dtype, span: int) -> int:
        """A new buffer for `span` elements."""
        holds = draw(contents)
        poison = draw(poisons) if holds == "normal" else ()
        buffers.append(Buffer(dtype, span, holds, draw(seeds), poison))
        return len(buffers) - 1

    for _ in range(draw(st.integers(0, 5))):
        shape, is_double = draw(shapes), double and draw(st.sampled_from([False, False, False, True]))
        common = draw(strides(shape, False)) if draw(st.booleans()) else None
        here: dict[str, tuple[torch.dtype, Place]] = {}
        for role in roles:
            others = [
                (dtype, place)
                for dtype, place in here.values()
                if (is_double or dtypes is None or dtypes.get(role) in (None, dtype))
                and not (role == written and any(s == 0 for s, n in zip(place.strides, shape, strict=True) if n > 1))
            ]
            how = draw(st.sampled_from(["apart", "apart", "same", "between", "beside"])) if others else "apart"
            if how == "apart":
                fixed = dtypes.get(role) if dtypes is not None else None
                dtype = F64 if is_double else fixed if fixed is not None else draw(narrow)
                own = common if common is not None else draw(strides(shape, role != written))
                place = Place(-1, draw(st.sampled_from([0, 0, 1, 2, 5])), shape, own)
                place = Place(room(dtype, place.offset + place.span + 9), place.offset, shape, own)
            else:
                dtype, other = draw(st.sampled_from(others))
                place = other if how == "same" else _place_near(other, dtype, shape, how, buffers, here)
            here[role] = (dtype, place)
        for role in roles:
            lists[role].append(here[role][1])

    if written is not None and draw(st.booleans()):
        _share(buffers, lists, written)
    return Case(tuple(buffers), {role: tuple(places) for role, places in lists.items()}, draw(st.booleans()))


def _share(buffers: list[Buffer], lists: dict[str, list[Place]], written: str) -> None:
    """Moves the buffers of `written` together: one for all that have a dtype, as in a flat gradient bucket."""
    base: dict[torch.dtype, int] = {}
    moved: dict[int, tuple[int, int]] = {}
    for place in lists[written]:
        if place.buffer in moved:
            continue
        buffer = buffers[place.buffer]
        into = base.setdefault(buffer.dtype, place.buffer)
        moved[place.buffer] = (into, 0 if into == place.buffer else buffers[into].size)
        if into != place.buffer:
            whole = buffers[into]
            buffers[into] = Buffer(whole.dtype, whole.size + buffer.size, whole.values, whole.seed, whole.poison)
    for places in lists.values():
        for i, p in enumerate(places):
            if p.buffer in moved:
                into, start = moved[p.buffer]
                places[i] = Place(into, p.offset + start, p.shape, p.strides)


@dataclass(frozen=True)
class Number:
    """A factor as it is handed over."""

    number: float
    kind: str

    def make(self) -> float | Tensor:
        if self.kind == "float":
            return self.number
        made = torch.full((1,) * (self.kind[-1] == "1"), self.number, dtype=F64)
        return made if "64" in self.kind else made.float()

    @property
    def value(self) -> float:
        """What the kernel computes with, before it rounds that to FP32."""
        made = self.make()
        return made.item() if isinstance(made, Tensor) else made


NUMBERS = [0.0, -0.0, 1.0, -1.0, 2.0**-16, 1 / 3, 7.3, 65536.0, 1e-40, 1e38, INF, -INF, NAN, 1e300, 5e-324]
numbers = st.builds(
    Number,
    st.one_of(st.sampled_from(NUMBERS), st.floats(width=32)),
    st.sampled_from(["float", "float", "float32", "float32 of shape 1", "float64", "float64 of shape 1"]),
)
flags = st.sampled_from([None, 0.0, 0.0, 0.0, 1.0, 0.5])


def flag(value: float | None) -> Tensor | None:
    return None if value is None else torch.tensor(value)


def check_flag(found: Tensor | None, before: float | None, raised: bool) -> None:
    """A kernel writes 1.0 into it or nothing."""
    if found is not None:
        assert found.item() == (1.0 if raised else before)


# ---------------------------------------------------------------------------------------------------------------------
# The kernels


@hunt(120, case=cases("src", "dst", written="dst"), factor=numbers, before=flags)
def test_scale(case: Case, factor: Number, before: float | None) -> None:
    src, dst = case.make()[1].values()
    results = [reference.scale(s, d.dtype, factor.value) for s, d in zip(src, dst, strict=True)]
    expected = case.after("dst", results)
    for name in everywhere():
        (buffers, lists), found = case.make(), flag(before)
        mt.multi_tensor_scale(lists["src"], tuple(lists["dst"]), factor.make(), found)
        assert same(buffers, expected), name
        check_flag(found, before, reference.is_bad(*results))


@hunt(60, case=cases("src", "dst", written="dst"))
def test_a_copy_keeps_every_bit_between_equal_dtypes(case: Case) -> None:
    src, dst = case.make()[1].values()
    results = [s.to(d.dtype) for s, d in zip(src, dst, strict=True)]
    equal = [s.dtype == d.dtype for s, d in zip(src, dst, strict=True)]
    expected = case.after("dst", results)
    for name in everywhere():
        buffers, lists = case.make()
        mt.multi_tensor_scale(lists["src"], lists["dst"], 1.0)
        assert same(buffers, expected), name
        copies = list(itertools.compress(lists["dst"], equal))
        assert same(copies, list(itertools.compress(results, equal)), nan_bits=True), name


@hunt(60, case=cases("grads", written="grads"), factor=numbers, before=flags)
def test_unscale(case: Case, factor: Number, before: float | None) -> None:
    results = [reference.scale(g, g.dtype, factor.value) for g in case.make()[1]["grads"]]
    expected = case.after("grads", results)
    for name in everywhere():
        (buffers, lists), found = case.make(), flag(before)
        mt.multi_tensor_unscale(lists["grads"], factor.make(), found)
        assert same(buffers, expected), name
        check_flag(found, before, reference.is_bad(*results))


def overflows(x: Tensor, y: Tensor, out: Tensor) -> Tensor:
    return x.isfinite() & y.isfinite() & ~out.isfinite()


@hunt(
    120,
    case=cases("x", "y", "out", written="out"),
    a=numbers,
    b=numbers,
    before=flags,
    check=st.sampled_from(["both", "x", "y"]),
)
def test_axpby(case: Case, a: Number, b: Number, before: float | None, check: str) -> None:
    x, y, out = case.make()[1].values()
    results = [reference.axpby(a.value, p, b.value, q, z.dtype) for p, q, z in zip(x, y, out, strict=True)]
    watched = {"both": [*x, *y], "x": x, "y": y}[check]
    raised = reference.is_bad(*watched) or any(overflows(*t).any() for t in zip(x, y, results, strict=True))
    expected = case.after("out", results)
    for name in everywhere():
        (buffers, lists), found = case.make(), flag(before)
        mt.multi_tensor_axpby(a.make(), lists["x"], b.make(), lists["y"], lists["out"], found, check=check)
        assert same(buffers, expected), name
        check_flag(found, before, raised)


@hunt(60, case=cases("tensors"), before=flags.filter(lambda value: value is not None))
def test_check_finite(case: Case, before: float) -> None:
    raised = reference.is_bad(*case.make()[1]["tensors"])
    for name in everywhere():
        (buffers, lists), found = case.make(), flag(before)
        mt.multi_tensor_check_finite(lists["tensors"], found)
        check_flag(found, before, raised)
        assert same(buffers, [b.make() for b in case.buffers], nan_bits=True), name


def check_norm(norm: Tensor, tensors: list[Tensor], rtol: float) -> None:
    """NaN for a NaN, infinity for an infinity or a square that overflows, else near the norm in FP64."""
    widest = [(t, 1e154 if t.dtype == F64 else 1.8e19) for t in tensors]
    if any(t.isnan().any() for t in tensors):
        assert norm.isnan()
    elif any((t.abs() > 1.1 * most).any() for t, most in widest):
        # Torch squares nothing where a tensor has one element.
        assert norm == INF or (mt.backend() == "torch" and any(t.numel() == 1 and norm >= t.abs() for t in tensors))
    elif all(((t.abs() < most / 1e3) & ((t.abs() > 1e-15) | (t == 0))).all() for t, most in widest):
        torch.testing.assert_close(norm.double(), reference.l2norm(tensors), rtol=rtol, atol=0)
    else:
        assert not norm.isnan()


@hunt(60, case=cases("tensors"))
def test_l2norm(case: Case) -> None:
    first: list[Tensor] = []
    for name in everywhere():
        buffers, lists = case.make()
        tensors = lists["tensors"]
        # 8 units in the last place of FP32, a block's rounding; torch adds up 16,000 in a row, and may lose 10 bits.
        rtol = 1e-6 if name != "torch" else 1e-3
        total, norms = mt.multi_tensor_l2norm(tensors, per_tensor=True)
        assert total.dtype == norms.dtype == (F64 if any(t.dtype == F64 for t in tensors) else torch.float32)
        assert total.shape == () and norms.shape == (len(tensors),)
        if not (total.dtype == F64 and any(t.dtype != F64 for t in tensors) and name == "torch"):  # FP64 squares of all
            check_norm(total, tensors, rtol)
            for norm, t in zip(norms, tensors, strict=True):
                check_norm(norm, [t], rtol)
        assert same([mt.multi_tensor_l2norm(tensors)], [total])
        assert same(buffers, [b.make() for b in case.buffers], nan_bits=True), name
        if name != "torch":
            first = first or [total, norms]
            assert same([total, norms], first), f"{name} gives other bits than the first instruction set"


@hunt(60, case=cases("grads", written="grads"), factor=numbers, before=flags)
def test_unscale_l2norm(case: Case, factor: Number, before: float | None) -> None:
    for name in everywhere():
        (one, lists_of_one), (two, lists_of_two) = case.make(), case.make()
        found_one, found_two = flag(before), flag(before)
        norms = mt.multi_tensor_unscale_l2norm(lists_of_one["grads"], factor.make(), found_one, per_tensor=True)
        mt.multi_tensor_unscale(lists_of_two["grads"], factor.make(), found_two)
        assert same(one, two), name
        assert same(list(norms), list(mt.multi_tensor_l2norm(lists_of_two["grads"], per_tensor=True))), name
        assert found_one is None or found_one == found_two, name


@hunt(
    60,
    case=cases("params", "masters", written="masters", dtypes={"masters": torch.float32}, double=False),
    edited=st.sampled_from([0.0, 0.01, 1.0]),
)
def test_adopt(case: Case, edited: float) -> None:
    def make() -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        """Params as published, but for the edited part."""
        buffers, lists = case.make()
        generator = torch.Generator().manual_seed(0)
        for param, master in zip(lists["params"], lists["masters"], strict=True):
            keeps = torch.rand(param.shape, generator=generator) >= edited
            if not any(stride == 0 and size > 1 for stride, size in zip(param.stride(), param.shape, strict=True)):
                param.copy_(torch.where(keeps, master.to(param.dtype), param))
        return buffers, lists

    buffers, (params, masters) = (made := make())[0], made[1].values()
    results = [reference.adopt(p, m) for p, m in zip(params, masters, strict=True)]
    expected = [b.clone() for b in buffers]
    for place, result in zip(case.lists["masters"], results, strict=True):
        place.of(expected).copy_(result)
    for name in everywhere():
        buffers, lists = make()
        mt.multi_tensor_adopt(lists["params"], lists["masters"])
        assert same(buffers, expected), name


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_factor_that_lies_in_an_output_is_read_before(dtype: torch.dtype) -> None:
    x = torch.full((40_000,), 3.0, dtype=dtype)
    for name in everywhere():
        for call, expected in [
            (lambda t: mt.multi_tensor_scale([x], [t], t[:1]), 9.0),
            (lambda t: mt.multi_tensor_unscale([t], t[:1], None), 9.0),
            (lambda t: mt.multi_tensor_unscale_l2norm([t], t[0], None), 9.0),
            (lambda t: mt.multi_tensor_axpby(t[:1], [x], t[1], [t], [t]), 18.0),
        ]:
            written = x.clone()
            call(written)
            assert (written == expected).all(), name


scales = st.one_of(
    st.sampled_from([2.0**-24, 1.0, 65536.0, 2.0**127, 1e-45, INF]), st.floats(2.0**-140, 2.0**126, width=32)
)
bounds = st.one_of(st.none(), st.sampled_from([0.0, 2.0**-24, 1.0, 2.0**24, INF]))


@hunt(
    150,
    start=st.tuples(scales, st.integers(0, 5), st.integers(-2, 3)),
    overflowing=st.lists(st.sampled_from([0.0, 0.0, 1.0, 0.5, NAN, INF]), max_size=6),
    factors=st.tuples(st.sampled_from([2.0, 1.5, 1.001, 1.0, 1e300]), st.sampled_from([0.5, 0.3, 1.0, 1e-300])),
    interval=st.sampled_from([1, 2, 3, 2000, 2**31 - 1]),
    limits=st.tuples(bounds, bounds).filter(lambda pair: None in pair or pair[0] <= pair[1]),
    hysteresis=st.one_of(st.none(), st.integers(1, 3)),
    shape=st.sampled_from([(), (1,), (1, 1)]),
)
def test_update_scale(
    start: tuple[float, int, int],
    overflowing: list[float],
    factors: tuple[float, float],
    interval: int,
    limits: tuple[float | None, float | None],
    hysteresis: int | None,
    shape: tuple[int, ...],
) -> None:
    """A story of steps, against the docstring's algorithm in Python numbers."""

    def to_fp32(x: float) -> float:
        return torch.tensor(x, dtype=F64).float().item()

    lowest, highest = (0.0 if limits[0] is None else limits[0]), (INF if limits[1] is None else limits[1])
    for name in everywhere():
        scale, growth = torch.full(shape, start[0]), torch.full((1,), start[1], dtype=torch.int32)
        patience = None if hysteresis is None else torch.tensor(start[2], dtype=torch.int32)
        s, steps, left = scale.item(), start[1], start[2]
        for found in overflowing:
            mt.update_scale(
                *(scale, growth, torch.tensor(found), factors[0], factors[1], interval, limits[0], limits[1]),
                hysteresis or 1,
                patience,
            )
            if found != 0:
                left -= 1
                if hysteresis is None or left <= 0:
                    s = to_fp32(max(s * factors[1], mt.SMALLEST_SCALE))
                steps = 0
            else:
                left, steps = hysteresis or 1, steps + 1
                if steps >= interval:
                    s = higher if (higher := to_fp32(s * factors[0])) < INF else s
                    steps = 0
            s = min(max(s, lowest), highest)
            assert (scale.item(), growth.item()) == (s, steps), name
            assert patience is None or patience.item() == left, name
            assert found != found or found in (0.0, 0.5, 1.0, INF)


# ---------------------------------------------------------------------------------------------------------------------
# Refusals: by every backend with the same words, and nothing is written


KERNELS: dict[str, tuple[tuple[str, ...], str | None, Callable[..., Any]]] = {
    "multi_tensor_scale": (("src", "dst"), "dst", lambda s, d, n, f: mt.multi_tensor_scale(s, d, n, f)),
    "multi_tensor_unscale": (("grads",), "grads", lambda g, n, f: mt.multi_tensor_unscale(g, n, f)),
    "multi_tensor_axpby": (("x", "y", "out"), "out", lambda x, y, o, n, f: mt.multi_tensor_axpby(1.0, x, n, y, o, f)),
    "multi_tensor_check_finite": (("tensors",), None, lambda t, n, f: mt.multi_tensor_check_finite(t, f)),
    "multi_tensor_l2norm": (("tensors",), None, lambda t, n, f: mt.multi_tensor_l2norm(t)),
    "multi_tensor_unscale_l2norm": (("grads",), "grads", lambda g, n, f: mt.multi_tensor_unscale_l2norm(g, n, f)),
    "multi_tensor_adopt": (("params", "masters"), "masters", lambda p, m, n, f: mt.multi_tensor_adopt(p, m)),
}
TAKES_FLAG = {"multi_tensor_scale", "multi_tensor_unscale", "multi_tensor_axpby", "multi_tensor_check_finite"}
TAKES_FACTOR = {"multi_tensor_scale", "multi_tensor_unscale", "multi_tensor_axpby", "multi_tensor_unscale_l2norm"}

# What stands in the place of one tensor, made from it.
FAULTY: dict[str, Callable[[Tensor], Any]] = {
    "None": lambda t: None,
    "a number": lambda t: 1.0,
    "int32": lambda t: torch.ones(t.shape, dtype=torch.int32),
    "bool": lambda t: torch.ones(t.shape, dtype=torch.bool),
    "complex": lambda t: torch.ones(t.shape, dtype=torch.cfloat),
    "float8": lambda t: torch.ones(t.shape).to(torch.float8_e4m3fn),
    "sparse": lambda t: torch.ones(t.shape).to_sparse(),
    "negated": lambda t: torch.ones(t.shape, dtype=torch.cfloat).conj().imag,
    "meta": lambda t: torch.ones(t.shape, device="meta"),
}
# Those that need a second list, or one that is written.
UNLIKE: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda t: torch.ones((*t.shape, 2)),
    "float64": lambda t: torch.ones(t.shape, dtype=torch.float32 if t.dtype == F64 else F64),
}
UNWRITABLE: dict[str, Callable[[Tensor], Any]] = {
    "expanded": lambda t: torch.ones(1).expand(*t.shape, 3)[..., 0].expand(3, *t.shape)[0].expand(t.shape),
    "requires grad": lambda t: torch.ones(t.shape, dtype=t.dtype, requires_grad=True),
}


def message_of(call: Callable[[], Any]) -> tuple[type, str]:
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    return (ValueError if isinstance(caught.value, ValueError) else TypeError), str(caught.value)


def check_refused(kernel: str, buffers: list[Tensor], call: Callable[[Tensor], Any]) -> None:
    before, versions, words = [b.clone() for b in buffers], [b._version for b in buffers], set()
    for _ in everywhere():
        found = torch.zeros(())
        words.add(message_of(lambda found=found: call(found)))
        assert same(buffers, before, nan_bits=True) and found.item() == 0.0
        assert [b._version for b in buffers] == versions and found._version == 0
    assert len(words) == 1, words
    (_, text), *_ = words
    assert re.match(rf"{kernel}: \S", text), text


@st.composite
def calls(draw: Any) -> tuple[str, Case]:
    kernel = draw(st.sampled_from(sorted(KERNELS)))
    roles, written, _ = KERNELS[kernel]
    adopts = kernel == "multi_tensor_adopt"
    dtypes = {"masters": torch.float32} if adopts else None
    return kernel, draw(cases(*roles, written=written, dtypes=dtypes, double=not adopts))


@hunt(150, call=calls(), data=st.data())
def test_a_faulty_tensor_anywhere_is_refused(call: tuple[str, Case], data: Any) -> None:
    kernel, case = call
    roles, written, function = KERNELS[kernel]
    buffers, lists = case.make()
    assume(len(lists[roles[0]]) > 0)
    role = data.draw(st.sampled_from(roles), label="list")
    i = data.draw(st.integers(0, len(lists[role]) - 1), label="index")
    faults = dict(FAULTY)
    faults.update(UNLIKE if len(roles) > 1 else {})
    faults.update(UNWRITABLE if role == written else {})
    fault = data.draw(st.sampled_from(sorted(faults)), label="fault")
    bad = faults[fault](lists[role][i])
    # One of two different lists, where a single tensor sets the tone for all, may be no fault; see the other tests.
    assume(fault != "expanded" or not bad.is_contiguous())
    assume(fault != "meta" or len(lists[roles[0]]) * len(roles) > 1)
    lists[role][i] = bad
    check_refused(kernel, buffers, lambda found: function(*lists.values(), 2.0, found))


@hunt(80, call=calls(), extra=st.booleans(), data=st.data())
def test_lists_of_different_lengths_are_refused(call: tuple[str, Case], extra: bool, data: Any) -> None:
    kernel, case = call
    roles, _, function = KERNELS[kernel]
    buffers, lists = case.make()
    assume(len(roles) > 1 and (extra or lists[roles[0]]))
    role = data.draw(st.sampled_from(roles), label="list")
    lists[role] = [*lists[role], torch.ones(3)] if extra else lists[role][:-1]
    check_refused(kernel, buffers, lambda found: function(*lists.values(), 2.0, found))


@hunt(
    80,
    call=calls(),
    flaw=st.sampled_from(["float64", "int32", "two elements", "meta", "a number", "negated"]),
    of=st.sampled_from(["found_inf", "factor"]),
)
def test_a_faulty_flag_or_factor_is_refused(call: tuple[str, Case], flaw: str, of: str) -> None:
    kernel, case = call
    assume(kernel in (TAKES_FLAG if of == "found_inf" else TAKES_FACTOR))
    assume(of == "found_inf" or flaw not in ("float64", "a number"))
    wrong: Any = {
        "float64": torch.zeros((), dtype=F64),
        "int32": torch.zeros((), dtype=torch.int32),
        "two elements": torch.zeros(2),
        "meta": torch.zeros((), device="meta"),
        "a number": 0.0,
        "negated": torch.zeros((), dtype=torch.cfloat).conj().imag,
    }[flaw]
    buffers, lists = case.make()
    # Without tensors the flag alone says where the call takes place.
    assume(flaw != "meta" or any(lists.values()))
    if of == "found_inf":
        check_refused(kernel, buffers, lambda found: KERNELS[kernel][2](*lists.values(), 2.0, wrong))
    else:
        check_refused(kernel, buffers, lambda found: KERNELS[kernel][2](*lists.values(), wrong, found))


WRITING = sorted(kernel for kernel, (_, written, _) in KERNELS.items() if written)
sizes = st.sampled_from([2, 3, 8, 63, 64, 65, 513, 16385])


@hunt(
    100,
    kernel=st.sampled_from(WRITING),
    dtype=narrow,
    n=sizes,
    shift=st.one_of(st.none(), st.floats(0, 1)),
    around=seeds,
)
def test_outputs_that_overlap_are_refused(
    kernel: str, dtype: torch.dtype, n: int, shift: float | None, around: int
) -> None:
    roles, _, function = KERNELS[kernel]
    dtype = torch.float32 if kernel == "multi_tensor_adopt" else dtype
    by = int((shift or 0.0) * (n - 1))  # 0: the very same elements, twice
    whole = Buffer(dtype, 2 * n if shift is None else n + by, "normal", around).make()
    others = [torch.ones(around % 7 + i, dtype=dtype) for i in range(around % 4)]
    twice = [whole[::2], whole[::2]] if shift is None else [whole[:n], whole[by:]]
    outs = [twice[around % 2], *others, twice[1 - around % 2]]
    lists = [*([torch.ones_like(t) for t in outs] for _ in roles[1:]), outs]
    check_refused(kernel, [whole, *others], lambda found: function(*lists, 2.0, found))


@hunt(100, kernel=st.sampled_from(WRITING), how=st.sampled_from(["shifted", "transposed", "as another type"]), n=sizes,
      shift=st.floats(0, 1), data=st.data())  # fmt: skip
def test_outputs_over_their_inputs_are_refused(kernel: str, how: str, n: int, shift: float, data: Any) -> None:
    roles, written, function = KERNELS[kernel]
    assume(len(roles) > 1)
    adopts = kernel == "multi_tensor_adopt"
    if how == "as another type":
        assume(not adopts)
        whole = Buffer(torch.float16, n, "normal", n).make()
        source, out = whole, whole.view(torch.bfloat16)
    elif how == "transposed":
        whole = Buffer(torch.float32, 25, "normal", n).make()
        source, out = whole.view(5, 5), whole.view(5, 5).t()
    else:
        by = 1 + int(shift * (n - 2))
        whole = Buffer(torch.float32, n + by, "normal", n).make()
        source, out = whole[:n], whole[by:]
        if data.draw(st.booleans(), label="the other way round"):
            source, out = out, source
    of = data.draw(st.sampled_from([role for role in roles if role != written]), label="input")
    lists = {role: [torch.ones(3), torch.ones(source.shape), torch.ones(())] for role in roles}
    lists[of][1], lists[written][1] = source, out
    check_refused(kernel, [whole], lambda found: function(*lists.values(), 2.0, found))
