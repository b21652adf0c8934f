"""`Coded`, an FP32 tensor that is stored in 8 bits per element, and the rules which optimizer state becomes one.

A `Coded` stores 8-bit integers with an FP32 scale per block (`multi_tensor_encode`). Each torch function decodes it
into new FP32 memory; a function that writes into it is followed by an encoding of the whole tensor. Decoding and
encoding again gives the same codes, so a read loses nothing. Copies and pickles are plain FP32 tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from amp_patch import multi_tensor
from amp_patch.multi_tensor import plain_codes
from amp_patch.multi_tensor.checks import BLOCK
from amp_patch.support import tree

View = Callable[[Tensor], Tensor]

LEAST = 4096  # elements of the smallest tensor that is stored as codes

# ----------------------------------------------------------------------------------------------------------------------
# Which tensors are stored as codes

# State tensors that are never negative, by their names in torch's and amp_patch's optimizers: uint8 codes.
UNSIGNED = {"exp_avg_sq", "exp_inf", "square_avg", "acc_delta", "sum", "variance", "step_size"}

# State tensors that stay FP32, with the reason. The key: the class, or "" for every class; the name of the state; the
# name of another state that must be present too, or "".
IN_FP32: dict[tuple[str, str, str], str] = {
    ("", "max_exp_avg_sq", ""): "a running maximum never takes back what was once rounded up",
    ("ASGD", "ax", ""): "it is the average of the weights, which the script takes for its result",
    ("RMSprop", "square_avg", "grad_avg"): "centered=True takes the root of square_avg - grad_avg ** 2, which "
    "rounding would make negative",
    ("RMSprop", "grad_avg", ""): "as square_avg beside it",
}


def codes_of(kind: str, name: str, beside: Iterable[str]) -> torch.dtype | None:
    """Return the dtype of a state tensor's codes; None if it stays FP32.

    Args:
        kind: the name of the optimizer's class.
        name: the name of the state tensor.
        beside: the names of all state tensors of the parameter.
    """
    for (of_class, state, other), _ in IN_FP32.items():
        if state == name and of_class in ("", kind) and (not other or other in beside):
            return None
    return torch.uint8 if name in UNSIGNED else torch.int8


def is_large(value: Any, param: Tensor) -> bool:
    """Return whether `value`, a state entry of `param`, can be stored as codes and has `LEAST` elements or more."""
    return (
        type(value) is Tensor
        and value.dtype is torch.float32
        and value.numel() >= LEAST
        and value.shape == param.shape
        and value.layout is torch.strided
        and not value.requires_grad
        and torch.ops.aten.is_non_overlapping_and_dense(value)
    )


# ----------------------------------------------------------------------------------------------------------------------
# The tensor


class Coded(Tensor):
    """An FP32 tensor that is stored as codes, or a view of one.

    Attributes:
        codes: int8 or uint8, with the shape and strides of the whole tensor.
        scales: FP32, shape [ceil(elements / 256)].
        of_whole: for a view, the function from the whole tensor to it; else None.
    """

    codes: Tensor
    scales: Tensor
    of_whole: View | None

    @staticmethod
    def __new__(cls: Any, codes: Tensor, scales: Tensor, of_whole: View | None = None, like: Any = None) -> Coded:
        """Return the tensor stored in `codes` and `scales`; with `of_whole`, its view with the layout of `like`."""
        shaped, dtype = (codes, torch.float32) if like is None else (like, like.dtype)
        make: Any = Tensor._make_wrapper_subclass  # noqa: SLF001
        # torch cannot make views of a tensor that was made in inference mode.
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            made: Coded = make(
                cls, shaped.shape, shaped.stride(), shaped.storage_offset(), dtype=dtype, device=codes.device
            )
        torch._C._set_throw_on_mutable_data_ptr(made)  # else compiled code would read memory that is not there
        made.codes, made.scales, made.of_whole = codes, scales, of_whole
        return made

    def decoded(self) -> Tensor:
        """Return the value in FP32, in newly allocated memory."""
        return self.seen(*decode([self]))

    def seen(self, whole: Tensor) -> Tensor:
        """Return what this tensor is of the decoded `whole`, which shares its memory."""
        return whole if self.of_whole is None else self.of_whole(whole)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func not in _OF_MEMORY:
                return func(*args, **(kwargs or {}))
            result = func(args[0].decoded(), *args[1:], **(kwargs or {}))
        if func in (Tensor.numpy, Tensor.__array__):
            result.flags.writeable = False  # a write would be lost
        return result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if torch.Tag.inplace_view in func.tags:
            raise RuntimeError(
                f"{func} changes the layout of optimizer state that is stored in eight bits; assign a tensor of the "
                "new layout: state[name] = state[name].contiguous()"
            )
        wholes: dict[Tensor, Tensor] = {}  # codes -> the value: several views of one tensor share it
        originals: dict[Tensor, Coded] = {}  # value -> the argument

        def opened(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, Coded):
                return tensor
            if tensor.codes not in wholes:
                (wholes[tensor.codes],) = decode([tensor])
            originals[value := tensor.seen(wholes[tensor.codes])] = tensor
            return value

        given, named = tree.map_tensors(opened, (tuple(args), kwargs or {}))
        result = func(*given, **named)
        if func.is_view:
            return _viewed(args[0], lambda value: func(value, *given[1:], **named), result)
        written = {originals[t].codes: originals[t] for t in _written(func, given, named) if t in originals}
        if written:
            encode(list(written.values()), [wholes[codes] for codes in written])
        return tree.map_tensors(lambda tensor: originals.get(tensor, tensor), result)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scales"], self.of_whole

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], of_whole: Any, shape: Any, stride: Any) -> Coded:
        like = None if of_whole is None else torch.empty_strided(shape, stride, dtype=torch.float32, device="meta")
        return Coded(inner["codes"], inner["scales"], of_whole, like)

    @property
    def data(self) -> Tensor:
        """The tensor itself. An assigned tensor replaces it, in all places that hold it."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        torch.utils.swap_tensors(self, value.detach())

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.decoded()


