"""The kernels' contracts, as data, and a checker that raises ValueError or TypeError if a call breaks its contract.

The extension checks the same rules, but its refusal has no message. The checker runs after such a refusal, to raise an
error with a message, and before every kernel in plain torch.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, SupportsFloat, SupportsIndex

import torch
from torch import Tensor

from amp_patch.support.words import of_class

Tensors = Sequence[Tensor]
Number = float | Tensor
FP32, BF16, INT32, INT16 = (torch.float32,), (torch.bfloat16,), (torch.int32,), (torch.int16,)
# Types of codes (`steps.multi_tensor_encode`).
SIGNED, UNSIGNED, KEPT = (torch.int8,), (torch.uint8,), (torch.float8_e4m3fn,)
CODES = (*SIGNED, *UNSIGNED, *KEPT)
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
        rounds: the last two arguments are a seed and draws, for rounding bfloat16 tensors of the leading list
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
        given, named = dict(zip(self.lists, lists, strict=True)), list(zip(self.arguments, arguments, strict=False))
        # Flags (found_inf) decide the device of empty lists. Tensors given for numbers do not: they must be on it.
        flags = [value for wanted, value in named if wanted.dtypes and wanted.number is None and value is not None]
        try:
            for wanted, tensors in given.items():
                _check_sequence(wanted.name, tensors)
            leading = lists[self.lead] if lists else ()
            device = next((t.device for t in (*leading, *flags) if isinstance(t, Tensor)), torch.device("cpu"))
            if lists:
                self._check_lists(given, device, bool(flags))
            for wanted_argument, value in named:
                self._check_argument(wanted_argument, value, device)
            if self.rounds:
                _check_draws(self.lists[self.lead].name, leading, *arguments[-2:])
        except (TypeError, ValueError) as error:
            raise type(error)(f"{self.name}: {error}") from None
        return device

    def _check_lists(self, given: dict[TensorList, Tensors], device: torch.device, has_flag: bool) -> None:
        lead = self.lists[self.lead]
        # The leading list is checked first: the others are compared with its tensors.
        lists = {wanted: ts for wanted, ts in {lead: given[lead], **given}.items() if ts or not wanted.optional}
        by_name = {wanted.label: tensors for wanted, tensors in lists.items()}
        for name, tensors in by_name.items():
            if len(tensors) != len(given[lead]):
                raise ValueError(f"{name} has {len(tensors)} tensors, {lead.name} has {len(given[lead])}")
        for wanted, tensors in lists.items():
            # Counts are all on the lists' device, or all on the CPU if no found_inf is given.
            on_host = wanted.is_counts and isinstance(tensors[0], Tensor) and tensors[0].device.type == "cpu"
            for i, (t, first) in enumerate(zip(tensors, by_name.get(wanted.scales_of, given[lead]), strict=True)):
                which = f"tensor {i} of {wanted.label}"
                if wanted.is_counts:
                    _check_one(which, t, torch.device("cpu") if on_host else device, wanted.dtypes)
                elif not wanted.scales_of:
                    _check_tensor(which, t, device, f"tensor 0 of {lead.name}", wanted.dtypes)
                    _check_pair(which, t, "its parameter" if self.dense else lead.name, first, self.dense)
                elif first.dtype in CODES or not isinstance(t, Tensor):
                    _check_tensor(which, t, device, f"tensor {i} of {wanted.scales_of}", FP32)
                    if (count := -(-first.numel() // BLOCK)) != t.numel() or t.dim() != 1 or not t.is_contiguous():
                        raise ValueError(f"{which} has shape {list(t.shape)}, [{count}] is wanted, contiguous")
                if wanted.written:
                    _check_output(which, t, self.name)
            if on_host and device.type != "cpu" and has_flag:
                raise ValueError(f"{wanted.name} are on the CPU, found_inf is on {device}: they must be there too")
        for wanted in self.lists:
            for i, state in enumerate(by_name.get(wanted.scales_of, ())):
                if state.dtype in CODES and wanted.label not in by_name:
                    raise ValueError(f"tensor {i} of {wanted.scales_of} is codes, and scales has none for it")
        for i, t in enumerate(given[lead] if lead.weights else ()):
            _check_halves(f"tensor {i} of {lead.name}", t, lead.weights, by_name.get(lead.weights, ())[i : i + 1])
        if outputs := {wanted.label for wanted in lists if wanted.written}:  # if not, lazy copies must stay lazy
            _check_overlaps(by_name, outputs, self.dense)

    def _check_argument(self, wanted: Argument, value: Any, device: torch.device) -> None:
        name = wanted.name
        if wanted.several:
            _check_sequence(name, value)
            if len(value) > MOST_FACTORS:
                raise ValueError(f"there are {len(value)} {name}, two at most are wanted: multiply some together")
            for k, each in enumerate(value):
                self._check_argument(number(f"factor {k}"), each, device)
        elif wanted.optional and value is None:
            return
        elif wanted.dtypes and (wanted.number is None or isinstance(value, Tensor)):
            _check_one(name, value, device, wanted.dtypes)
            if wanted.written:
                _check_output(name, value, self.name)
        elif wanted.number is int:
            if not isinstance(value, SupportsIndex) or not -(2**31) <= operator.index(value) < 2**31:
                raise TypeError(f"{name} is {value!r}, an int of 32 bits is wanted")
        elif not _is_number(value):
            came = of_class(value) if wanted.dtypes else repr(value)
            tensor = f", or a float32 or float64 tensor of one element on {device}" if wanted.dtypes else ""
            raise TypeError(f"{name} is {came}, a float is wanted{tensor}")


# The checks of one value: each raises an error that begins with the name of the value.


def _check_sequence(name: str, tensors: object) -> None:
    if not isinstance(tensors, (list, tuple)):
        raise TypeError(f"{name} is {of_class(tensors)}, a list or tuple of tensors is wanted")


def _names(dtypes: Iterable[torch.dtype], between: str) -> str:
    return between.join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _check_one(name: str, t: object, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise unless `t` is a plain tensor of one element, on `device` and of one of `dtypes`."""
    wanted = f"a {_names(dtypes, ' or ')} tensor of one element on {device} is wanted"
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} is {of_class(t)}, {wanted}")
    if t.dtype not in dtypes or t.numel() != 1 or t.device != device or t.layout is not torch.strided or t.is_neg():
        lazy = "lazily negated " if t.is_neg() else ""
        raise ValueError(f"{name} is a {lazy}{t.dtype} tensor of shape {list(t.shape)} on {t.device}, {wanted}")
    if _is_wrapper(t) or _is_void(t):
        raise TypeError(f"{name} is {of_class(t)} without memory of its own, {wanted}")


