"""The rules: what to look at in a call, what would happen to it in low precision, and the edit.

A rule is a function of a call that yields findings. `RULES` has all of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from amp_patch.lab.survey.calls import Call
from amp_patch.lab.survey.kinds import CASTING, KINDS, Facts, Guard, Kind, Kinds, Place
from amp_patch.policy import LOW_PRECISION

_PHASE = 0.1  # radians by which a sinusoid's arguments are off: the root of the mean square
_LARGEST_PHASE = 0.5  # the same of one argument
_NEAR = 4.0  # an activation so near to the largest number of its type is told of
_SHARE = 0.1  # of the spread of numbers that rounding may change
_NATS = 1.0  # of a softmax's largest argument
_TINY = 2.0**-14  # guarded numbers below come near to 0
_POLES = ("div", "reciprocal", "log", "log2", "log10", "rsqrt", "sqrt", "pow")
_SINUSOIDS = ("sin", "cos", "tan", "sin_", "cos_", "sincos", "sinc", "polar")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "isin", "searchsorted", "bucketize")
_DIFFERENCES = ("sub", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
_SOFTMAXES = ("softmax", "log_softmax", "logsumexp", "cross_entropy")
_NORMS = {"batch_norm": "channels", "instance_norm": "rows", "group_norm": "all", "layer_norm": "last", "rms_norm": ""}


class Finding(NamedTuple):
    """One thing that would happen.

    Attributes:
        kinds: at these levels.
        what: would happen.
        edit: a way out.
        line: of user code, where that is not the call's own.
        op: what is at fault, where that is not the call's function.
    """

    kinds: Kinds
    what: str
    edit: str
    line: Place | None = None
    op: str = ""


Rule = Callable[[Call], Iterator[Finding]]


def _types(kinds: Iterable[Kind]) -> str:
    return " and ".join(dict.fromkeys(kind.type_name for kind in sorted(kinds, key=KINDS.index)))


def _where(kinds: Kinds, happens: Callable[[torch.dtype], bool]) -> Kinds:
    """Those of `kinds` in whose type something happens."""
    types = [dtype for dtype in LOW_PRECISION if any(kind.dtype is dtype for kind in kinds) and happens(dtype)]
    return frozenset(kind for kind in kinds if kind.dtype in types)


def _number(value: float) -> str:
    return f"{value:.4g}"


def _named(call: Call, at: int = 0) -> str:
    name = call.inputs[at][1].name if at < len(call.inputs) else ""
    return name or f"an operand of {call.op}"


# ----------------------------------------------------------------------------------------------------------------------
# Ranges


def _overflows(call: Call) -> Iterator[Finding]:
    """Finite numbers become infinite."""
    if _is_view(call) or call.op == "output":
        return
    edit = "divide it first, or name the module in keep_fp32=, or take BF16 (O4, O5)"
    for tensor, facts in call.outputs:
        if facts.learned:
            low, high = call.range(tensor) if facts.low else (0.0, 0.0)
            kinds = frozenset(k for k in facts.low if not (k.holds(high) and (k.holds(low) or facts.masked)))
            worst = high if high >= -low or facts.masked else low
        else:
            kinds, worst = frozenset(k for k in facts.values if _turns_infinite(tensor, facts.values[k])), 0.0
            worst = max(call.range(tensor), key=abs) if kinds else 0.0
        if kinds:
            name = facts.name if call.op in ("input", "buffer") else call.op
            yield Finding(kinds, f"{name} has {_number(worst)}, which is infinite in {_types(kinds)}", edit)


def _turns_infinite(tensor: Tensor, value: Tensor) -> bool:
    """Whether finite numbers are infinite in `value`, and are no mask: one same number far below 0."""
    lost = tensor.detach()[value.isinf() & tensor.isfinite()]
    return bool(lost.numel()) and not bool(lost.max() < 0 and lost.min() == lost.max())


def _comes_near(call: Call) -> Iterator[Finding]:
    """An activation is within a factor of 4 of the largest number."""
    if _is_view(call) or not call.inside or call.op in ("input", "buffer", "output"):
        return
    for tensor, facts in call.outputs:
        if facts.learned and facts.low:
            low, high = call.range(tensor)
            most = high if facts.masked else max(high, -low)
            kinds = frozenset(
                k for k in facts.low if k.holds(most) and most * _NEAR > torch.finfo(k.dtype).max
            )
            if kinds:
                edge = _number(torch.finfo(min(kinds, key=KINDS.index).dtype).max)
                what = f"{call.op} reaches {_number(most)}, near to {_types(kinds)}'s largest, {edge}"
                yield Finding(kinds, what, "divide it first, or take BF16 (O4, O5)")


def _all_vanish(call: Call) -> Iterator[Finding]:
    """All numbers become 0."""
    if _is_view(call) or not call.inside or call.op in ("input", "buffer", "output"):
        return
    for tensor, facts in call.outputs:
        if facts.learned and facts.low:
            low, high = call.range(tensor)
            most = max(high, -low)
            kinds = frozenset(k for k in facts.low if k.vanishes(most))
            if kinds:
                what = f"the numbers of {call.op} are at most {_number(most)}: all are 0 in {_types(kinds)}"
                yield Finding(kinds, what, "scale it later, in FP32 (x.float()), or take BF16 (O4, O5)")


def _mask_fills_a_row(call: Call) -> Iterator[Finding]:
    """A row of a softmax that is masked throughout is -inf throughout, and its result NaN."""
    edit = "torch.finfo(x.dtype).min as the mask's number, made inside of forward"
    found = _scores(call)
    if found is None:
        return
    tensor, facts, dim = found
    if not call.range(tensor)[0] < -torch.finfo(torch.float16).max:
        return
    scores = tensor.detach()

    def dies(dtype: torch.dtype) -> bool:
        return bool((scores.to(dtype).isneginf().all(dim) & ~scores.isneginf().all(dim)).any())

    kinds = _where((facts.low | facts.infinite) - facts.finite, dies)
    if kinds:
        what = f"a row of {call.op} is masked throughout: in {_types(kinds)} it is -inf, and its result is NaN"
        yield Finding(kinds, what, edit)


def _scores(call: Call) -> tuple[Tensor, Facts, int] | None:
    """What a call takes a softmax of, or the mask of its attention; and along which dimension."""
    if call.op in ("softmax", "log_softmax") and call.inputs:
        dim = call.kwargs.get("dim", call.args[1] if len(call.args) > 1 else -1)
        return (*call.inputs[0], dim) if isinstance(dim, int) else None
    if call.op in ("scaled_dot_product_attention", "multi_head_attention_forward"):
        masks = [(t, facts) for t, facts in call.inputs if not facts.learned and call.range(t)[0] < -1e4]
        return (*masks[0], -1) if masks else None
    return None


# ----------------------------------------------------------------------------------------------------------------------
# Python numbers


def _guards_vanish(call: Call) -> Iterator[Finding]:
    """A Python number that keeps numbers from 0 is 0 itself. It is told of where they are divided by."""
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
    kinds = _where(facts.low, lambda dtype: bool(((size > 0) & (size.to(dtype) == 0)).any()))
    guard = facts.guard
    if guard is not None and (found := kinds | (guard.kinds & facts.low)):
        what = f"{_number(guard.number)} is 0 in {_types(found)}, and {call.op} meets a 0"
        yield Finding(found, what, "a larger number, 1e-5, or x.float() before it", guard.line)
    elif kinds and call.op != "sqrt":
        what = f"{call.op} of numbers that are not 0, and are 0 in {_types(kinds)}"
        yield Finding(kinds, what, "x.float() before it, or clamp(min=1e-5)")


def _guard(call: Call, low: Kinds) -> Guard | None:
    if call.op not in ("add", "clamp", "clamp_min", "maximum") or not low or not call.inputs:
        return None
    for number in call.scalars():
        kinds = frozenset(kind for kind in low if kind.vanishes(number))
        if kinds and float(call.inputs[0][0].detach().abs().min()) < _TINY:
            return Guard(number, kinds, call.line)
    return None


def _negative_power(call: Call) -> bool:
    return any(isinstance(value, (int, float)) and value < 0 for value in call.args[1:])


# ----------------------------------------------------------------------------------------------------------------------
# Whole numbers and angles


def _angles_move(call: Call) -> Iterator[Finding]:
    """The argument of a sinusoid is rounded by more than 0.1 radians."""
    if call.op not in _SINUSOIDS or not call.inputs:
        return
    tensor, facts = call.inputs[-1]
    moved = _moved(tensor, facts)
    changes = {kind: float(each.abs().max()) for kind, each in moved.items() if each.numel()}
    kinds = frozenset(
        kind for kind, most in changes.items() if most > _LARGEST_PHASE or float(moved[kind].square().mean()) > _PHASE**2
    )
    if kinds:
        worst = max(changes[kind] for kind in kinds)
        what = f"{call.op} of numbers up to {_number(max(map(abs, call.range(tensor))))}: angles are off by up to "
        edit = "make the angles in FP32: int64 times or positions, and frequencies made in forward, or a table module"
        yield Finding(kinds, f"{what}{worst:.2g} radians in {_types(kinds)}", edit)


def _moved(tensor: Tensor, facts: Facts) -> dict[Kind, Tensor]:
    """How far rounding moves the numbers of a tensor, at each kind of level."""
    found = {}
    for kind in facts.rounded:
        value = facts.values.get(kind)
        if value is None and kind in facts.low:
            value = tensor.detach().to(kind.dtype)
        if value is not None and value.shape == tensor.shape:
            found[kind] = (value.to(tensor.dtype) - tensor.detach()).nan_to_num(0, 0, 0)
    return found


def _changed_whole_numbers(tensor: Tensor, facts: Facts) -> Kinds:
    """Where a tensor of whole numbers has others."""
    moved = _moved(tensor, facts)
    if not moved or not bool((tensor.detach() == tensor.detach().round()).all()):
        return frozenset()
    return frozenset(kind for kind, each in moved.items() if bool((each.abs() >= 1).any()))


def _indices_change(call: Call) -> Iterator[Finding]:
    """Whole numbers become integers of another value."""
    result = call.result
    if not (isinstance(result, Tensor) and result.dtype in _INTEGERS and call.op in ("long", "int", "to", "type")):
        return
    if len(call.inputs) != 1:
        return
    tensor, facts = call.inputs[0]
    kinds = _changed_whole_numbers(tensor, facts)
    if kinds:
        what = f"{_named(call)} has whole numbers up to {_number(max(map(abs, call.range(tensor))))}: as indices "
        yield Finding(kinds, f"{what}they are others in {_types(kinds)}", "pass them as int64, which no level casts")


def _comparisons_change(call: Call) -> Iterator[Finding]:
    """Whole numbers compare in another way."""
    if call.op not in _COMPARISONS or not isinstance(call.result, Tensor):
        return
    for tensor, facts in call.inputs:
        kinds = frozenset() if facts.learned else _changed_whole_numbers(tensor, facts)
        if kinds:
            what = f"whole numbers up to {_number(max(map(abs, call.range(tensor))))} are compared, and are others in "
            yield Finding(kinds, f"{what}{_types(kinds)}", "pass them as int64, which no level casts")
            return


def _targets_are_coarse(call: Call) -> Iterator[Finding]:
    """The target of a difference, or of a loss, has numbers whose distances low precision does not hold."""
    if call.op not in _DIFFERENCES or len(call.inputs) < 2:
        return
    (one, first), (two, second) = call.inputs[:2]
    if first.learned == second.learned or one.shape != two.shape:
        return
    (target, known), guess = ((two, second), first) if first.learned else ((one, first), second)
    kinds = _changed_whole_numbers(target, known)
    lost = _SHARE * float(target.detach().std()) * target.numel() ** 0.5 if target.numel() > 1 else math.inf
    exact = target.detach()
    kinds |= _where(guess.rounded, lambda dtype: float((exact - exact.to(dtype)).norm()) > lost > 0)
    if kinds:
        most = max(map(abs, call.range(target)))
        steps = max(torch.finfo(kind.dtype).eps for kind in kinds) * 2 ** math.floor(math.log2(max(most, 1e-30)))
        what = f"the targets of {call.op} are numbers up to {_number(most)}, where {_types(kinds)} has steps of "
        edit = "take the mean off the targets and divide by their spread; or the loss outside of the model"
        yield Finding(kinds, f"{what}{_number(steps)}", edit)


# ----------------------------------------------------------------------------------------------------------------------
# Functions that lose in low precision


def _softmax_is_coarse(call: Call) -> Iterator[Finding]:
    """The largest argument of a softmax is rounded by more than 1."""
    if call.op not in _SOFTMAXES or not call.inputs:
        return
    tensor, facts = call.inputs[0]
    if not (facts.rounded and tensor.numel()):
        return
    dim = call.kwargs.get("dim", call.args[1] if len(call.args) > 1 else -1)
    if call.op == "cross_entropy":
        dim = 1 if tensor.dim() > 1 else 0
    if not isinstance(dim, int):
        return
    top = tensor.detach().amax(dim)
    top = top[top > -(2.0**14)]  # a row that is masked throughout is another rule's
    most = max(map(abs, call.range(top))) if top.numel() else 0.0
    kinds = frozenset(kind for kind in facts.rounded if most * kind.step > _NATS)
    if kinds:
        worst = most * max(kind.step for kind in kinds)
        what = f"the largest arguments of {call.op} are up to {_number(most)}: in {_types(kinds)} they are off by up to "
        yield Finding(kinds, f"{what}{_number(worst)}", "a larger temperature; or x.float() before the product")


def _norms_are_of_noise(call: Call) -> Iterator[Finding]:
    """What a norm divides by is small beside its input, and most of what is left is rounding."""
    if call.op not in _NORMS or not call.inputs or not call.low():
        return
    tensor, facts = call.inputs[0]
    dims = {
        "channels": [0, *range(2, tensor.dim())],
        "rows": list(range(2, tensor.dim())),
        "all": list(range(1, tensor.dim())),
        "last": [-1],
        "": [],
    }[_NORMS[call.op]]
    if not dims or tensor.numel() < 2:
        return
    x = tensor.detach()
    variance, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
    varies = variance > 1e-11 * mean.square()  # less is FP32's own rounding

    def is_noise(dtype: torch.dtype) -> bool:
        step, least = torch.finfo(dtype).eps / 2, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        if not bool((varies & (variance.sqrt() < 16 * (step * mean.abs() + least))).any()):
            return False
        noise = (x - x.to(dtype)).square().mean(dims, keepdim=True)
        return bool((varies & (noise > _SHARE**2 * variance)).any())

    if kinds := _where(facts.low, is_noise):
        worst = _number(float(variance[varies].min()))
        what = f"{call.op} of numbers with a variance of {worst}: they differ by less than {_types(kinds)}'s steps"
        yield Finding(kinds, what, "take the mean off, or scale them up, before the model; or keep_fp32= for both")


def _probabilities_saturate(call: Call) -> Iterator[Finding]:
    """Probabilities of a binary cross entropy are rounded to 0 or 1, or are refused."""
    if call.op != "binary_cross_entropy" or not call.inputs:
        return
    tensor, facts = call.inputs[0]
    edit = "binary_cross_entropy_with_logits, without the sigmoid"
    refused = facts.low - CASTING
    if refused:
        yield Finding(refused, f"binary_cross_entropy of {_types(refused)} is refused", f"{edit}; or allow_banned=True")
    p = tensor.detach()

    def saturates(dtype: torch.dtype) -> bool:
        near = (p < 1) & (1 - p < torch.finfo(dtype).eps / 2)
        return bool((near | ((p > 0) & (p.to(dtype) == 0))).any())

    if kinds := _where(facts.rounded & CASTING, saturates):
        what = f"probabilities of binary_cross_entropy are 0 or 1 in {_types(kinds)}: a wrong one is never learned"
        yield Finding(kinds, what, edit)


def _fails(call: Call) -> Iterator[Finding]:
    """torch raises an error."""
    told: dict[tuple[str, str], set[Kind]] = {}
    for kind, error in call.errors.items():
        text = re.sub(r"\b(c10::)?(Half|BFloat16)\b", "low precision", str(error).partition("\n")[0])
        if "without overflow" in text:
            words = "a number does not fit {}", "torch.finfo(x.dtype).min, or max"
        elif call.rule == "fp32" or "not implemented" in text:
            words = f"torch has no {call.op} for {{}}", "x.float(), or keep_fp32= for its module"
        else:
            words = f"an error in {{}}: {text[:100]}", "x.to(other.dtype), a buffer, or O1 or O4, which cast"
        told.setdefault(words, set()).add(kind)
    for (what, edit), kinds in told.items():
        yield Finding(frozenset(kinds), what.replace("{}", _types(kinds)), edit)


# ----------------------------------------------------------------------------------------------------------------------
# What a library or a script asks for


def _asked_for_fp32(call: Call) -> Iterator[Finding]:
    """A torch.autocast, or a custom_fwd, asks for FP32 and gets low precision."""
    kinds = frozenset[Kind]().union(*(facts.low for _, facts in call.inputs)) if call.inputs else frozenset()
    edit = "x.float() there, or keep_fp32= for its module"
    if call.op == "custom_fwd" and (kinds := kinds & CASTING):
        yield Finding(kinds, f"custom_fwd asks for FP32 and gets {_types(kinds)}", edit)
    elif call.asked is not None and kinds and not _is_view(call):
        what = f"torch.autocast asks for FP32, and what is in it gets {_types(kinds)}"
        yield Finding(kinds, what, edit, call.asked, "autocast")


def _averages_stand_still(call: Call) -> Iterator[Finding]:
    """A write into what no optimizer holds is lost by rounding."""
    if call.written is None or not call.outputs:
        return
    name, before = call.written
    after = call.args[0].detach()
    step = max(1, before.numel() // 4096)
    old, change = before.flatten()[::step], (after - before).flatten()[::step]
    changed = (change != 0) & change.isfinite()

    def loses(dtype: torch.dtype) -> bool:
        low = old.to(dtype)
        return 2 * int((changed & ((low.float() + change).to(dtype) == low)).sum()) > int(changed.sum())

    if kinds := _where(CASTING, loses):
        what = f"{call.op} changes {name!r}, which no optimizer holds, by less than a step of {_types(kinds)}: it stands "
        edit = "a module of its own that has buffers and no parameters, or keep_fp32= for its module"
        yield Finding(kinds, f"{what}still", edit)


def _arrays_fail(call: Call) -> Iterator[Finding]:
    """NumPy has no BF16."""
    if call.op in ("numpy", "array") and call.inputs:
        kinds = frozenset(kind for kind in call.low() if kind.dtype is torch.bfloat16)
        if kinds:
            yield Finding(kinds, "numpy() of BF16 is an error", "x.float().numpy(), or cast_model_outputs=torch.float32")


def _loss_is_coarse(call: Call) -> Iterator[Finding]:
    """A loss that the model itself computes has the steps of BF16."""
    for tensor, facts in call.outputs if call.op == "output" else ():
        kinds = frozenset(kind for kind in facts.low & CASTING if kind.dtype is torch.bfloat16)
        if kinds and tensor.numel() == 1 and tensor.requires_grad:
            steps = torch.finfo(torch.bfloat16).eps * 2.0 ** math.floor(math.log2(max(*map(abs, call.range(tensor)), 1e-30)))
            what = f"the loss is computed inside of the model: BF16 has steps of {_number(steps)} there"
            yield Finding(kinds, what, "logits.float() before the loss, or the loss outside of the model", facts.line, "loss")


def _is_view(call: Call) -> bool:
    """Whether a call makes no numbers: a view, a copy, an index."""
    made, given = call.outputs, call.inputs
    if not made or not given or call.func is None:
        return False
    one, other = made[0][0], given[0][0]
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() and one is not other


RULES: tuple[Rule, ...] = (
    _fails,
    _overflows,
    _comes_near,
    _all_vanish,
    _mask_fills_a_row,
    _guards_vanish,
    _angles_move,
    _indices_change,
    _comparisons_change,
    _targets_are_coarse,
    _softmax_is_coarse,
    _norms_are_of_noise,
    _probabilities_saturate,
    _asked_for_fp32,
    _averages_stand_still,
    _arrays_fail,
    _loss_is_coarse,
)
