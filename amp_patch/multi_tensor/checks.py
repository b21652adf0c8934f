"""The kernels' contracts, as data, and a checker that raises ValueError or TypeError if a call breaks its contract.

The extension checks the same rules, but its refusal has no message. The checker runs after such a refusal, to raise an
error with a message, and before every kernel in plain torch.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, SupportsFloat, SupportsIndex

import torch
from torch import Tensor

from amp_patch.support.words import of_class

Tensors = Sequence[Tensor]
Number = float | Tensor
FP32, BF16, INT32, INT16 = (torch.float32,), (torch.bfloat16,), (torch.int32,), (torch.int16,)
SIGNED, UNSIGNED = (torch.int8,), (torch.uint8,)  # types of codes (`steps.multi_tensor_encode`)
CODES = (*SIGNED, *UNSIGNED)
BLOCK = 256  # the number of elements whose codes share a scale
LOW = (torch.float16, torch.bfloat16)
DTYPES = (*FP32, *LOW, torch.float64)
MOST_FACTORS = 2  # the most factors that a step multiplies gradients by


@dataclass(frozen=True, eq=False)  # eq=False: the checker's dicts hash these objects by identity, which is fast
class TensorList:
    """A list of tensors that a kernel takes.

    Attributes:
        name: the argument's name.
        dtypes: the types that a tensor of the list may have.
        written: the list is written in place; otherwise it is only read.
        optional: the list may be empty while other lists of the call are not.
        is_counts: each tensor has one element, and may be on the CPU while the other lists are on another device.
        weights: the name of the list with the weights of this list's masters. If a tensor of this list is int16, the
            low half of a split master, its weight in that list must be bfloat16. A bfloat16 tensor of this list is a
            weight without master, which is rounded stochastically.
        scales_of: the name of the list whose codes have their scales in this list. If a tensor of that list is not
            codes, the tensor of this list at its index has no elements.
    """

    name: str
    dtypes: tuple[torch.dtype, ...] = DTYPES
    written: bool = False
    optional: bool = False
    is_counts: bool = False
    weights: str = ""
    scales_of: str = ""

    @property
    def label(self) -> str:
        """Return the argument's name for messages."""
        return f"{self.name} of {self.scales_of}" if self.scales_of else self.name


@dataclass(frozen=True, eq=False)  # eq=False: as above
class Argument:
    """A scalar argument of a kernel: a tensor of one element on the lists' device, a number, or either.

    Attributes:
        name: the argument's name.
        dtypes: the types that a tensor may have; empty if no tensor is accepted.
        number: float, or int (32 bits); None if no number is accepted.
        written: the kernel writes the tensor in place.
        optional: None is accepted.
        several: the argument is a list or tuple of up to MOST_FACTORS scalars.
    """

    name: str
    dtypes: tuple[torch.dtype, ...] = ()
    number: type[float] | type[int] | None = None
    written: bool = False
    optional: bool = False
    several: bool = False


def number(name: str, several: bool = False) -> Argument:
    """Return an argument that is a float, or a float32 or float64 tensor of one element on the lists' device."""
    return Argument(name, (torch.float32, torch.float64), float, several=several)


def floats(*names: str) -> list[Argument]:
    """Return an `Argument` for each of `names`: a Python float, no tensor."""
    return [Argument(name, number=float) for name in names]


