"""The self-check of a registered optimizer class for `fully_shard`, where each process steps a part of each parameter.

An elementwise step gives a part of a parameter the same numbers whether the part is stepped alone or within the whole.
One toy steps whole parameters, another steps all their parts, and the numbers are compared.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.support.generated_class import base_class
from amp_patch.support.random_states import restored_random_states
from amp_patch.training.step import Plain
from amp_patch.ways.partial_step import same
from amp_patch.ways.per_parameter import registration_of
from amp_patch.ways.trial import Shape, settings_of, toy_of, wave

# Torch's vectorized loops take at most 16 elements at once. A scalar loop takes the remainder, and may give `pow`,
# `sigmoid` or `atan2` another last bit. Therefore toys are compared bit for bit only if the size of each part is a
# multiple of VECTOR.
VECTOR = 16
CLOSE = 1e-10  # else the tolerance, times the sum of magnitudes: far above FP64 rounding, far below a norm's effect
EVEN: Shape = (VECTOR, 3 * VECTOR, 3)
ODD: Shape = (5, 7, 3)

# For each number of dimensions one toy has the size of the user's largest parameter, up to this limit. The limit is
# above the usual thresholds by size (128 rows and columns, 4,096 elements), and below the 32,768 elements that make
# torch use several threads.
LARGE: Shape = (13 * VECTOR, 9 * VECTOR)
LARGE_VECTOR = 288 * VECTOR

# The decimal exponent of the gradients in each step, so that norms get above and below an optimizer's clamps.
EXPONENTS = (-1, -8, 2, 0, -4, 6, 1, -6, 4, -2, 8, -3)
CUT_STEPS = 2 * len(EXPONENTS)

_OTHERWISE = (
    "it steps a part of a parameter differently from the same part within the whole, for example by a norm or a mean"
)


@torch.no_grad()
def reason_against_parts(optimizer: Any) -> str | None:
    """Return why an optimizer of a registered class cannot step a part of a parameter alone; None if it can.

    Toy parameters are cut along each dimension into unequal parts, one of them a single row. After each step, weights
    and states of the parts must equal the parts of the whole's. Then the same is done with an additional empty part.
    """
    found = registration_of(base_class(optimizer))
    if found is None:
        return "its class is not registered"
    with warnings.catch_warnings(), restored_random_states():
        warnings.simplefilter("ignore")
        for empty, steps in ((False, CUT_STEPS), (True, 2)):
            try:
                toys = _Toys(optimizer, found.plain, empty)
                for step in range(steps):
                    if (reason := toys.reason_at(step)) is not None:
                        return reason
            except Exception as error:  # the class's own code
                where = "without elements" if empty else "of a parameter"
                return f"its step of a part {where} fails ({type(error).__name__}: {error})"
            if not empty and (reason := toys.reason_with_an_infinity()) is not None:
                return reason
    return None


@dataclass(frozen=True)
class _Cut:
    """One parameter, and its parts along one dimension."""

    whole: Tensor
    dim: int
    parts: list[Tensor]

    @property
    def gradient(self) -> Tensor:
        grad: Any = self.whole.grad
        return grad

    def pieces(self, value: Tensor) -> list[Tensor]:
        """Return copies of the pieces of `value`, a tensor of the parameter's shape, along the cut."""
        sizes = [part.shape[self.dim] for part in self.parts]
        return [piece.clone(memory_format=torch.contiguous_format) for piece in value.split(sizes, self.dim)]

    def divides(self, value: Tensor, parts: Sequence[Any]) -> bool:
        """Return whether `parts` equal the pieces of `value`: bit for bit if all sizes are multiples of VECTOR."""
        pieces = self.pieces(value)
        for part, piece in zip(parts, pieces, strict=True):
            if not isinstance(part, Tensor) or part.shape != piece.shape or part.dtype is not piece.dtype:
                return False
        room = 0.0
        if value.is_floating_point() and any(piece.numel() % VECTOR for piece in pieces):
            room = CLOSE * float(value[value.isfinite()].abs().sum())
        return torch.allclose(torch.cat([*parts], self.dim), value, rtol=0.0, atol=room, equal_nan=True)


