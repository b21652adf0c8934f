"""The kernels' contracts, as data, and a checker that raises ValueError or TypeError if a call breaks its contract.

The extension checks the same rules, but its refusal has no message. The checker runs after such a refusal, to raise an
error with a message, and before every kernel in plain torch.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, SupportsFloat, SupportsIndex

import torch
from torch import Tensor

from amp_patch.support.words import of_class

Tensors = Sequence[Tensor]
Number = float | Tensor
Error = ValueError | TypeError | None  # None: the value is accepted
Errors = Iterator[tuple[str, Error]]  # (the name of an argument or tensor, an error that begins behind this name)
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
        given, named = dict(zip(self.lists, lists, strict=True)), list(zip(self.arguments, arguments, strict=False))
        self._raise_first((wanted.name, _of_sequence(tensors)) for wanted, tensors in given.items())
        # Flags (found_inf) decide the device of empty lists. Tensors given for numbers do not: they must be on it.
        flags = [value for wanted, value in named if wanted.dtypes and wanted.number is None and value is not None]
        leading = lists[self.lead] if lists else ()
        device = next((t.device for t in (*leading, *flags) if isinstance(t, Tensor)), torch.device("cpu"))
        if lists:
            self._raise_first(self._of_lists(given, device, bool(flags)))
        self._raise_first(self._of_arguments(named, device))
        if self.rounds:
            self._raise_first(_of_draws(self.lists[self.lead].name, leading, *arguments[-3:]))
        return device

    def _raise_first(self, errors: Iterable[tuple[str, Error]]) -> None:
        for name, error in errors:
            if error is not None:
                raise type(error)(f"{self.name}: {name} {error}")

    def _of_lists(self, given: dict[TensorList, Tensors], device: torch.device, has_flag: bool) -> Errors:
        lead = self.lists[self.lead]
        # The leading list is checked first: the others are compared with its tensors.
        lists = {wanted: ts for wanted, ts in {lead: given[lead], **given}.items() if ts or not wanted.optional}
        by_name = {wanted.label: tensors for wanted, tensors in lists.items()}
        for name, tensors in by_name.items():
            if len(tensors) != len(given[lead]):
                yield name, ValueError(f"has {len(tensors)} tensors, {lead.name} has {len(given[lead])}")
        for wanted, tensors in lists.items():
            # Counts are all on the lists' device, or all on the CPU if no found_inf is given.
            on_host = wanted.is_counts and isinstance(tensors[0], Tensor) and tensors[0].device.type == "cpu"
            for i, (t, first) in enumerate(zip(tensors, by_name.get(wanted.scales_of, given[lead]), strict=True)):
                which = f"tensor {i} of {wanted.label}"
                if wanted.is_counts:
                    yield which, _of_one(t, torch.device("cpu") if on_host else device, wanted.dtypes)
                elif not wanted.scales_of:
                    yield which, _of_tensor(t, device, f"tensor 0 of {lead.name}", wanted.dtypes)
                    yield which, _of_pair(t, "its parameter" if self.dense else lead.name, first, self.dense)
                elif first.dtype in CODES or not isinstance(t, Tensor):
                    yield which, _of_tensor(t, device, f"tensor {i} of {wanted.scales_of}", FP32)
                    yield which, _of_scales(t, first)
                yield which, self._of_output(t) if wanted.written else None
            if on_host and device.type != "cpu" and has_flag:
                reason = "steps that it may leave as they are must be there too"
                yield wanted.name, ValueError(f"are on the CPU, found_inf is on {device}: {reason}")
        for wanted in self.lists:
            for i, state in enumerate(by_name.get(wanted.scales_of, ())):
                if state.dtype in CODES and wanted.label not in by_name:
                    yield f"tensor {i} of {wanted.scales_of}", ValueError("is codes, and scales has none for it")
        for i, t in enumerate(given[lead] if lead.weights else ()):
            yield f"tensor {i} of {lead.name}", _of_halves(t, lead.weights, by_name.get(lead.weights, ())[i : i + 1])
        if outputs := {wanted.label for wanted in lists if wanted.written}:  # if not, lazy copies must stay lazy
            yield from _of_overlaps(by_name, outputs, self.dense)

    def _of_arguments(self, arguments: Iterable[tuple[Argument, Any]], device: torch.device) -> Errors:
        for wanted, value in arguments:
            name = wanted.name
            if wanted.several:
                yield name, _of_sequence(value)
                if len(value) > MOST_FACTORS:
                    wanted_count = "two at most are wanted: multiply some together"
                    yield "there", ValueError(f"are {len(value)} {name}, {wanted_count}")
                yield from self._of_arguments(((number(f"factor {k}"), each) for k, each in enumerate(value)), device)
            elif wanted.optional and value is None:
                continue
            elif wanted.dtypes and (wanted.number is None or isinstance(value, Tensor)):
                yield name, _of_one(value, device, wanted.dtypes)
                yield name, self._of_output(value) if wanted.written else None
            elif wanted.number is int:
                if not isinstance(value, SupportsIndex) or not -(2**31) <= operator.index(value) < 2**31:
                    yield name, TypeError(f"is {value!r}, an int of 32 bits is wanted")
            elif not _is_number(value):
                came = of_class(value) if wanted.dtypes else repr(value)
                tensor = f", or a float32 or float64 tensor of one element on {device}" if wanted.dtypes else ""
                yield name, TypeError(f"is {came}, a float is wanted{tensor}")

    def _of_output(self, t: Tensor) -> Error:
        if any(size > 1 and stride == 0 for size, stride in zip(t.shape, t.stride(), strict=True)):
            way_out = "it cannot be written, hand over a `.clone()`"
            return ValueError(f"overlaps itself (an expanded tensor, strides {list(t.stride())}): {way_out}")
        if not t.requires_grad or not torch.is_grad_enabled():
            return None
        way_out = f"call {self.name} under torch.no_grad()"
        return ValueError(f"requires grad, and autograd would not see the write: {way_out}")


def _of_sequence(tensors: object) -> Error:
    if isinstance(tensors, (list, tuple)):
        return None
    return TypeError(f"is {of_class(tensors)}, a list or tuple of tensors is wanted")


def _names(dtypes: Iterable[torch.dtype], between: str) -> str:
    return between.join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _of_one(t: object, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> Error:
    """Return the error unless `t` is a plain tensor of one element, on `device` and of one of `dtypes`."""
    wanted = f"a {_names(dtypes, ' or ')} tensor of one element on {device} is wanted"
    if not isinstance(t, Tensor):
        return TypeError(f"is {of_class(t)}, {wanted}")
    if t.dtype not in dtypes or t.numel() != 1 or t.device != device or t.layout is not torch.strided or t.is_neg():
        lazy = "lazily negated " if t.is_neg() else ""
        return ValueError(f"is a {lazy}{t.dtype} tensor of shape {list(t.shape)} on {t.device}, {wanted}")
    return TypeError(f"is {of_class(t)} without memory of its own, {wanted}") if _is_wrapper(t) or _is_void(t) else None


def _of_tensor(t: object, device: torch.device, first: str, dtypes: tuple[torch.dtype, ...]) -> Error:
    """Return the error unless `t` is a plain tensor of one of `dtypes` on `device`, where `first` is."""
    if not isinstance(t, Tensor):
        return TypeError(f"is {of_class(t)}, a tensor is wanted")
    if t.layout is not torch.strided:
        wanted = "a dense one is wanted: hand over its coalesced values (`t.coalesce().values()`), or a dense copy"
        return TypeError(f"is {t.layout}, {wanted}")
    if _is_wrapper(t):
        wanted = "a plain tensor is wanted: hand over the one inside it (`t.to_local()` of a DTensor)"
        return TypeError(f"is {of_class(t)}, {wanted}")
    if t.dtype not in dtypes:
        one_of = "one of " if len(dtypes) > 1 else ""
        return TypeError(f"is {t.dtype}, {one_of}{_names(dtypes, ', ')} is wanted: convert it or leave it out")
    if _is_void(t):
        wanted = "a plain tensor is wanted: hand over a copy (`t.clone()`), or call this outside of torch.func"
        return TypeError(f"has no memory of its own (nested, a lazy zero, of torch.func, or freed), {wanted}")
    if t.is_neg():
        return ValueError("is a lazily negated view, call `.resolve_neg()` on it first")
    end = t.storage_offset() + 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    if t.device.type != "meta" and t.numel() and t.untyped_storage().nbytes() < end * t.element_size():
        came = f"has shape {list(t.shape)} but its storage holds {t.untyped_storage().nbytes()} bytes"
        why = "its memory was given back (a sharded parameter outside its forward?)"
        return ValueError(f"{came}: {why}, hand over tensors that have theirs")
    if t.device != device:
        way_out = "one call takes one device, group the tensors by device"
        return ValueError(f"is on {t.device}, {first} on {device}: {way_out}")
    return None


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


def _of_pair(t: Tensor, of: str, first: Tensor, dense: bool) -> Error:
    """Return the error unless `t` has the shape, kind of type and memory order of `first`, which is called `of`."""
    if t.shape != first.shape:
        return ValueError(f"has shape {list(t.shape)}, {of} has {list(first.shape)}")
    if (t.dtype == torch.float64) != (first.dtype == torch.float64):
        return TypeError(f"is {t.dtype}, {of} has {first.dtype}: float64 stays float64, convert one of the two first")
    if not dense or (t.is_contiguous() and first.is_contiguous()):
        return None
    differ = any(size != 1 and a != b for size, a, b in zip(t.shape, t.stride(), first.stride(), strict=True))
    if not differ and torch.ops.aten.is_non_overlapping_and_dense(t):
        return None
    wanted = "one memory order without gaps or overlaps is wanted, hand over a copy in the parameter's"
    return ValueError(f"has strides {list(t.stride())}, {of} has {list(first.stride())}: {wanted}")


def _of_scales(scales: Tensor, codes: Tensor) -> Error:
    count = -(-codes.numel() // BLOCK)
    if scales.shape == (count,) and scales.is_contiguous():
        return None
    wanted = f"[{count}] is wanted, contiguous: one scale for {BLOCK} of {codes.numel()} elements"
    return ValueError(f"has shape {list(scales.shape)}, {wanted}")


def _of_halves(t: Tensor, name: str, weights: Tensors) -> Error:
    """Return the error if `t` is int16 (a low half) without a bfloat16 weight, or bfloat16 with a weight."""
    if t.dtype == torch.bfloat16 and weights:
        return TypeError(
            f"is torch.bfloat16, a weight without master, and {name} has another: hand over None for {name}"
        )
    if t.dtype == torch.int16 and [weight.dtype for weight in weights] != [torch.bfloat16]:
        came = weights[0].dtype if weights else None
        return TypeError(
            f"is torch.int16, half of a split master, and its weight in {name} is {came}: bfloat16 is wanted"
        )
    return None


def _of_draws(name: str, tensors: Tensors, seed: object, draws: Any, starts: Any) -> Errors:
    """Yield an error unless `draws` and `starts` are empty or have one int for each tensor; bfloat16 requires draws."""
    if not _is_int64(seed):
        yield "seed", TypeError(f"is {seed!r}, an int of 64 bits is wanted")
    for what, numbers in (("draws", draws), ("starts", starts)):
        if not isinstance(numbers, (list, tuple)) or not all(map(_is_int64, numbers)):
            yield what, TypeError(f"is {numbers!r}, a list or tuple of ints of 64 bits is wanted")
        if numbers and len(numbers) != len(tensors):
            wanted = f"{name} has {len(tensors)} tensors: one each is wanted"
            yield "there", ValueError(f"are {len(numbers)} {what}, {wanted}")
    if min(starts, default=0) < 0:
        yield "starts", ValueError(f"is {starts!r}, places of elements from 0 on are wanted")
    for i, t in enumerate(tensors):
        if t.dtype == torch.bfloat16 and not draws:
            wanted = "there are no draws: hand over a seed and a draw for each tensor"
            yield f"tensor {i} of {name}", ValueError(f"is torch.bfloat16, to be rounded stochastically, and {wanted}")


def _is_int64(value: object) -> bool:
    return isinstance(value, int) and -(2**63) <= value < 2**63


def _is_number(value: object) -> bool:
    """Tell whether `float` and the extension accept `value`: an int, NumPy's numbers, a Fraction, but no text."""
    try:
        # `float` and `int` are tested first, because the test of a protocol takes microseconds.
        return isinstance(value, (float, int, SupportsFloat, SupportsIndex)) and (float(value), True)[1]
    except (TypeError, ValueError, OverflowError):  # an array of many elements, an int past 1.8e308
        return False


def _of_overlaps(lists: Mapping[str, Tensors], outputs: set[str], dense: bool) -> Errors:
    """Yield an error if an output shares memory with another output, or with a tensor that is read.

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
                yield pair, ValueError("in memory: hand over each element once, or a `.clone()`")
        begun.append((end, name, i))


def _may_be_both(one: Tensor, other: Tensor) -> bool:
    """Tell whether tensors that overlap are the same elements, or one has gaps, where this is expensive to decide."""
    if not all(map(torch.ops.aten.is_non_overlapping_and_dense, (one, other))):
        return True
    return one.data_ptr() == other.data_ptr() and one.dtype == other.dtype and one.stride() == other.stride()