@dataclass(frozen=True)
class Contract:
    """The arguments of one kernel. All lists have one length, and the tensors at one index have one shape.

    Attributes:
        name: the kernel's function in Python.
        lists: the lists, in the order of the extension's function.
        arguments: the scalars after the lists. Arguments after these are not checked.
        lead: the index in `lists` of the list that the others are compared with.
        dense: the tensors at one index have one memory order, without gaps or overlaps, and no written tensor overlaps
            another. If False, strides are free, and a tensor may be both read and written.
        rounds: the last three arguments are a seed, draws and starts, for rounding bfloat16 tensors of the leading list
            stochastically.
    """

    name: str
    lists: tuple[TensorList, ...] = ()
    arguments: tuple[Argument, ...] = ()
    lead: int = 0
    dense: bool = False
    rounds: bool = False

    @cached_property
    def op(self) -> str:
        """Return the name of the kernel in the extension."""
        return self.name.removeprefix("multi_tensor_")

    def check(self, lists: Sequence[Any], arguments: Sequence[Any]) -> torch.device:
        """Raise ValueError or TypeError if a call breaks this contract; return the device of its tensors."""
        named = dict(zip(self.arguments, arguments, strict=False))
        # Flags (found_inf) decide the device of empty lists. Tensors given for numbers do not: they must be on it.
        flags = [value for argument, value in named.items() if argument.dtypes and argument.number is None]
        try:
            for wanted, tensors in zip(self.lists, lists, strict=True):
                _check_sequence(wanted.name, tensors)
            first = (t for t in (*(lists[self.lead] if lists else ()), *flags) if isinstance(t, Tensor))
            device = next((t.device for t in first), torch.device("cpu"))
            if lists:
                self._check_lists(dict(zip(self.lists, lists, strict=True)), device, flags)
            for argument, value in named.items():
                self._check_argument(argument, value, device)
            if self.rounds:
                _check_draws(self.lists[self.lead].name, lists[self.lead], *arguments[-3:])
        except (ValueError, TypeError) as error:
            raise type(error)(f"{self.name}: {error}") from None
        return device

    def _check_lists(self, lists: dict[TensorList, Tensors], device: torch.device, flags: Sequence[object]) -> None:
        lead = self.lists[self.lead]
        # The leading list is checked first: the others are compared with its tensors.
        given = {wanted: ts for wanted, ts in {lead: lists[lead], **lists}.items() if ts or not wanted.optional}
        for wanted, tensors in given.items():
            if len(tensors) != len(given[lead]):
                raise ValueError(f"{wanted.name} has {len(tensors)} tensors, {lead.name} has {len(given[lead])}")
        for wanted, tensors in given.items():
            if wanted.is_counts:
                self._check_counts(wanted, tensors, device, flags)
                continue
            if wanted.scales_of:
                continue
            for i, (t, first) in enumerate(zip(tensors, given[lead], strict=True)):
                which = f"tensor {i} of {wanted.name}"
                _check_tensor(which, t, device, f"tensor 0 of {lead.name}", wanted.dtypes)
                _check_alike(which, t, "its parameter" if self.dense else lead.name, first)
                if self.dense:
                    _check_strides(which, t, first)
                if wanted.written:
                    self._check_unrecorded(which, t)
        self._check_scales({wanted.label: tensors for wanted, tensors in lists.items()}, device)
        outs = {wanted.label: tensors for wanted, tensors in given.items() if wanted.written}
        if self.dense:
            _check_apart(outs, {wanted.name: tensors for wanted, tensors in given.items() if not wanted.written})
        else:
            _check_places(outs, {wanted.name: tensors for wanted, tensors in given.items()})
            _check_apart(outs, {})
        if lead.weights:
            _check_halves(
                lead, given[lead], next((ts for wanted, ts in given.items() if wanted.name == lead.weights), ())
            )

    def _check_scales(self, lists: dict[str, Tensors], device: torch.device) -> None:
        """Raise unless each tensor of codes has a tensor of scales, with one scale for each block of elements."""
        for wanted in (wanted for wanted in self.lists if wanted.scales_of):
            states, scales = lists[wanted.scales_of], lists[wanted.label]
            for i, state in enumerate(states):
                if state.dtype not in CODES:
                    continue
                which = f"tensor {i} of {wanted.label}"
                if i >= len(scales):
                    raise ValueError(f"tensor {i} of {wanted.scales_of} is codes, and scales has none for it")
                _check_tensor(which, scales[i], device, f"tensor {i} of {wanted.scales_of}", FP32)
                count = -(-state.numel() // BLOCK)
                if scales[i].shape != (count,) or not scales[i].is_contiguous():
                    raise ValueError(
                        f"{which} has shape {list(scales[i].shape)}, [{count}] is wanted, contiguous: one scale for "
                        f"{BLOCK} of {state.numel()} elements"
                    )
                if wanted.written:
                    self._check_unrecorded(which, scales[i])

    def _check_counts(self, wanted: TensorList, counts: Tensors, device: torch.device, flags: Sequence[object]) -> None:
        """Raise unless the counts are all on the lists' device, or all on the CPU and no found_inf is given."""
        first = counts[0] if counts else None
        where = first.device if isinstance(first, Tensor) and first.device.type == "cpu" else device
        for i, count in enumerate(counts):
            self._check_one(f"tensor {i} of {wanted.name}", count, where, wanted.dtypes, wanted.written)
        if counts and where != device and any(flag is not None for flag in flags):
            raise ValueError(
                f"steps are on the CPU, found_inf is on {device}: steps that it may leave as they are must be there too"
            )

    def _check_argument(self, wanted: Argument, value: Any, device: torch.device) -> None:
        label = wanted.name
        if wanted.several:
            _check_sequence(label, value)
            if len(value) > MOST_FACTORS:
                raise ValueError(f"there are {len(value)} {label}, two at most are wanted: multiply some together")
            for k, factor in enumerate(value):
                self._check_argument(number(f"factor {k}"), factor, device)
        elif wanted.optional and value is None:
            return
        elif wanted.dtypes and (wanted.number is None or isinstance(value, Tensor)):
            self._check_one(label, value, device, wanted.dtypes, wanted.written)
        elif wanted.number is int:
            if not isinstance(value, (int, SupportsIndex)) or not -(2**31) <= operator.index(value) < 2**31:
                raise TypeError(f"{label} is {value!r}, an int of 32 bits is wanted")
        elif not _is_number(value):
            if not wanted.dtypes:
                raise TypeError(f"{label} is {value!r}, a float is wanted")
            choices = f"a float is wanted, or a float32 or float64 tensor of one element on {device}"
            choices = "a float or a tensor of one is wanted" if self.dense else choices
            raise TypeError(f"{label} is {of_class(value)}, {choices}")

    def _check_one(
        self, which: str, t: object, device: torch.device, dtypes: tuple[torch.dtype, ...], written: bool
    ) -> None:
        """Raise unless `t` is a plain tensor of one element, on `device` and of one of `dtypes`."""
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        wanted = f"a {names} tensor of one element on {device}"
        if not isinstance(t, Tensor):
            raise TypeError(f"{which} is {of_class(t)}, {wanted} is wanted")
        if t.dtype not in dtypes or t.numel() != 1 or t.device != device or t.layout is not torch.strided or t.is_neg():
            lazy = "lazily negated " if t.is_neg() else ""
            raise ValueError(
                f"{which} is a {lazy}{t.dtype} tensor of shape {list(t.shape)} on {t.device}, {wanted} is wanted"
            )
        if _is_wrapper(t) or not _has_memory(t):
            raise TypeError(f"{which} is {of_class(t)} without memory of its own, {wanted} is wanted")
        if written:
            self._check_unrecorded(which, t)

    def _check_unrecorded(self, which: str, written: Tensor) -> None:
        """Raise if `written` requires grad and grad mode is on: autograd would not record the write."""
        if written.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{which} requires grad, and autograd would not see the write: call {self.name} under torch.no_grad()"
            )