class _Toys:
    """Two toy optimizers: one of whole parameters, and one of all parts of all cuts of these parameters."""

    def __init__(self, optimizer: Any, plain: Plain, empty: bool) -> None:
        self._plain = plain
        self._whole, self._parts = (toy_of(optimizer, shapes_of=_shapes_to_cut) for _ in range(2))
        self._cuts = []
        seen = set()
        for group, of_parts in zip(self._whole.param_groups, self._parts.param_groups, strict=True):
            if (kind := _kind_of(group)) in seen:  # for example one group per layer, which differ in the learning rate
                for alike in (group, of_parts):
                    alike["params"] = [nn.Parameter(wave((1,), 1.0, 0.0))]  # gets no gradient, so no step
                continue
            seen.add(kind)
            cuts = [_cut(param, dim, empty) for param in group["params"] for dim in range(param.dim())]
            of_parts["params"] = [part for cut in cuts for part in cut.parts]
            self._cuts += cuts

    def reason_at(self, step: int) -> str | None:
        """Make a step; return why the parts then differ from the whole, or None."""
        for place, param in enumerate(dict.fromkeys(cut.whole for cut in self._cuts)):
            param.grad = _varied_gradient(param, place, step)
        return self._reason()

    def reason_with_an_infinity(self) -> str | None:
        """Return a reason if one infinity ends the step of the whole: other processes would still step their parts."""
        try:
            for value in (float("inf"), 1.0):
                for cut in self._cuts:
                    cut.gradient.view(-1)[-1:] = value
                if (reason := self._reason()) is not None:
                    return reason
        except Exception:  # a class may raise for infinities, in a part as in the whole
            return None
        return None

    def _reason(self) -> str | None:
        for cut in self._cuts:
            for part, grad in zip(cut.parts, cut.pieces(cut.gradient), strict=True):
                part.grad = grad
        self._plain(self._whole)
        self._plain(self._parts)
        if not all(cut.divides(cut.whole, cut.parts) for cut in self._cuts):
            return _OTHERWISE
        if not same(settings_of(self._whole), settings_of(self._parts)):
            return _OTHERWISE
        reasons = (self._reason_of_state(cut) for cut in self._cuts)
        return next((reason for reason in reasons if reason is not None), None)

    def _reason_of_state(self, cut: _Cut) -> str | None:
        whole = self._whole.state.get(cut.whole, {})
        states = [self._parts.state.get(part, {}) for part in cut.parts]
        if any(state.keys() != whole.keys() for state in states):
            return _OTHERWISE
        for name, value in whole.items():
            if not _is_of_elements(value, cut.whole.shape):
                return f"its state {name!r} is neither a number nor a tensor of its parameter's shape"
            values = [state[name] for state in states]
            is_number = not isinstance(value, Tensor) or value.dim() == 0
            if not (all(same(value, other) for other in values) if is_number else cut.divides(value, values)):
                return _OTHERWISE
        return None


def _kind_of(group: dict[str, Any]) -> tuple[Any, ...]:
    """Return the shapes and settings of a group; for a float setting only whether it is zero."""
    settings = {name: value for name, value in group.items() if isinstance(value, int | float | str | None)}
    kinds = [(name, bool(value) if isinstance(value, float) else value) for name, value in sorted(settings.items())]
    return (*(tuple(param.shape) for param in group["params"]), *kinds)


def _is_of_elements(value: Any, shape: torch.Size) -> bool:
    """Return whether a state is a number, or a tensor of the parameter's shape. A container may hold only numbers."""
    if isinstance(value, dict):
        return all(_is_of_elements(item, torch.Size()) for item in value.values())
    if isinstance(value, list | tuple):
        return all(_is_of_elements(item, torch.Size()) for item in value)
    return not isinstance(value, Tensor) or value.dim() == 0 or value.shape == shape


def _cut(param: Tensor, dim: int, empty: bool) -> _Cut:
    """Cut into a first row (`VECTOR` elements of a vector), some rows, the rest, and an empty part if `empty`."""
    size = param.shape[dim]
    unit = VECTOR if param.dim() == 1 and size % VECTOR == 0 else 1
    first = min(unit, size)
    some = (size - first) // (3 * unit) * unit
    sizes = [part for part in (first, some, size - first - some) if part] + [0] * empty
    return _Cut(param, dim, [nn.Parameter(piece.clone()) for piece in param.detach().split(sizes, dim)])


def _shapes_to_cut(params: Sequence[Tensor]) -> list[Shape]:
    """Return three shapes for each number of dimensions among `params`: even, odd and large."""
    kinds: dict[int, Tensor] = {}  # number of dimensions -> largest parameter
    for param in params:
        if param.dim() and param.numel() > (kinds[param.dim()].numel() if param.dim() in kinds else -1):
            kinds[param.dim()] = param
    shapes: list[Shape] = []
    for count, param in kinds.items():
        more = (2,) * (count - 3)
        even = (2 * EVEN[1],) if count == 1 else (*EVEN[:count], *more)
        shapes += [even, (*ODD[:count], *more), _large(tuple(param.shape))]
    return shapes


def _large(shape: Shape) -> Shape:
    """Return `shape` with its two largest sizes capped at `LARGE`, as multiples of `VECTOR`, and all others 1."""
    if len(shape) == 1:
        return (_multiple(min(shape[0], LARGE_VECTOR)),)
    first, second = sorted(sorted(range(len(shape)), key=lambda dim: -shape[dim])[:2])
    chosen = [1] * len(shape)
    chosen[first], chosen[second] = (
        _multiple(min(shape[dim], cap)) for dim, cap in zip((first, second), LARGE, strict=True)
    )
    return tuple(chosen)


def _multiple(size: int) -> int:
    return size // VECTOR * VECTOR or size


def _varied_gradient(param: Tensor, place: int, step: int) -> Tensor:
    """Return a gradient. By turns it is plain, decreases along all dimensions, or is 0 in the first row or column."""
    grad = wave(tuple(param.shape), 1.7, place + 3.0 * step, param.dtype)
    grad *= 10.0 ** EXPONENTS[(step + step // len(EXPONENTS) + 5 * place) % len(EXPONENTS)]
    if step % 3 == 1:
        for dim, size in enumerate(param.shape):
            slope = 10.0 ** torch.linspace(2, -2, size, dtype=param.dtype, device="cpu")
            grad *= slope.view([-1 if dim == other else 1 for other in range(param.dim())])
    elif step % 3 == 2:
        grad.narrow(step // 3 % param.dim(), 0, 1).zero_()
    return grad
