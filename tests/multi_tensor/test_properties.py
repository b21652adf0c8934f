"""Every kernel against reference.py, on lists that hypothesis draws: sizes, strides, dtypes, values, aliasing, faults.

An example runs on each backend and each instruction set of this machine, every time from the same bits. All the memory
around the tensors is compared too, bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import reference
import torch
from hunts import hunt
from hypothesis import strategies as st
from kernel_cases import F64, INF, NAN, Case, cases, everywhere, same_bits
from torch import Tensor

from amp_patch import multi_tensor as mt

# ---------------------------------------------------------------------------------------------------------------------
# Memory, and tensors in it


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


# ---------------------------------------------------------------------------------------------------------------------
# The kernels


def overflows(x: Tensor, y: Tensor, out: Tensor) -> Tensor:
    return x.isfinite() & y.isfinite() & ~out.isfinite()


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
        assert same_bits([mt.multi_tensor_l2norm(tensors)], [total])
        assert same_bits(buffers, [b.make() for b in case.buffers], nan_bits=True), name
        if name != "torch":
            first = first or [total, norms]
            assert same_bits([total, norms], first), f"{name} gives other bits than the first instruction set"


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
        assert same_bits(buffers, expected), name


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_factor_inside_an_output_is_read_before_the_write(dtype: torch.dtype) -> None:
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