def _check_sequence(label: str, tensors: object) -> None:
    if not isinstance(tensors, (list, tuple)):
        raise TypeError(f"{label} is {of_class(tensors)}, a list or tuple of tensors is wanted")


def _check_tensor(which: str, t: object, device: torch.device, first: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise unless `t` is a plain tensor of one of `dtypes` on `device`; `first` names the tensor that decided it."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{which} is {of_class(t)}, a tensor is wanted")
    if t.layout is torch.sparse_coo:
        raise TypeError(
            f"{which} is sparse ({t.layout}), a dense one is wanted: hand over its coalesced values "
            "(`t.coalesce().values()`)"
        )
    if t.layout is not torch.strided:
        raise TypeError(
            f"{which} is {t.layout}, a dense one is wanted: hand over its values (`t.values()`) or a dense copy"
        )
    if _is_wrapper(t):
        raise TypeError(
            f"{which} is {of_class(t)}, a plain tensor is wanted: hand over the one inside it "
            "(`t.to_local()` of a DTensor)"
        )
    if t.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        wanted = f"one of {names}" if len(dtypes) > 1 else names
        raise TypeError(f"{which} is {t.dtype}, {wanted} is wanted: convert it or leave it out")
    if not _has_memory(t):
        raise TypeError(
            f"{which} has no memory of its own (nested, a lazy zero, seen through torch.func, or its storage "
            "was freed), a plain tensor is wanted: hand over a copy (`t.clone()`), or call this outside the transform"
        )
    if t.is_neg():
        raise ValueError(f"{which} is a lazily negated view, call `.resolve_neg()` on it first")
    if t.device.type != "meta" and t.numel() and t.untyped_storage().nbytes() < _end(t) * t.element_size():
        raise ValueError(
            f"{which} has shape {list(t.shape)} but its storage holds {t.untyped_storage().nbytes()} bytes: "
            "its memory was given back (a sharded parameter outside its forward?), hand over tensors that have theirs"
        )
    if t.device != device:
        raise ValueError(
            f"{which} is on {t.device}, {first} on {device}: one call takes one device, group the tensors by device"
        )


