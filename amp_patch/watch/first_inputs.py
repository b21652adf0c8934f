"""Checks of the inputs of a cast model's first calls: an error or a warning for inputs that the cast would ruin.

A cast changes a number by at most half the distance to the next number of the type, which training tolerates. It ruins
three kinds of inputs. A finite number beyond the type's largest becomes infinite. A time or an index becomes another
one. A feature whose values differ by less than that distance becomes constant.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from amp_patch.model import masks
from amp_patch.model.joints import Call, Entry, FirstCalls
from amp_patch.model.kept_module import received
from amp_patch.policy import Policy
from amp_patch.support import fsdp
from amp_patch.support.device_sync import is_capturing
from amp_patch.support.generated_class import base_class
from amp_patch.support.interrupts import hold_sigint, whole
from amp_patch.support.scripts_line import warn
from amp_patch.support.tree import tensors
from amp_patch.watch.rounded_features import edges_of, most_rounded
from amp_patch.watch.tables import warn_of_tables

# The position and name of an argument, its name for messages, and a tensor in it.
_Given = tuple[tuple[int | str, ...], str, Tensor]

_TOLD = "warnings about inputs"  # in `Call.notes`
_TABLES = "tables of the model"  # in `FirstInputs.told`, beside names of arguments: tables were warned about
_IMAGE_DIMS = 4  # whole numbers in a tensor of 4 or more dimensions are pixel values, which rounding does not harm
_SAME_WEIGHTS = {"O2": "O1", "O3": "O1", "O5": "O4", "O7": "O6"}  # levels that cast no inputs of the model


class Told(NamedTuple):
    """A warning about the input `x`, and the words for it in `FirstInputs.told`."""

    x: Tensor
    argument: str
    text: str


class FirstInputs(FirstCalls):
    """Checks the inputs of a model's first calls.

    If the cast makes a finite number of a floating input infinite, it raises ValueError, unless the input is an
    additive mask: in this call and all later calls, the numbers of that argument stay finite (model/masks.py). If the
    cast changes times or whole numbers, or removes the variation of a feature (rounded_features.py), it warns, once for
    each argument; but not about an input that a module in FP32 has received unrounded. If the cast has rounded a table
    of frequencies, it warns once for the model (`warn_of_tables`).

    Each input is read once. On a GPU the check syncs once, and again for each input with a number beyond the range in
    which the type has all whole numbers or with a narrow feature, and for each buffer that the cast has rounded. Calls
    during the capture of a CUDA graph, compiled forwards, sharded models, subclasses of Tensor, and tensors without
    readable values (meta, fake, nested, inside of `vmap`) are not checked.

    Attributes:
        takes_infinite: whether a number that becomes infinite is warned about, in place of an error.
        told: methods' arguments that a warning has named, and a word for tables.
    """

    traced = False

    def __init__(self, takes_infinite: bool) -> None:
        super().__init__()
        self.takes_infinite = takes_infinite
        self.told: set[str] = set()

    @whole  # without this, Ctrl-C at an exit of torch's `no_grad` would leave gradients off
    def look(self, call: Call) -> None:
        """Check the inputs, and note warnings about them for the end of the call.

        Raises:
            ValueError: a finite number becomes infinite, and its tensor is not a mask.
        """
        if is_capturing() or torch.jit.is_tracing():
            return
        method = call.kind[0]
        hold_sigint()  # the first region of a training does, and is entered after this
        with torch.no_grad(), _disable_current_modes(), torch._C.DisableTorchFunction():
            given = [each for each in _arguments(call.model, method, *call.given) if _is_readable(each[2])]
            where = f"{base_class(call.model).__name__}.{method}"
            call.notes[_TOLD] = self._look_at_numbers(call, where, given)
            if _TABLES not in self.told and warn_of_tables(call.model, [x for _, _, x in given]):
                self.told.add(_TABLES)

    def _look_at_numbers(self, call: Call, where: str, given: list[_Given]) -> list[Told]:
        policy: Policy = call.state.policy
        low: Any = policy.cast_model_type
        edges = []
        found = []
        for each in given:
            if each[2].is_floating_point() and each[2].dtype is not low:
                try:
                    edges.append(edges_of(each[2], low))
                except NotImplementedError:  # torch has no minimum for this type or layout
                    continue
                found.append(each)
        if not found:
            return []
        most = 2 / torch.finfo(low).eps  # all whole numbers up to here are numbers of the type
        device = edges[0].device
        told = []
        for (keys, name, x), (lowest, highest, narrow) in zip(
            found, torch.stack([each.to(device) for each in edges]).tolist(), strict=True
        ):
            argument, beyond = f"{where}: argument {name}", not -most <= lowest <= highest <= most
            text = None
            if beyond:
                lost, rest = masks.lost_and_rest(x, low)
                if masks.belong_to_mask(lost, rest):
                    masks.note(call, keys)
                    continue
                text = _infinite(argument, lost, low, policy)
                if text is not None and not self.takes_infinite:
                    raise ValueError(text)
                text = text or _changed_whole_numbers(argument, x, low, policy)
            if text is None and narrow:
                text = _removed_variation(argument, x, low, policy)
            if text is None and beyond:
                text = _changed_times(argument, x, low, policy)
            if text is not None:
                told.append(Told(x, argument, text))
        return told

    def leave(self, call: Call) -> None:
        """Give the warnings of `look`, after an error too, whose cause they may tell."""
        taken = [given.value for _, given in received.inputs if given.taken] if _TOLD in call.notes else []
        for each in call.notes.get(_TOLD, ()):
            if each.argument not in self.told and all(each.x is not x for x in taken):
                self.told.add(each.argument)
                warn(each.text)


def choose(model: nn.Module, entry: Entry) -> FirstInputs | None:
    """Return a guest if the training casts the inputs of `model`, and it is not sharded."""
    casts = entry.policy.cast_model_type is not None and not fsdp.is_fsdp(model)
    return FirstInputs(entry.takes_infinite) if casts else None


def _arguments(model: nn.Module, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[_Given]:
    """Yield a `_Given` for each tensor in the arguments of `model.method`, also for tensors in dicts and lists."""
    parameters = inspect.signature(getattr(model, method)).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    given: list[tuple[tuple[int | str, ...], Any]]
    given = [((key, names[key]) if key < len(names) else (key,), value) for key, value in enumerate(args)]
    given += [((names.index(key), key) if key in names else (key,), value) for key, value in kwargs.items()]
    for keys, value in given:
        name = repr(keys[-1]) if isinstance(keys[-1], str) else str(keys[0])
        inner = value.items() if isinstance(value, Mapping) else [(None, value)]
        for part, item in inner:
            for tensor in tensors(item):
                yield keys, name if part is None else f"{name}[{part!r}]", tensor


def _is_readable(x: Tensor) -> bool:
    return (
        type(x) in (Tensor, nn.Parameter)
        and (x.dtype.itemsize > 1 or not x.is_floating_point())  # torch compares no FP8 numbers
        and x.layout is torch.strided
        and not x.is_nested
        and not x.is_meta
        and x.numel() > 0
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
    )


def _infinite(where: str, lost: Tensor, low: torch.dtype, policy: Policy) -> str | None:
    """Return the text about `lost`, finite numbers that become infinite; None if there are none."""
    if not lost.numel():
        return None
    way = "choose opt_level='O5', whose torch.bfloat16 has FP32's range"
    if low is torch.bfloat16:
        way = f"choose opt_level={_level_without_cast(policy)!r}, which casts no inputs of the model"
    return (
        f"{where} holds {lost[lost.abs().argmax()].item():g}, which {low} cannot hold ({torch.finfo(low).max:g} at "
        f"most), and opt_level {policy.opt_level!r} casts it to that: scale it down before the model, pass a mask "
        f"as torch.bool, or {way}"
    )


def _changed_whole_numbers(where: str, x: Tensor, low: torch.dtype, policy: Policy) -> str | None:
    """Return a warning if all finite numbers of `x` are whole, and `low` changes a positive one; else None.

    Negative numbers may belong to a mask.
    """
    if x.dim() >= _IMAGE_DIMS and not _is_one_each(x):
        return None
    x = x[x.isfinite()]
    # Every floating number beyond 1 / eps is whole, so there a whole number need not be a time or an index.
    changed = x[(x.to(low).to(x.dtype) != x) & (x > 0) & (x < 1 / torch.finfo(x.dtype).eps)]
    if not changed.numel() or not torch.equal(x, x.round()):
        return None
    return _changed(f"{where} has whole numbers alone", changed[0], low, policy, integers=True)


def _changed_times(where: str, x: Tensor, low: torch.dtype, policy: Policy) -> str | None:
    """Return a warning if `x` has one number a sample, as times do, and `low` changes one by more than 0.5; else None.

    A sinusoid of frequency 1 is off by so many radians. Negative numbers are no times. Numbers of which the largest is
    more than 4 times the mean are a feature of a wide range, where a model reacts to ratios.
    """
    if not _is_one_each(x):
        return None
    x = x[x.isfinite()].float()
    off = (x.to(low).float() - x).abs()
    if not bool((off > 0.5).any() & (x >= 0).all()) or bool(x.max() > 4 * x.mean()):
        return None
    return _changed(f"{where} has one number a sample", x[off.argmax()], low, policy, integers=False)


def _is_one_each(x: Tensor) -> bool:
    return x.numel() == (x.shape[0] if x.dim() else 1)


def _changed(has: str, number: Tensor, low: torch.dtype, policy: Policy, *, integers: bool) -> str:
    given = f"{number.item():.{15 if integers else 7}g}"
    return (
        f"{has}, and {low}, to which opt_level {policy.opt_level!r} casts them, changes some "
        f"({given} becomes {number.to(low).item():.15g}): if they are times, positions, "
        f"indices or ids, {'pass them as torch.int64, which no level casts, ' if integers else ''}{_way_out(policy)}"
    )


def _removed_variation(where: str, x: Tensor, low: torch.dtype, policy: Policy) -> str | None:
    """Return a warning if rounding to `low` removes the variation of a feature of `x`; else None."""
    worst = most_rounded(x, low)
    if worst is None:
        return None
    feature = "all its numbers" if worst.axis is None else f"its feature {worst.feature} (of dimension {worst.axis})"
    return (
        f"{where}: {low}, to which opt_level {policy.opt_level!r} casts it, removes {worst.removed:.0%} of the "
        f"variance of {feature}, from {worst.lowest:.7g} to {worst.highest:.7g}, where that type has steps of "
        f"{worst.step:g}: subtract the mean and divide by the spread before the model, {_way_out(policy)}"
    )


def _way_out(policy: Policy) -> str:
    return (
        "name the module that receives it in keep_fp32=, which then gets it unrounded, or choose "
        f"opt_level={_level_without_cast(policy)!r}, which casts no inputs of the model"
    )


def _level_without_cast(policy: Policy) -> str:
    return _SAME_WEIGHTS.get(policy.opt_level, "O1")