# Functions that read memory without a call of `__torch_dispatch__`; a copy by pickle is a plain tensor.
_OF_MEMORY = {Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.tolist, Tensor.__repr__, Tensor.__reduce_ex__}


def _viewed(source: Coded, func: Any, result: Any) -> Any:
    """Return the view `func(source)`, or a list of such views; `result` is that of the decoded tensor."""

    def view(part: Tensor, pick: Callable[[Any], Tensor]) -> Coded:
        return Coded(source.codes, source.scales, lambda whole: pick(func(source.seen(whole))), part)

    if isinstance(result, Tensor):
        return view(result, lambda found: found)
    return [view(part, itemgetter(place)) for place, part in enumerate(result)]


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors of the arguments that `func` writes."""
    schema = func._schema.arguments if func._schema.is_mutable else ()
    given = [*zip(schema, args, strict=False), *((each, kwargs[each.name]) for each in schema if each.name in kwargs)]
    return tree.tensors([value for each, value in given if each.alias_info is not None and each.alias_info.is_write])


# ----------------------------------------------------------------------------------------------------------------------
# Decoding and encoding


def decode(coded: list[Coded], values: list[Tensor] | None = None) -> list[Tensor]:
    """Decode the whole tensors of `coded`, on one device, into `values`, with the strides of the codes, or new ones."""
    codes = [each.codes for each in coded]
    made = [torch.empty_like(each, dtype=torch.float32) for each in codes] if values is None else values
    run = multi_tensor.multi_tensor_decode if type(codes[0]) is Tensor else plain_codes.decode  # else in a trace
    run(codes, made, [each.scales for each in coded])
    return made


def encode(coded: list[Coded], values: list[Tensor]) -> None:
    """Encode `values` into the whole tensors of `coded`, on one device."""
    codes = [each.codes for each in coded]
    laid_out = [
        value if value.stride() == its.stride() else torch.empty_like(its, dtype=torch.float32).copy_(value)
        for its, value in zip(codes, values, strict=True)
    ]
    run = multi_tensor.multi_tensor_encode if type(codes[0]) is Tensor else plain_codes.encode
    run(laid_out, codes, [each.scales for each in coded])


def encoded(value: Tensor, dtype: torch.dtype) -> Coded:
    """Return `value`, an FP32 tensor without gaps in its memory, with codes of `dtype`."""
    scales = torch.empty(-(-value.numel() // BLOCK), dtype=torch.float32, device=value.device)
    encode([made := Coded(torch.empty_like(value, dtype=dtype), scales)], [value])
    return made
