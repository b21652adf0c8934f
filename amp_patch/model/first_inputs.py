"""Checks of the inputs of a cast model's first forwards: an error or a warning for inputs that the cast would ruin.

A cast changes a number by at most half the distance to the next number of the type, which training tolerates. It ruins
two kinds of inputs. A finite number beyond the type's largest becomes infinite. A time or an index becomes a different
time or index.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from amp_patch.model.state import ModelState
from amp_patch.model.tables import warn_of_tables
from amp_patch.policy import Policy
from amp_patch.support.device_sync import is_capturing
from amp_patch.support.generated_class import base_class
from amp_patch.support.interrupts import hold_sigint, whole
from amp_patch.support.scripts_line import stacklevel
from amp_patch.support.tree import map_tensors, tensors

# The position and name of an argument, its name for messages, and a tensor in it.
_Given = tuple[tuple[int | str, ...], str, Tensor]

_TABLES = "tables of the model"  # in `ModelState.told`, beside names of arguments: tables were warned about
_MASKED = -1e8  # a number up to this belongs to an additive mask
_IMAGE_DIMS = 4  # whole numbers in a tensor of 4 or more dimensions are pixel values, which rounding does not harm
_SAME_WEIGHTS = {"O2": "O1", "O3": "O1", "O5": "O4", "O7": "O6"}  # levels that cast no inputs of the model


@whole  # without this, Ctrl-C at an exit of torch's `no_grad` would leave gradients off
def look(model: nn.Module, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], own: ModelState) -> None:
    """Check the inputs of a call of `model`, one of the first three in training mode or in eval mode.

    If the cast makes a finite number of a floating input infinite, raise ValueError, unless the input is an additive
    mask. The argument of a mask is recorded in `own.masks`: in this call and all later calls, `saturated` keeps the
    mask's numbers finite. If the cast changes whole numbers, warn once for each argument. If the cast has rounded a
    table of frequencies, warn once for the model (`warn_of_tables`).

    Each input is read once. On a GPU the check syncs once, and again for each input with a number beyond the range in
    which the type has all whole numbers, and for each buffer that the cast has rounded. Calls during the capture of a
    CUDA graph, compiled forwards, sharded models, subclasses of Tensor, and tensors without readable values (meta,
    fake, inside of `vmap`) are not checked.

    Args:
        method: the name of the method of `model` that is called with `args` and `kwargs`.

    Raises:
        ValueError: a finite number becomes infinite, and its tensor is not a mask.
    """
    own.looks[model.training] = max(own.looks[model.training] - 1, 0)  # replicas of DataParallel share the list
    low = own.policy.cast_model_type
    if low is None or own.sharded or is_capturing() or torch.jit.is_tracing():
        return
    hold_sigint()  # the first region of a training does, and is entered after this
    with torch.no_grad(), _disable_current_modes(), torch._C.DisableTorchFunction():
        given = [each for each in _arguments(model, method, args, kwargs) if _is_readable(each[2])]
        _look_at_numbers(f"{base_class(model).__name__}.{method}", given, low, own)
        if _TABLES not in own.told and warn_of_tables(model, [x for _, _, x in given]):
            own.told.add(_TABLES)


def _look_at_numbers(where: str, given: list[_Given], low: torch.dtype, own: ModelState) -> None:
    found = [each for each in given if each[2].is_floating_point() and each[2].dtype is not low]
    if not found:
        return
    most = 2 / torch.finfo(low).eps  # all whole numbers up to here are numbers of the type
    device = found[0][2].device
    edges = torch.stack([torch.stack(torch.aminmax(x)).float().to(device) for _, _, x in found]).tolist()
    for (keys, name, x), (lowest, highest) in zip(found, edges, strict=True):
        if -most <= lowest and highest <= most:
            continue
        lost, rest = _lost_and_rest(x, low)
        if _belong_to_mask(lost, rest):
            own.masks.update(keys)
            continue
        argument = f"{where}: argument {name}"
        _refuse_infinite(argument, lost, low, own.policy)
        if name not in own.told and _warn_of_whole_numbers(argument, x, low, own.policy):
            own.told.add(name)


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
        and not x.is_meta
        and x.numel() > 0
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
    )


def is_mask(x: Tensor, low: torch.dtype) -> bool:
    """Tell whether `x` is an additive mask with finite numbers that become infinite in `low`. Syncs.

    `x` is a mask if all such numbers are at most -1e8 (a mask of -1e9 may be added to position biases), or if they are
    all negative and every other finite number of `x` is 0.
    """
    return _belong_to_mask(*_lost_and_rest(x, low))


def _belong_to_mask(lost: Tensor, rest: Tensor) -> bool:
    """Tell whether `lost`, numbers that become infinite, belong to a mask whose other finite numbers are `rest`."""
    if not lost.numel():
        return False
    highest = lost.max().item()
    return highest <= _MASKED or (highest < 0 and not bool(rest.any()))


def _lost_and_rest(x: Tensor, low: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split the finite numbers of `x` in two 1-D tensors: those that become infinite in `low`, and all others."""
    finite, infinite = x.isfinite(), x.to(low).isinf()
    return x[finite & infinite], x[finite & ~infinite]


