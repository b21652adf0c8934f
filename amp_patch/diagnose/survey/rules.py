"""The rules of a survey. A rule examines one `Call` for one sort of problem, and yields a `Finding` for each problem.

ranges.py has the rules on the range of a type. A kind of line that the measurement finds needs no rule.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import torch
from torch import Tensor

from amp_patch.diagnose.survey.calls import Call, Finding, Rule, is_view, name_of, type_names, where
from amp_patch.diagnose.survey.kinds import CASTING, Facts, Kind, Kinds
from amp_patch.diagnose.survey.masks import is_two_valued_mask
from amp_patch.diagnose.survey.ranges import RANGES
from amp_patch.diagnose.wording import figure

_PIXEL = 0.25  # a larger error of a coordinate, in pixels, is reported
_SHARE = 0.1  # a rounding error above this share of the spread of the numbers is reported
_OF_WHOLE = ("eq", "ne", "lt", "le", "gt", "ge", "isin", "searchsorted", "bucketize", "long", "int", "to", "type")
_DIFFERENCES = (
    *("sub", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    *("gaussian_nll_loss", "pairwise_distance"),
)


def _changed_whole_numbers(tensor: Tensor, facts: Facts) -> Kinds:
    """Return the kinds of levels at which rounding changes an unlearned tensor of whole numbers by 1 or more."""
    exact = tensor.detach()
    if not facts.values or not bool((exact == exact.round()).all()):
        return frozenset()

    def changes(value: Tensor) -> bool:
        return value.shape == exact.shape and bool(((value - exact).nan_to_num(0, 0, 0).abs() >= 1).any())

    return frozenset(kind for kind, value in facts.values.items() if changes(value))


def _whole_numbers_change(call: Call) -> Iterator[Finding]:
    """Find comparisons (`x == y`) and conversions (`x.long()`) of whole numbers with another result at a level."""
    if call.op not in _OF_WHOLE or not isinstance(call.result, Tensor) or call.result.is_floating_point():
        return
    for at, (tensor, facts) in enumerate(call.inputs):
        changed = frozenset() if facts.learned else _changed_whole_numbers(tensor, facts)
        if kinds := frozenset(kind for kind in changed if _results_otherwise(call, kind)):
            what = f"{name_of(call, at)} has whole numbers up to {figure(max(map(abs, call.range(tensor))))}: they are "
            yield Finding(kinds, f"{what}others in {type_names(kinds)}", "pass them as int64, which no level casts")
            return


def _results_otherwise(call: Call, kind: Kind) -> bool:
    """Return whether a call whose operands `kind` rounds has another result than in FP32."""
    known = {id(tensor): facts.values.get(kind, tensor) for tensor, facts in call.inputs}
    args = [known.get(id(each), each) for each in call.args]
    return not torch.equal(call.func(*args, **call.kwargs), call.result)


def _targets_are_coarse(call: Call) -> Iterator[Finding]:
    """Find subtractions and losses whose targets a level rounds too much.

    Too much is a rounding to other whole numbers, or by more than `_SHARE` of the targets' spread. If predictions and
    targets differ by less than FP16's rounding, they are no targets but earlier predictions (PPO's log probabilities).
    """
    if call.op not in _DIFFERENCES or len(call.inputs) < 2:
        return
    (one, first), (two, second) = call.inputs[:2]
    if first.learned == second.learned or one.shape != two.shape:
        return
    (target, known), guess = ((two, second), first) if first.learned else ((one, first), second)
    if is_two_valued_mask(target.detach()):
        return
    kinds = _changed_whole_numbers(target, known)
    lost = _SHARE * float(target.detach().std()) * target.numel() ** 0.5 if target.numel() > 1 else math.inf
    exact, apart = target.detach(), float((one - two).detach().norm())
    least = float((exact - exact.to(torch.float16)).norm())

    def is_coarse(dtype: torch.dtype) -> bool:
        return float((exact - exact.to(dtype)).norm()) > lost > 0 and least < apart

    kinds |= where(guess.low | guess.widened, is_coarse)  # else the prediction was rounded when it was small
    if kinds:
        most = max(map(abs, call.range(target)))
        steps = max(torch.finfo(kind.dtype).eps for kind in kinds) * 2 ** math.floor(math.log2(max(most, 1e-30)))
        what = f"the targets of {call.op} are numbers up to {figure(most)}, where {type_names(kinds)} has steps of "
        edit = "take the mean off the targets and divide by their spread; or the loss outside of the model"
        yield Finding(kinds, f"{what}{figure(steps)}", edit)


# Errors, refusals and requests


def _probabilities_saturate(call: Call) -> Iterator[Finding]:
    """Find binary cross entropies whose probabilities round to 0 or 1, or which a level refuses.

    `run` permits them, and computes sigmoids in FP32. It does not serve other probabilities that a level rounds to 0
    or 1.
    """
    if call.op != "binary_cross_entropy" or not call.inputs:
        return
    tensor, facts = call.inputs[0]
    edit = "binary_cross_entropy_with_logits, without the sigmoid"
    p = tensor.detach()

    def saturates(dtype: torch.dtype) -> bool:
        near = (p < 1) & (1 - p < torch.finfo(dtype).eps / 2)
        return bool((near | ((p > 0) & (p.to(dtype) == 0))).any())

    refused = facts.low - CASTING
    rounded = where(refused - facts.permitted, saturates)
    for kinds, served in (refused - rounded, True), (rounded, False):
        if kinds:
            what = f"binary_cross_entropy of {type_names(kinds)} is refused"
            yield Finding(kinds, what, f"{edit}; or allow_banned=True", raises=True, served=served)
    if kinds := where((facts.low | facts.widened) & CASTING, saturates):
        what = f"probabilities of binary_cross_entropy are 0 or 1 in {type_names(kinds)}: a wrong one is never learned"
        yield Finding(kinds, what, edit)


def _pixels_move(call: Call) -> Iterator[Finding]:
    """Find images of `grid_sample` that are so large that coordinates are off by `_PIXEL`, or a CPU's kernel fails.

    That kernel computes addresses of pixels in the image's type: in 16 bits addresses above 2**15 - 1 are wrong.
    """
    if call.op != "grid_sample" or len(call.inputs) < 2:
        return
    image, sizes = call.inputs[0][0], call.inputs[0][0].shape[2:]
    kinds, edit = call.low(0) & call.low(1), "x.float() and grid.float() there, or keep_fp32= for its module"
    if image.device.type == "cpu" and math.prod(sizes) >= 2**15:
        what = f"grid_sample of {' x '.join(map(str, sizes))} pixels reads wrong ones in {type_names(kinds)} on a CPU"
    else:
        kinds = frozenset(kind for kind in kinds if max(sizes) * kind.step > _PIXEL)
        what = f"coordinates of grid_sample in {max(sizes)} pixels are off by {_PIXEL} or more in {type_names(kinds)}"
    if kinds:
        yield Finding(kinds, what, edit)


def _fails(call: Call) -> Iterator[Finding]:
    """Find calls for which torch raises an error at a level."""
    told: dict[tuple[str, str, bool], set[Kind]] = {}
    for kind, error in call.errors.items():
        text = re.sub(r"\b(c10::)?(Half|BFloat16)\b", "low precision", str(error).partition("\n")[0])
        if "without overflow" in text:
            words = "a number does not fit {}", "torch.finfo(x.dtype).min, or max"
        elif call.rule == "fp32" or "not implemented" in text:
            words = f"torch has no {call.op} for {{}}", "x.float(), or keep_fp32= for its module"
        else:
            words = f"an error in {{}}: {text[:100]}", "x.to(other.dtype), a buffer, or O1 or O4, which cast"
        told.setdefault((*words, kind in call.served), set()).add(kind)
    for (what, edit, served), kinds in told.items():
        yield Finding(frozenset(kinds), what.replace("{}", type_names(kinds)), edit, raises=True, served=served)


def _gradients_are_refused(call: Call) -> Iterator[Finding]:
    """Find assignments `p.grad = x` of low-precision numbers at O1 and O4, where the parameter p is FP32."""
    if call.op == "grad" and call.args[0].dtype is torch.float32 and (kinds := call.low() - CASTING):
        what = f"torch refuses a gradient in {type_names(kinds)} for an FP32 parameter"
        yield Finding(kinds, what, "x.to(p.dtype) in the assignment", raises=True)


def _asked_for_fp32(call: Call) -> Iterator[Finding]:
    """Find a torch.autocast or a custom_fwd that asks for FP32, but computes with low-precision tensors at a level."""
    kinds = frozenset[Kind]().union(*(facts.low for _, facts in call.inputs)) if call.inputs else frozenset()
    edit = "x.float() there, or keep_fp32= for its module"
    if call.op == "custom_fwd" and (kinds := kinds & CASTING):
        yield Finding(kinds, f"custom_fwd asks for FP32 and gets {type_names(kinds)}", edit)
    elif call.asked is not None and kinds and not is_view(call):
        what = f"torch.autocast asks for FP32, and what is in it gets {type_names(kinds)}"
        yield Finding(kinds, what, edit, call.asked, "autocast")


def _writes_stand_still(call: Call) -> Iterator[Finding]:
    """Find writes into a tensor of the model, if rounding loses most of the changes.

    Such a tensor is an average that no optimizer trains, or a weight that the script itself decays.
    """
    if call.written is None or not call.inputs:
        return
    adds_up = call.op in ("add", "sub") or (call.op in ("mul", "div") and len(call.inputs) == 1)
    if call.trained and not adds_up:  # a norm that is set is set again in the next step, when the change is larger
        return
    (name, before), facts = call.written, (call.outputs or call.inputs)[0][1]
    after = call.args[0].detach()
    step = max(1, before.numel() // 4096)
    old, change = before.flatten()[::step], (after - before).flatten()[::step]
    changed = (change.abs() > 2.0**-20 * old.abs()) & change.isfinite()  # less is FP32's own rounding

    def loses(dtype: torch.dtype) -> bool:
        low = old.to(dtype)
        return 2 * int((changed & ((low.float() + change).to(dtype) == low)).sum()) > int(changed.sum())

    if kinds := where(facts.low & CASTING, loses):
        which = "a trained weight" if call.trained else "which no optimizer trains"
        what = f"{name!r}, {which}, is changed by less than a step of {type_names(kinds)}: it stands still"
        edit = "a module of its own that has buffers and no parameters, or keep_fp32= for its module"
        if call.trained:
            edit = "change amp.master_params(optimizer), or let the optimizer do it (weight_decay=)"
        yield Finding(kinds, what, edit, served=kinds <= call.served)


def _arrays_fail(call: Call) -> Iterator[Finding]:
    """Find conversions of BF16 tensors to NumPy arrays: NumPy has no BF16."""
    if call.op in ("numpy", "array") and call.inputs:
        kinds = frozenset(kind for kind in call.low() if kind.dtype is torch.bfloat16)
        if kinds:
            edit = "x.float().numpy(), or cast_model_outputs=torch.float32"
            yield Finding(kinds, "numpy() of BF16 is an error", edit, raises=True, served=True)


RULES: tuple[Rule, ...] = (
    *RANGES,
    _pixels_move,
    _fails,
    _gradients_are_refused,
    _whole_numbers_change,
    _targets_are_coarse,
    _probabilities_saturate,
    _asked_for_fp32,
    _writes_stand_still,
    _arrays_fail,
)