def _end(t: Tensor) -> int:
    """Return the number of elements from the start of the storage to the last element of `t`, included."""
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return int(t.storage_offset() + last + 1)


def _is_wrapper(t: Tensor) -> bool:
    """Tell whether `t` is of a subclass with its own `__torch_dispatch__`, such as a DTensor."""
    return type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__


def _has_memory(t: Tensor) -> bool:
    """Tell whether `t` has a storage with its elements, which a kernel can read."""
    if t.is_nested or t._is_zerotensor() or torch._is_functional_tensor(t):
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(t):
        return False
    # `data_ptr()` is not used here, because it materializes a copy-on-write tensor.
    return t.device.type not in ("cpu", "cuda") or not t.numel() or t.untyped_storage().nbytes() != 0


def _check_alike(which: str, t: Tensor, of: str, first: Tensor) -> None:
    """Raise unless `t` has the shape of `first`, and both or neither are float64. `of` names `first` in the error."""
    if t.shape != first.shape:
        raise ValueError(f"{which} has shape {list(t.shape)}, {of} has {list(first.shape)}")
    if (t.dtype == torch.float64) != (first.dtype == torch.float64):
        raise TypeError(
            f"{which} is {t.dtype}, {of} has {first.dtype}: float64 stays float64, convert one of the two first"
        )


def _check_strides(which: str, t: Tensor, param: Tensor) -> None:
    if t.is_contiguous() and param.is_contiguous():
        return
    came = f"{which} has strides {list(t.stride())}"
    if not torch.ops.aten.is_non_overlapping_and_dense(t):
        raise ValueError(f"{came}, with gaps or overlaps: a dense tensor is wanted, hand over a `.clone()`")
    if any(size != 1 and a != b for size, a, b in zip(t.shape, t.stride(), param.stride(), strict=True)):
        raise ValueError(
            f"{came}, its parameter has {list(param.stride())}: one memory order is wanted, hand over a copy in the "
            "parameter's"
        )


def _check_draws(name: str, tensors: Tensors, seed: object, draws: object, starts: object) -> None:
    """Raise unless `draws` and `starts` are empty or have one int for each tensor; bfloat16 tensors require draws."""
    if not _is_int64(seed):
        raise TypeError(f"seed is {seed!r}, an int of 64 bits is wanted")
    for what, numbers in (("draws", draws), ("starts", starts)):
        if not isinstance(numbers, (list, tuple)) or not all(map(_is_int64, numbers)):
            raise TypeError(f"{what} is {numbers!r}, a list or tuple of ints of 64 bits is wanted")
        if numbers and len(numbers) != len(tensors):
            raise ValueError(f"there are {len(numbers)} {what}, {name} has {len(tensors)} tensors: one each is wanted")
        if what == "starts" and min(numbers, default=0) < 0:
            raise ValueError(f"starts is {numbers!r}, places of elements from 0 on are wanted")
    for i, t in enumerate(tensors):
        if t.dtype == torch.bfloat16 and not draws:
            raise ValueError(
                f"tensor {i} of {name} is torch.bfloat16, to be rounded stochastically, and there are no draws: hand "
                "over a seed and a draw for each tensor"
            )


def _is_int64(value: object) -> bool:
    return isinstance(value, int) and -(2**63) <= value < 2**63


