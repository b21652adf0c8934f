"""The contracts of the kernels, checked: ValueError or TypeError where a call breaks one.

The extension guards memory by the same rules, without words. When it refuses a call, the checks here run and say why.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import SupportsFloat, SupportsIndex

import torch
from torch import Tensor

Tensors = Sequence[Tensor]
Number = float | Tensor
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def check_tensor(
    name: str, which: str, t: object, device: torch.device, first: str, dtypes: tuple[torch.dtype, ...] = DTYPES
) -> None:
    """Raise unless `t` is a plain tensor on `device`, that of the tensor named `first`, and of one of `dtypes`."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{name}: {which} is a {type(t).__name__}, a tensor is wanted")
    if t.layout is torch.sparse_coo:
        raise TypeError(
            f"{name}: {which} is sparse ({t.layout}), a dense one is wanted: hand over its coalesced values "
            "(`t.coalesce().values()`)"
        )
    if t.layout is not torch.strided:
        raise TypeError(
            f"{name}: {which} is {t.layout}, a dense one is wanted: hand over its values (`t.values()`) or a dense copy"
        )
    if _is_wrapper(t):
        raise TypeError(
            f"{name}: {which} is a {type(t).__name__}, a plain tensor is wanted: hand over the one inside it "
            "(`t.to_local()` of a DTensor)"
        )
    if t.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        wanted = f"one of {names}" if len(dtypes) > 1 else names
        raise TypeError(f"{name}: {which} is {t.dtype}, {wanted} is wanted: convert it or leave it out")
    if not _has_memory(t):
        raise TypeError(
            f"{name}: {which} has no memory of its own (nested, a lazy zero, seen through torch.func, or its storage "
            "was freed), a plain tensor is wanted: hand over a copy (`t.clone()`), or call this outside the transform"
        )
    if t.is_neg():
        raise ValueError(f"{name}: {which} is a lazily negated view, call `.resolve_neg()` on it first")
    if t.device.type != "meta" and t.numel() and t.untyped_storage().nbytes() < _end(t) * t.element_size():
        raise ValueError(
            f"{name}: {which} has shape {list(t.shape)} but its storage holds {t.untyped_storage().nbytes()} bytes: "
            "its memory was given back (a sharded parameter outside its forward?), hand over tensors that have theirs"
        )
    if t.device != device:
        raise ValueError(
            f"{name}: {which} is on {t.device}, {first} on {device}: one call takes one device, group the tensors by "
            "device"
        )


def _end(t: Tensor) -> int:
    """Elements from the start of the storage to behind the last one of `t`."""
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return int(t.storage_offset() + last + 1)


def _is_wrapper(t: Tensor) -> bool:
    """Whether `t` is of a subclass that answers operators itself, such as a DTensor."""
    return type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__


def _has_memory(t: Tensor) -> bool:
    """Whether the elements of `t` lie in a storage of its own, where a kernel can read them."""
    if t.is_nested or t._is_zerotensor() or torch._is_functional_tensor(t):
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(t):
        return False
    # Not its address: asking for that makes a lazy copy real.
    return t.device.type not in ("cpu", "cuda") or not t.numel() or t.untyped_storage().nbytes() != 0


def check_unrecorded(name: str, which: str, written: Tensor) -> None:
    """Raise where autograd would have to see a write."""
    if written.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name}: {which} requires grad, and autograd would not see the write: call {name} under torch.no_grad()"
        )


def check_one(
    name: str, which: str, t: object, device: torch.device, dtypes: tuple[torch.dtype, ...], written: bool
) -> None:
    """Raise unless `t` is a plain tensor of one element, on `device` and of one of `dtypes`; `written`: in place."""
    wanted = f"a {' or '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)} tensor of one element on {device}"
    if not isinstance(t, Tensor):
        raise TypeError(f"{name}: {which} is a {type(t).__name__}, {wanted} is wanted")
    if t.dtype not in dtypes or t.numel() != 1 or t.device != device or t.layout is not torch.strided or t.is_neg():
        lazy = "lazily negated " if t.is_neg() else ""
        raise ValueError(
            f"{name}: {which} is a {lazy}{t.dtype} tensor of shape {list(t.shape)} on {t.device}, {wanted} is wanted"
        )
    if _is_wrapper(t) or not _has_memory(t):
        raise TypeError(f"{name}: {which} is a {type(t).__name__} without memory of its own, {wanted} is wanted")
    if written:
        check_unrecorded(name, which, t)


def is_number(value: object) -> bool:
    """Whether the extension and ``float`` take the value as a number: int, NumPy's, Fraction; no text."""
    try:
        return isinstance(value, (SupportsFloat, SupportsIndex)) and (float(value), True)[1]
    except (TypeError, ValueError, OverflowError):  # an array of many elements, an int past 1.8e308
        return False


def _overlap(t: Tensor, out: Tensor) -> bool:
    """Whether writing ``out`` disturbs ``t``, where torch can tell cheaply; the very same elements are no overlap."""
    if t is out or not t.numel() or t.is_meta:
        return False
    if t.data_ptr() == out.data_ptr() and t.dtype == out.dtype and t.stride() == out.stride():
        return False
    if not all(torch.ops.aten.is_non_overlapping_and_dense(x) for x in (t, out)):
        return False
    ends = [x.data_ptr() + x.numel() * x.element_size() for x in (t, out)]
    return t.data_ptr() < ends[1] and out.data_ptr() < ends[0]


