"""The contract of the optimizers' steps, checked: ValueError or TypeError where a call breaks it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from amp_patch.multi_tensor.checks import (
    Tensors,
    check_apart,
    check_one,
    check_tensor,
    check_unrecorded,
    is_number,
)

HALVES = (torch.float16, torch.bfloat16)


def _check_sequences(name: str, lists: Mapping[str, object]) -> None:
    for label, tensors in lists.items():
        if not isinstance(tensors, (list, tuple)):
            raise TypeError(f"{name}: {label} is a {type(tensors).__name__}, a list or tuple of tensors is wanted")


def _wanted(label: str) -> tuple[torch.dtype, ...]:
    kinds = {"grads": (torch.float32, *HALVES), "params": (torch.float32, torch.int16), "low": HALVES}
    kinds |= {"weights": (torch.bfloat16,), "halves": (torch.int16,)}
    return kinds.get(label, (torch.float32,))


def _check_place(name: str, which: str, t: Tensor, param: Tensor) -> None:
    """`t` has the shape and the memory order of its parameter."""
    if t.shape != param.shape:
        raise ValueError(f"{name}: {which} has shape {list(t.shape)}, its parameter has {list(param.shape)}")
    if t.is_contiguous() and param.is_contiguous():
        return
    if not torch.ops.aten.is_non_overlapping_and_dense(t):
        raise ValueError(
            f"{name}: {which} has strides {list(t.stride())}, with gaps or overlaps: a dense tensor is wanted, hand "
            "over a `.clone()`"
        )
    if any(size != 1 and a != b for size, a, b in zip(t.shape, t.stride(), param.stride(), strict=True)):
        raise ValueError(
            f"{name}: {which} has strides {list(t.stride())}, its parameter has {list(param.stride())}: one memory "
            "order is wanted, hand over a copy in the parameter's"
        )


def check_steps(
    name: str,
    lists: Mapping[str, Tensors],
    optional: Mapping[str, Tensors],
    steps: Tensors,
    factors: Sequence[object],
    read: Mapping[str, object],
    numbers: Mapping[str, object],
    found_inf: object,
) -> None:
    """Raise where the arguments of the kernel `name` break its contract.

    Args:
        lists: by name; "grads" is only read.
        optional: more of them, which may be empty.
        steps: tensors of one element, as many as parameters or none.
        factors, read: floats, or tensors of one element on the lists' device.
        numbers: floats.
    """
    _check_sequences(name, {**lists, **optional, "steps": steps, "factors": factors})
    params = lists["params"]
    given = {"params": params, **lists, **{label: tensors for label, tensors in optional.items() if tensors}}
    device = next((t.device for t in (*params, found_inf) if isinstance(t, Tensor)), torch.device("cpu"))
    if steps and len(steps) != len(params):
        raise ValueError(f"{name}: steps has {len(steps)} tensors, params has {len(params)}")
    _check_counts(name, steps, device, found_inf)
    _check_rows(name, given, [label for label in given if label != "grads"], device, steps)
    low = given.get("low", ())
    for i, param in enumerate(params):
        if param.dtype == torch.int16 and (not low or low[i].dtype != torch.bfloat16):
            came = f"{low[i].dtype}" if low else "None"
            raise TypeError(
                f"{name}: tensor {i} of params is torch.int16, half of a split master, and its weight in low is "
                f"{came}: bfloat16 is wanted"
            )
    if found_inf is not None:
        check_one(name, "found_inf", found_inf, device, (torch.float32,), written=False)
    _check_numbers(name, factors, read, numbers, device)


def _check_rows(
    name: str, given: Mapping[str, Tensors], written: Sequence[str], device: torch.device, steps: Tensors = ()
) -> None:
    """The lists `given`, of which the first decides: lengths, shapes, memory orders, dtypes, and nothing overlaps."""
    (lead, leads), *_ = given.items()
    for label, tensors in given.items():
        if len(tensors) != len(leads):
            raise ValueError(f"{name}: {label} has {len(tensors)} tensors, {lead} has {len(leads)}")
    for label, tensors in given.items():
        for i, t in enumerate(tensors):
            which = f"tensor {i} of {label}"
            check_tensor(name, which, t, device, f"tensor 0 of {lead}", _wanted(label))
            _check_place(name, which, t, leads[i])
            if label in written:
                check_unrecorded(name, which, t)
    outs = {label: given[label] for label in written} | {"steps": steps}
    read = {label: tensors for label, tensors in given.items() if label not in written}
    check_apart(name, outs, read)


def check_split(name: str, masters: Tensors, weights: Tensors, halves: Tensors, written: Sequence[str]) -> None:
    """Raise where the lists of a split or a join break its contract."""
    given = {"masters": masters, "weights": weights, "halves": halves}
    _check_sequences(name, given)
    device = next((t.device for t in masters if isinstance(t, Tensor)), torch.device("cpu"))
    _check_rows(name, given, written, device)


def _check_counts(name: str, steps: Tensors, device: torch.device, found_inf: object) -> None:
    """The counts of steps lie together, on the lists' device or on the CPU."""
    first = steps[0] if steps else None
    where = first.device if isinstance(first, Tensor) and first.device.type == "cpu" else device
    for i, step in enumerate(steps):
        check_one(name, f"tensor {i} of steps", step, where, (torch.float32,), written=True)
    if steps and where != device and found_inf is not None:
        raise ValueError(
            f"{name}: steps are on the CPU, found_inf is on {device}: steps that it may leave as they are must be "
            "there too"
        )


def _check_numbers(
    name: str,
    factors: Sequence[object],
    read: Mapping[str, object],
    numbers: Mapping[str, object],
    device: torch.device,
) -> None:
    if len(factors) > 2:
        raise ValueError(f"{name}: there are {len(factors)} factors, two at most are wanted: multiply some together")
    for label, number in {**read, **{f"factor {k}": factor for k, factor in enumerate(factors)}}.items():
        if isinstance(number, Tensor):
            check_one(name, label, number, device, (torch.float32, torch.float64), written=False)
        elif not is_number(number):
            raise TypeError(f"{name}: {label} is a {type(number).__name__}, a float or a tensor of one is wanted")
    for label, number in numbers.items():
        if not is_number(number):
            raise TypeError(f"{name}: {label} is {number!r}, a float is wanted")
