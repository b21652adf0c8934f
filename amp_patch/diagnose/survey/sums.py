"""Rules of a survey on sums and differences: results that are smaller than the rounding of their operands."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from amp_patch.diagnose.survey.calls import Call
from amp_patch.diagnose.survey.findings import Finding, Rule, is_view, number, type_names
from amp_patch.diagnose.survey.kinds import Kinds, Noise

_SHARE = 0.5  # noise above this share of the numbers, or of their spread, is reported
_PART = 0.01  # if rounding makes more than this share of 1 - x zero, that is reported
_LOST = 0.1  # a sum that has lost more than this share of itself is reported
_FEW = 4096  # a sum of more elements is no total of a loop
_NATS = 0.5  # noise above this in the argument of an exponential is reported
_SCALING = ("neg", "mul", "div")
_KEEPING = ("add", "clamp", "clamp_min", "relu", "abs", "maximum", "float", "to", "squeeze", "unsqueeze", "clone")
_WRAPPING = ("sub", "diff", "remainder", "fmod", "frac")


def _noise_is_amplified(call: Call) -> Iterator[Finding]:
    """Find quotients, roots and logarithms of a difference that is smaller than the rounding of its operands.

    A variance as the mean of the squares minus the square of the mean is such a difference. Find also exponentials of a
    difference, as a distance by its binomial formula, if that rounding exceeds `_NATS`.
    """
    if call.op == "exp" and call.inputs and (noise := call.inputs[0][1].noise) is not None:
        kinds = frozenset(kind for kind, each in noise.sizes.items() if each > _NATS)
        if kinds:
            what = f"a difference of numbers up to {number(noise.most)} is off by more than {_NATS:g} in "
            edit = "x.float() before the operands are made; of distances torch.cdist, or (a - b).square().sum(-1)"
            yield Finding(kinds, f"{what}{type_names(kinds)}: exp of it is noise", edit, noise.line, noise.op)
    at = 1 if call.op == "div" and not call.swapped else 0
    if call.op in ("div", "sqrt", "rsqrt", "log", "reciprocal") and at < len(call.inputs):
        tensor, facts = call.inputs[at]
        noise = facts.noise
        kinds = frozenset() if noise is None else _drowned(tensor, noise)
        if noise is not None and kinds:
            worst = max(noise.sizes[kind] for kind in kinds)
            what = f"a difference of numbers up to {number(noise.most)} is off by about {number(worst)} in "
            edit = "x.float() before the operands are made; of variances torch.var"
            yield Finding(kinds, f"{what}{type_names(kinds)}: {call.op} of it is noise", edit, noise.line, noise.op)
    made = _noise(call)
    if made is None and len(call.inputs) == 1 and (noise := call.inputs[0][1].noise) is not None:
        if call.op in _KEEPING or is_view(call):
            made = noise
        elif call.op in _SCALING and call.outputs:
            by = _size(call.outputs[0][0]) / max(_size(call.inputs[0][0]), 1e-30)
            made = replace(noise, sizes={kind: by * each for kind, each in noise.sizes.items()})
    for _, facts in call.outputs if made is not None else ():
        facts.noise = made


def _noise(call: Call) -> Noise | None:
    """Describe the rounding of a difference's operands, or of 1 in 1 - x if that is large beside it; else None."""
    if call.op != "sub" or not call.outputs or not call.learned:
        return None
    if len(call.inputs) != 2:
        most = max((abs(value) for value in call.args if isinstance(value, int | float)), default=0.0)
        noise = Noise({k: most * k.step / 2 for k in call.low()}, most, call.op, call.line, parts=True)
        return noise if _drowned(call.outputs[0][0], noise) else None
    own = [(_size(tensor), facts.low) for tensor, facts in call.inputs]
    kinds = own[0][1] | own[1][1]
    sizes = {k: k.step / math.sqrt(3) * math.hypot(*(size for size, low in own if k in low)) for k in kinds}
    return Noise(sizes, max(size for size, _ in own), call.op, call.line) if sizes else None


def _drowned(tensor: Tensor, noise: Noise) -> Kinds:
    """Return the kinds of levels at which a tensor is smaller than the noise in it."""
    if noise.parts:
        size = tensor.detach().abs()
        counts = {k: int(((size > 0) & (size < each)).sum()) for k, each in noise.sizes.items()}
        return frozenset(kind for kind, count in counts.items() if count > _PART * size.numel())
    whole = _size(tensor)
    return frozenset(kind for kind, each in noise.sizes.items() if each > _SHARE * whole > 0)


def _size(tensor: Tensor) -> float:
    """Return the root mean square of a tensor. Syncs."""
    return float(tensor.detach().norm()) / max(1, tensor.numel()) ** 0.5


def _totals_stand_still(call: Call) -> Iterator[Finding]:
    """Find sums in a loop (`total = total + x`) to which low precision adds nothing, since x is below half a step."""
    if call.op != "add" or len(call.inputs) != 2 or not call.outputs:
        return
    tensor, facts = call.outputs[0]
    if not (facts.learned and facts.low and tensor.numel() <= _FEW):
        return
    sizes = [max(map(abs, call.range(each))) for each, _ in call.inputs]
    total = sizes.index(max(sizes))
    most, small = sizes[total], min(sizes)
    if not most > 0:
        return
    lost = dict(call.inputs[total][1].lost)
    for kind in facts.low:
        if small < kind.step * 2.0 ** math.floor(math.log2(most)):
            lost[kind] = lost.get(kind, 0.0) + small
    facts.lost = lost
    if kinds := frozenset(kind for kind, each in lost.items() if kind in facts.low and each > _LOST * most):
        what = f"a sum of many numbers reaches {number(most)}, and in low precision it stands still before that"
        yield Finding(kinds, what, "x.float() in the sum, or torch.stack(...).sum()")


def _differences_vanish(call: Call) -> Iterator[Finding]:
    """Find differences and remainders of unlearned numbers, as times, that rounding has replaced by noise."""
    if call.op not in _WRAPPING or not call.outputs or call.outputs[0][1].learned:
        return
    tensor, facts = call.outputs[0]
    spread = float(tensor.detach().std()) if tensor.numel() > 1 and facts.values else 0.0
    kinds = frozenset(kind for kind, value in facts.values.items() if _error(tensor, value) > _SHARE * spread > 0)
    if kinds:
        most = max(max(map(abs, call.range(each))) for each, _ in call.inputs)
        what = f"{call.op} of numbers up to {number(most)}: in {type_names(kinds)} their rounding exceeds the result"
        yield Finding(kinds, what, "make it before the model, or pass the numbers as int64, which no level casts")


def _error(tensor: Tensor, value: Tensor) -> float:
    return _size(value.to(tensor.dtype) - tensor.detach()) if value.shape == tensor.shape else 0.0


SUMS: tuple[Rule, ...] = (_noise_is_amplified, _totals_stand_still, _differences_vanish)