def check_apart(name: str, outs: Mapping[str, Tensors], read: Mapping[str, Tensors] | None = None) -> None:
    """No two outputs share elements, and no output with what is `read`, where torch can tell cheaply. Lists by name."""

    def known(t: Tensor) -> int:  # how many elements lie one after another
        return t.numel() if torch.ops.aten.is_non_overlapping_and_dense(t) else 1

    def spans(lists: Mapping[str, Tensors], is_read: bool) -> list[tuple[int, int, bool, tuple[str, int]]]:
        return [
            (t.data_ptr(), t.data_ptr() + known(t) * t.element_size(), is_read, (label, i))
            for label, tensors in lists.items()
            for i, t in enumerate(tensors)
            if t.numel() and not t.is_meta
        ]

    ends = {False: 0, True: 0}  # how far the spans before reach: the written ones, those that are read
    last = {False: ("", 0), True: ("", 0)}
    for begin, end, is_read, place in sorted(spans(outs, False) + spans(read or {}, True)):
        for other in (False, True):
            if begin < ends[other] and not (is_read and other):
                (a, i), (b, j) = sorted((last[other], place))
                both = f"tensors {i} and {j} of {a} overlap" if a == b else f"tensor {i} of {a} overlaps {j} of {b}"
                raise ValueError(f"{name}: {both} in memory: hand over each element once")
        if end > ends[is_read]:
            ends[is_read], last[is_read] = end, place


def check_lists(
    name: str,
    lists: dict[str, Tensors],
    written: str | None,
    found_inf: object = None,
    numbers: dict[str, object] | None = None,
) -> None:
    """Raise where the arguments of the kernel `name` break the contract of `amp_patch.multi_tensor`.

    Args:
        lists: by the arguments' names; all of one length, with tensors of one shape at each place.
        written: the name of the list that is written in place, if one is.
        found_inf, numbers: tensors of one element, or None; `numbers` may be plain numbers.
    """
    for label, tensors in lists.items():
        if not isinstance(tensors, (list, tuple)):
            raise TypeError(f"{name}: {label} is a {type(tensors).__name__}, a list or tuple of tensors is wanted")
    (label0, list0), *_ = lists.items()
    device = next((t.device for t in (*list0, found_inf) if isinstance(t, Tensor)), torch.device("cpu"))
    for label, tensors in lists.items():
        if len(tensors) != len(list0):
            raise ValueError(f"{name}: {label} has {len(tensors)} tensors, {label0} has {len(list0)}")
        for i, (t, t0) in enumerate(zip(tensors, list0, strict=True)):
            check_tensor(name, f"tensor {i} of {label}", t, device, f"tensor 0 of {label0}")
            if t.shape != t0.shape:
                raise ValueError(
                    f"{name}: tensor {i} of {label} has shape {list(t.shape)}, {label0} has {list(t0.shape)}"
                )
            if (t.dtype == torch.float64) != (t0.dtype == torch.float64):
                raise TypeError(
                    f"{name}: tensor {i} of {label} is {t.dtype}, {label0} has {t0.dtype}: float64 stays float64, "
                    "convert one of the two first"
                )
    for i, out in enumerate(lists[written] if written else ()):
        check_unrecorded(name, f"tensor {i} of {written}", out)
        if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True)):
            raise ValueError(
                f"{name}: tensor {i} of {written} overlaps itself (an expanded tensor, strides {list(out.stride())}): "
                "it cannot be written, hand over a `.clone()`"
            )
        for label, tensors in lists.items():
            if _overlap(tensors[i], out):
                raise ValueError(
                    f"{name}: tensor {i} of {written} overlaps tensor {i} of {label} in memory: they must be the same "
                    "elements or apart, hand over a `.clone()`"
                )
    if written:
        check_apart(name, {written: lists[written]})
    if found_inf is not None:
        check_one(name, "found_inf", found_inf, device, (torch.float32,), written=True)
    for label, number in (numbers or {}).items():
        if isinstance(number, Tensor):
            check_one(name, label, number, device, (torch.float32, torch.float64), written=False)
        elif not is_number(number):
            raise TypeError(
                f"{name}: {label} is a {type(number).__name__}, a float is wanted, or a float32 or float64 tensor of "
                f"one element on {device}"
            )


def check_scale(scale: object, growth_tracker: object, found_inf: object, hysteresis_tracker: object) -> None:
    """The tensors of `update_scale`; None for a hysteresis_tracker is right."""
    name, device = "update_scale", scale.device if isinstance(scale, Tensor) else torch.device("cpu")
    check_one(name, "scale", scale, device, (torch.float32,), written=True)
    check_one(name, "growth_tracker", growth_tracker, device, (torch.int32,), written=True)
    check_one(name, "found_inf", found_inf, device, (torch.float32,), written=False)
    if hysteresis_tracker is not None:
        check_one(name, "hysteresis_tracker", hysteresis_tracker, device, (torch.int32,), written=True)


def check_numbers(name: str, factors: dict[str, object], counts: dict[str, object]) -> None:
    """Factors must be floats, or become one; counts must be ints of 32 bits."""
    for which, factor in factors.items():
        if not is_number(factor):
            raise TypeError(f"{name}: {which} is {factor!r}, a float is wanted")
    for which, count in counts.items():
        if not isinstance(count, SupportsIndex) or not -(2**31) <= operator.index(count) < 2**31:
            raise TypeError(f"{name}: {which} is {count!r}, an int of 32 bits is wanted")