def _check_tensor(name: str, t: object, device: torch.device, first: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise unless `t` is a plain tensor of one of `dtypes` on `device`, where `first` is."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} is {of_class(t)}, a tensor is wanted")
    if t.layout is not torch.strided:
        wanted = "a dense one is wanted: hand over its coalesced values (`t.coalesce().values()`), or a dense copy"
        raise TypeError(f"{name} is {t.layout}, {wanted}")
    if _is_wrapper(t):
        wanted = "a plain tensor is wanted: hand over the one inside it (`t.to_local()` of a DTensor)"
        raise TypeError(f"{name} is {of_class(t)}, {wanted}")
    if t.dtype not in dtypes:
        one_of = "one of " if len(dtypes) > 1 else ""
        raise TypeError(f"{name} is {t.dtype}, {one_of}{_names(dtypes, ', ')} is wanted: convert it or leave it out")
    if _is_void(t):
        wanted = "a plain tensor is wanted: hand over a copy (`t.clone()`), or call this outside of torch.func"
        raise TypeError(f"{name} has no memory of its own (nested, a lazy zero, of torch.func, or freed), {wanted}")
    if t.is_neg():
        raise ValueError(f"{name} is a lazily negated view, call `.resolve_neg()` on it first")
    end = t.storage_offset() + 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    if t.device.type != "meta" and t.numel() and t.untyped_storage().nbytes() < end * t.element_size():
        came = f"has shape {list(t.shape)} but its storage holds {t.untyped_storage().nbytes()} bytes"
        raise ValueError(f"{name} {came}: its memory was given back, hand over tensors that have theirs")
    if t.device != device:
        way_out = "one call takes one device, group the tensors by device"
        raise ValueError(f"{name} is on {t.device}, {first} on {device}: {way_out}")


def _is_wrapper(t: Tensor) -> bool:
    """Tell whether `t` is of a subclass with its own `__torch_dispatch__`, such as a DTensor."""
    return type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__


def _is_void(t: Tensor) -> bool:
    """Tell whether `t` has no storage with its elements, which a kernel could read."""
    if t.is_nested or t._is_zerotensor() or torch._is_functional_tensor(t):
        return True
    if torch._C._functorch.is_functorch_wrapped_tensor(t):
        return True
    # `data_ptr()` is not used here, because it materializes a copy-on-write tensor.
    return t.device.type in ("cpu", "cuda") and t.numel() != 0 and t.untyped_storage().nbytes() == 0


def _check_pair(name: str, t: Tensor, of: str, first: Tensor, dense: bool) -> None:
    """Raise unless `t` has the shape, kind of type and memory order of `first`, which is called `of`."""
    if t.shape != first.shape:
        raise ValueError(f"{name} has shape {list(t.shape)}, {of} has {list(first.shape)}")
    if (t.dtype == torch.float64) != (first.dtype == torch.float64):
        way_out = "float64 stays float64, convert one of the two first"
        raise TypeError(f"{name} is {t.dtype}, {of} has {first.dtype}: {way_out}")
    differ = any(size != 1 and a != b for size, a, b in zip(t.shape, t.stride(), first.stride(), strict=True))
    if dense and (differ or not torch.ops.aten.is_non_overlapping_and_dense(t)):
        wanted = "one memory order without gaps or overlaps is wanted, hand over a copy in the parameter's"
        raise ValueError(f"{name} has strides {list(t.stride())}, {of} has {list(first.stride())}: {wanted}")