def _refuse_infinite(where: str, lost: Tensor, low: torch.dtype, policy: Policy) -> None:
    if lost.numel():
        way = "choose opt_level='O5', whose torch.bfloat16 has FP32's range"
        if low is torch.bfloat16:
            way = f"choose opt_level={_level_without_cast(policy)!r}, which casts no inputs of the model"
        raise ValueError(
            f"{where} holds {lost[lost.abs().argmax()].item():g}, which {low} cannot hold ({torch.finfo(low).max:g} at "
            f"most), and opt_level {policy.opt_level!r} casts it to that: scale it down before the model, pass a mask "
            f"as torch.bool, or {way}"
        )


def _warn_of_whole_numbers(where: str, x: Tensor, low: torch.dtype, policy: Policy) -> bool:
    """Warn if all finite numbers of `x` are whole, and `low` changes a positive one. Return whether this has warned.

    Negative numbers may belong to a mask.
    """
    if x.dim() >= _IMAGE_DIMS:
        return False
    x = x[x.isfinite()]
    # Every floating number beyond 1 / eps is whole, so there a whole number need not be a time or an index.
    changed = x[(x.to(low).to(x.dtype) != x) & (x > 0) & (x < 1 / torch.finfo(x.dtype).eps)]
    if not changed.numel() or not torch.equal(x, x.round()):
        return False
    number = changed[0]
    warnings.warn(
        f"{where} has whole numbers alone, and {low}, to which opt_level {policy.opt_level!r} casts them, changes some "
        f"({number.item():.15g} becomes {number.to(low).item():g}): if they are times, positions, indices or ids, pass "
        f"them as torch.int64, which no level casts, or choose opt_level={_level_without_cast(policy)!r}, which casts "
        "no inputs of the model",
        stacklevel=stacklevel(),
    )
    return True


def _level_without_cast(policy: Policy) -> str:
    return _SAME_WEIGHTS.get(policy.opt_level, "O1")


def saturated(
    args: tuple[Any, ...], kwargs: dict[str, Any], masks: set[int | str], low: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) of a call, where the floating tensors of masks are cast to `low` by `saturate`.

    Args:
        masks: the positions and names of the arguments that are masks (`ModelState.masks`).
    """

    def one(x: Tensor) -> Tensor:
        return saturate(x, low) if x.is_floating_point() and x.dtype is not low else x

    return (
        tuple([map_tensors(one, value) if key in masks else value for key, value in enumerate(args)]),
        {key: map_tensors(one, value) if key in masks else value for key, value in kwargs.items()},
    )


def saturate(x: Tensor, low: torch.dtype) -> Tensor:
    """Return `x` cast to `low`; a finite number below the range of `low` becomes its lowest number instead of -inf."""
    cast = x.to(low)
    return cast.masked_fill(cast.isneginf() & ~x.isneginf(), torch.finfo(low).min)
