"""Random calls of the kernels, drawn by hypothesis: memory, tensors in it, numbers and flags."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from conftest import DTYPES
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
    """The position of a tensor in a buffer."""

    buffer: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def of(self, buffers: list[Tensor]) -> Tensor:
        return buffers[self.buffer].as_strided(self.shape, self.strides, self.offset)

    @property
    def span(self) -> int:
        """Return the number of elements from the first to the last, both included."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))


@dataclass(frozen=True)
class Case:
    """The lists of one call, as positions in new buffers."""

    buffers: tuple[Buffer, ...]
    lists: dict[str, tuple[Place, ...]]
    same_object: bool  # tensors at one place are one Python object, else separate views

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
        """Return the expected buffers after a call that stores `values` in the list `written`."""
        buffers = [b.make() for b in self.buffers]
        for place, value in zip(self.lists[written], values, strict=True):
            place.of(buffers).copy_(value)
        return buffers


def same_bits(actual: list[Tensor], expected: list[Tensor], nan_bits: bool = False) -> bool:
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
    """Draw strides: any order of the dimensions, with gaps, and with strides of 0 if `expands`."""
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
        """Return the index of a new buffer for `span` elements."""
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