def _check_halves(halves: TensorList, tensors: Tensors, weights: Tensors) -> None:
    """Raise if an int16 tensor (a low half) has no bfloat16 weight in `weights`, or a bfloat16 tensor has a weight."""
    for i, t in enumerate(tensors):
        if t.dtype == torch.bfloat16 and weights:
            raise TypeError(
                f"tensor {i} of {halves.name} is torch.bfloat16, a weight without master, and {halves.weights} has "
                f"another: hand over None for {halves.weights}"
            )
        weight = weights[i].dtype if weights else None
        if t.dtype == torch.int16 and weight != torch.bfloat16:
            raise TypeError(
                f"tensor {i} of {halves.name} is torch.int16, half of a split master, and its weight in "
                f"{halves.weights} is {weight}: bfloat16 is wanted"
            )


def _is_number(value: object) -> bool:
    """Tell whether `float` and the extension accept `value`: an int, NumPy's numbers, a Fraction, but no text."""
    try:
        # `float` and `int` are tested first, because the test of a protocol takes microseconds.
        return isinstance(value, (float, int, SupportsFloat, SupportsIndex)) and (float(value), True)[1]
    except (TypeError, ValueError, OverflowError):  # an array of many elements, an int past 1.8e308
        return False


def _overlap(t: Tensor, out: Tensor) -> bool:
    """Tell whether `out` overlaps `t` in memory, for tensors where this is cheap to decide.

    False if both are exactly the same elements, or if one of them has gaps.
    """
    if t is out or not t.numel() or t.is_meta:
        return False
    if t.data_ptr() == out.data_ptr() and t.dtype == out.dtype and t.stride() == out.stride():
        return False
    if not all(torch.ops.aten.is_non_overlapping_and_dense(x) for x in (t, out)):
        return False
    ends = [x.data_ptr() + x.numel() * x.element_size() for x in (t, out)]
    return t.data_ptr() < ends[1] and out.data_ptr() < ends[0]


def _check_places(outs: Mapping[str, Tensors], lists: Mapping[str, Tensors]) -> None:
    """Raise if an output overlaps itself, or overlaps a tensor at its index partly. The keys are names of lists."""
    for name, tensors in outs.items():
        for i, out in enumerate(tensors):
            if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True)):
                raise ValueError(
                    f"tensor {i} of {name} overlaps itself (an expanded tensor, strides {list(out.stride())}): it "
                    "cannot be written, hand over a `.clone()`"
                )
            for other, read in lists.items():
                if _overlap(read[i], out):
                    raise ValueError(
                        f"tensor {i} of {name} overlaps tensor {i} of {other} in memory: they must be the same "
                        "elements or apart, hand over a `.clone()`"
                    )


def _check_apart(outs: Mapping[str, Tensors], read: Mapping[str, Tensors]) -> None:
    """Raise if an output shares memory with another output or with a tensor of `read`. The keys are names of lists."""

    # The number of elements from `data_ptr()` on that certainly belong to `t`: 1 if `t` has gaps.
    def known(t: Tensor) -> int:
        return t.numel() if torch.ops.aten.is_non_overlapping_and_dense(t) else 1

    def spans(lists: Mapping[str, Tensors], is_read: bool) -> list[tuple[int, int, bool, tuple[str, int]]]:
        return [
            (t.data_ptr(), t.data_ptr() + known(t) * t.element_size(), is_read, (label, i))
            for label, tensors in lists.items()
            for i, t in enumerate(tensors)
            if t.numel() and not t.is_meta
        ]

    ends = {False: 0, True: 0}  # is_read -> the highest end of a span so far
    last = {False: ("", 0), True: ("", 0)}  # is_read -> (list, index) of that span
    for begin, end, is_read, place in sorted(spans(outs, False) + spans(read, True)):
        for other in (False, True):
            if begin < ends[other] and not (is_read and other):
                (a, i), (b, j) = sorted((last[other], place))
                both = f"tensors {i} and {j} of {a} overlap" if a == b else f"tensor {i} of {a} overlaps {j} of {b}"
                raise ValueError(f"{both} in memory: hand over each element once")
        if end > ends[is_read]:
            ends[is_read], last[is_read] = end, place
