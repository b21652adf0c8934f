"""Rules of a survey on the range of a type: numbers that become infinite or 0, masks, guards, and coarse rounding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from amp_patch.diagnose.survey.calls import Call, Finding, Rule, is_view, type_names, where
from amp_patch.diagnose.survey.kinds import KINDS, Facts, Guard, Kind, Kinds
from amp_patch.diagnose.survey.masks import is_two_valued_mask
from amp_patch.diagnose.wording import figure

_NEAR = 4.0  # an activation within this factor of the largest number of its type is reported
_SHARE = 0.1  # a rounding error above this share of the spread of the numbers is reported
_NATS = 1.0  # a rounding error above this in a softmax's largest argument is reported
_TINY = 2.0**-14  # a guard matters only if a guarded number is smaller than this
_POLES = ("div", "reciprocal", "log", "log2", "log10", "rsqrt", "sqrt", "pow")
_SOFTMAXES = ("softmax", "log_softmax", "logsumexp", "cross_entropy")


def _overflows(call: Call) -> Iterator[Finding]:
    """Find results of calls, and inputs and buffers of the model, with finite numbers that are infinite at a level.

    Activations that come within `_NEAR` of the type's largest number are found too: a later step may overflow.
    """
    if is_view(call):
        return
    edit = "divide it first, or name the module in keep_fp32=, or take BF16 (O4, O5)"
    for tensor, facts in call.outputs:
        if facts.learned:
            low, high = call.range(_written(call, tensor)) if facts.low else (0.0, 0.0)
            worst = max(high, 0.0) if facts.masked else max(low, high, key=abs)  # the lowest may be the mask's
            kinds = frozenset(k for k in facts.low if not k.holds(worst))
            if near := frozenset(k for k in facts.low - kinds if abs(worst) * _NEAR > torch.finfo(k.dtype).max):
                edge = figure(torch.finfo(min(near, key=KINDS.index).dtype).max)
                what = f"{call.op} reaches {figure(abs(worst))}, near to {type_names(near)}'s largest, {edge}"
                if call.inside and call.op not in ("input", "buffer"):
                    yield Finding(near, what, "divide it first, or take BF16 (O4, O5)")
            if abs(worst) == torch.finfo(torch.float32).max:
                kinds -= facts.finite
        else:
            before = {
                k for _, given in call.inputs if call.func for k, v in given.values.items() if bool(v.isinf().any())
            }
            new = {k: value for k, value in facts.values.items() if k not in before}
            kinds = frozenset(k for k, value in new.items() if _turns_infinite(call, tensor, value))
            worst = max(call.range(tensor), key=abs) if kinds else 0.0
        if kinds:
            name = facts.name if call.op in ("input", "buffer") else call.op
            yield Finding(kinds, f"{name} has {figure(worst)}, which is infinite in {type_names(kinds)}", edit)


def _written(call: Call, tensor: Tensor) -> Tensor:
    """Return the numbers that a call wrote into its output `tensor`: y of `x[i] = y` and `x.index_copy_(0, i, y)`.

    The rest of x may be memory whose numbers are not made yet. For other calls, return `tensor`.
    """
    value = call.args[-1] if call.op in ("setitem", "index_copy") and call.in_place and len(call.args) > 2 else None
    return value if isinstance(value, Tensor) and value.is_floating_point() else tensor


def _turns_infinite(call: Call, tensor: Tensor, value: Tensor) -> bool:
    """Return whether finite numbers of `tensor` are infinite in `value`, the tensor at a level.

    False if all these numbers are one negative number, or one positive number among zeros: a mask's, which may become
    infinite. A model's input has no such positive number: levels that cast it refuse it.
    """
    lost = tensor.detach()[value.isinf() & tensor.isfinite()]
    if not lost.numel() or bool(lost.max() < 0 and lost.min() == lost.max()):
        return False
    return call.op == "input" or not is_two_valued_mask(tensor.detach())


def _mask_fills_a_row(call: Call) -> Iterator[Finding]:
    """Find softmaxes with a row in which each element is masked: if the mask becomes -inf, the row becomes NaN."""
    edit = "torch.finfo(x.dtype).min as the mask's number, made inside of forward"
    found = _scores(call)
    if found is None:
        return
    tensor, facts, dim = found
    if not call.range(tensor)[0] < -torch.finfo(torch.float16).max:
        return
    scores = tensor.detach()
    lives = ~scores.isneginf().all(dim)

    def dies(kind: Kind) -> bool:
        value = facts.values.get(kind)
        if value is None:
            cast = kind in (facts.low | facts.infinite) - facts.finite or (not kind.casts and call.lowers)
            value = scores.to(kind.dtype) if cast else scores
        return bool((value.isneginf().all(dim) & lives).any())

    if kinds := frozenset(kind for kind in KINDS if dies(kind)):
        what = f"a row of {call.op} is masked throughout: in {type_names(kinds)} it is -inf, and its result NaN or 0"
        yield Finding(kinds, what, edit)


def _scores(call: Call) -> tuple[Tensor, Facts, int] | None:
    """Find the numbers that a softmax or an attention turns into probabilities. None for any other call.

    Returns:
        scores: the argument of the softmax, or the mask of the attention.
        facts: the facts of the scores.
        dim: the dimension over which the probabilities add up to 1.
    """
    if call.op in ("softmax", "log_softmax", "logsumexp") and call.inputs:
        dim = _dim_of(call)
        return (*call.inputs[0], dim) if isinstance(dim, int) else None
    if call.op in ("scaled_dot_product_attention", "multi_head_attention_forward"):
        masks = [(t, facts) for t, facts in call.inputs if not facts.learned and call.range(t)[0] < -1e4]
        return (*masks[0], -1) if masks else None
    return None


def _dim_of(call: Call) -> Any:
    return call.kwargs.get("dim", call.args[1] if len(call.args) > 1 else -1)


# Python numbers


def _guards_vanish(call: Call) -> Iterator[Finding]:
    """Find divisions by, and logarithms, roots and negative powers of, numbers that a level rounds to 0.

    A guard is a Python number that was added to keep such numbers away from 0: if it rounds to 0, they may be 0 too.
    This rule also records the guards.
    """
    for _, facts in call.outputs:
        guard = _guard(call, facts.low)
        if guard is not None:
            facts.guard = guard
    if call.op not in _POLES or (call.op == "pow" and not _negative_power(call)):
        return
    at = 1 if call.op == "div" and not call.swapped and len(call.inputs) > 1 else 0
    if at >= len(call.inputs) or (call.op == "div" and not call.swapped and at == 0):
        return
    tensor, facts = call.inputs[at]
    size = tensor.detach().abs() if facts.low else tensor
    kinds = where(facts.low, lambda dtype: bool(((size > 0) & (size.to(dtype) == 0)).any()))
    guard = facts.guard
    if guard is not None and (found := kinds | (guard.kinds & facts.low)):
        what = f"{figure(guard.number)} is 0 in {type_names(found)}, and {call.op} meets a 0"
        yield Finding(found, what, "a larger number, 1e-5, or x.float() before it", guard.line)
    elif kinds and call.op != "sqrt":
        what = f"{call.op} of numbers that are not 0, and are 0 in {type_names(kinds)}"
        yield Finding(kinds, what, "x.float() before it, or clamp(min=1e-5)")


def _guard(call: Call, low: Kinds) -> Guard | None:
    if call.op not in ("add", "clamp", "clamp_min", "maximum") or not low or not call.inputs:
        return None
    for scalar in call.scalars():
        kinds = frozenset(kind for kind in low if kind.vanishes(scalar))
        if kinds and float(call.inputs[0][0].detach().abs().min()) < _TINY:
            return Guard(scalar, kinds, call.line)
    return None


def _negative_power(call: Call) -> bool:
    return any(isinstance(value, (int, float)) and value < 0 for value in call.args[1:])


def _softmax_is_coarse(call: Call) -> Iterator[Finding]:
    """Find softmaxes whose largest argument may be rounded by more than `_NATS`, which changes a probability e-fold."""
    if call.op not in _SOFTMAXES or not call.inputs:
        return
    tensor, facts = call.inputs[0]
    rounded = facts.low | facts.widened  # at other levels the numbers may have been rounded when they were small
    if not (rounded and tensor.numel()):
        return
    dim = _dim_of(call)
    if call.op == "cross_entropy":
        dim = 1 if tensor.dim() > 1 else 0
    if not isinstance(dim, int):
        return
    top = tensor.detach().amax(dim)
    top = top[top > -(2.0**14)]  # `_mask_fills_a_row` reports the rows that are masked throughout
    most = max(map(abs, call.range(top))) if top.numel() else 0.0
    kinds = frozenset(kind for kind in rounded if most * kind.step > _NATS)
    if kinds:
        worst = most * max(kind.step for kind in kinds)
        what = f"the largest arguments of {call.op}, up to {figure(most)}, are off by up to {figure(worst)} in "
        yield Finding(kinds, f"{what}{type_names(kinds)}", "a larger temperature; or x.float() before the product")


def _norms_are_of_noise(call: Call) -> Iterator[Finding]:
    """Find norms of an input most of which spreads so little that rounding changes more than `_SHARE` of its spread."""
    if "norm" not in call.op or not call.inputs or not call.low():
        return
    tensor, facts = call.inputs[0]
    rest = [*range(2, tensor.dim())]
    dims = {"batch_norm": [0, *rest], "instance_norm": rest, "group_norm": [1, *rest], "layer_norm": [-1]}.get(call.op)
    if not dims or tensor.numel() < 2:
        return
    x = tensor.detach()
    variance, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
    varies = variance > 1e-11 * mean.square()  # a smaller variance is FP32's own rounding error

    def is_noise(dtype: torch.dtype) -> bool:
        step, least = torch.finfo(dtype).eps / 2, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        if not bool((varies & (variance.sqrt() < 16 * (step * mean.abs() + least))).any()):
            return False
        noise = (x - x.to(dtype)).square().mean(dims, keepdim=True)
        # Of two samples that are alike, a few channels hardly differ in any model.
        return 2 * int((varies & (noise > _SHARE**2 * variance)).sum()) > int(varies.sum())

    if kinds := where(facts.low, is_noise):
        worst = figure(float(variance[varies].min()))
        what = f"{call.op} of numbers with a variance of {worst}: they differ by less than {type_names(kinds)}'s steps"
        yield Finding(kinds, what, "take the mean off, or scale them up, before the model; or keep_fp32= for both")


RANGES: tuple[Rule, ...] = (
    _overflows,
    _mask_fills_a_row,
    _guards_vanish,
    _softmax_is_coarse,
    _norms_are_of_noise,
)