def _check_output(name: str, t: Tensor, kernel: str) -> None:
    if any(size > 1 and stride == 0 for size, stride in zip(t.shape, t.stride(), strict=True)):
        came = f"{name} overlaps itself (an expanded tensor, strides {list(t.stride())})"
        raise ValueError(f"{came}: it cannot be written, hand over a `.clone()`")
    if t.requires_grad and torch.is_grad_enabled():
        way_out = f"call {kernel} under torch.no_grad()"
        raise ValueError(f"{name} requires grad, and autograd would not see the write: {way_out}")


def _check_halves(name: str, t: Tensor, low: str, weights: Tensors) -> None:
    """Raise if `t` is int16 (a low half) without a bfloat16 weight, or bfloat16 with a weight."""
    came = weights[0].dtype if weights else None
    if t.dtype == torch.bfloat16 and weights:
        raise TypeError(f"{name} is torch.bfloat16, a weight without master: None is wanted for {low}")
    if t.dtype == torch.int16 and came != torch.bfloat16:
        wanted = f"its weight in {low} is {came}: bfloat16 is wanted"
        raise TypeError(f"{name} is torch.int16, half of a split master, and {wanted}")


def _check_draws(name: str, tensors: Tensors, seed: object, draws: Any) -> None:
    """Raise unless `draws` is empty or has one int for each tensor; bfloat16 requires draws."""
    for what, numbers in (("seed", [seed]), ("draws", draws)):
        if not isinstance(numbers, (list, tuple)) or not all(map(_is_int64, numbers)):
            raise TypeError(f"{what} is {numbers!r}, a list or tuple of ints of 64 bits is wanted")
    if draws and len(draws) != len(tensors):
        raise ValueError(f"there are {len(draws)} draws, {name} has {len(tensors)} tensors: one each is wanted")
    if not draws and any(t.dtype == torch.bfloat16 for t in tensors):
        raise ValueError(f"{name} has bfloat16 tensors, to be rounded stochastically: a seed and draws are wanted")


def _is_int64(value: object) -> bool:
    return isinstance(value, int) and -(2**63) <= value < 2**63


def _is_number(value: object) -> bool:
    """Tell whether `float` and the extension accept `value`: an int, NumPy's numbers, a Fraction, but no text."""
    try:
        # `float` and `int` are tested first, because the test of a protocol takes microseconds.
        return isinstance(value, (float, int, SupportsFloat, SupportsIndex)) and (float(value), True)[1]
    except (TypeError, ValueError, OverflowError):  # an array of many elements, an int past 1.8e308
        return False


def _check_overlaps(lists: Mapping[str, Tensors], outputs: set[str], dense: bool) -> None:
    """Raise if an output shares memory with another output, or with a tensor that is read.

    If not `dense`, an output is compared only with the tensors that are read at its index. It may have exactly their
    elements. Of an output with gaps, only the first element is known.
    """
    is_dense = torch.ops.aten.is_non_overlapping_and_dense
    spans = sorted(
        (t.data_ptr(), t.data_ptr() + (t.numel() if is_dense(t) else 1) * t.element_size(), name, i)
        for name, tensors in lists.items()
        for i, t in enumerate(tensors)
        if t.numel() and not t.is_meta and (name in outputs or is_dense(t))
    )
    begun: list[tuple[int, str, int]] = []  # (end, name, index) of each span that reaches beyond the present begin
    for begin, end, name, i in spans:
        begun = [span for span in begun if span[0] > begin]
        for _, other, j in begun:
            (a, k), (b, m) = sorted(((other, j), (name, i)))
            one_written = {a, b} & outputs and (dense or (k == m and not _may_be_both(lists[a][k], lists[b][k])))
            if one_written or {a, b} <= outputs:
                pair = f"tensors {k} and {m} of {a} overlap" if a == b else f"tensor {k} of {a} overlaps {m} of {b}"
                raise ValueError(f"{pair} in memory: hand over each element once, or a `.clone()`")
        begun.append((end, name, i))


def _may_be_both(one: Tensor, other: Tensor) -> bool:
    """Tell whether tensors that overlap are the same elements, or one has gaps, where this is expensive to decide."""
    if not all(map(torch.ops.aten.is_non_overlapping_and_dense, (one, other))):
        return True
    return one.data_ptr() == other.data_ptr() and one.dtype == other.dtype and one.stride() == other.stride()
