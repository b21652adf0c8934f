"""FP32 operands of one call whose own tensors stay low: autograd saves the low ones in place of their FP32 copies."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amp_patch.casts.state import is_plain_eager
from amp_patch.policy import LOW_PRECISION
from amp_patch.support.blocks import saving_through


def rounded(result: Any, dtype: torch.dtype) -> Any:
    """`result` with its FP32 tensors, also those in a tuple or list, rounded to `dtype`."""
    if isinstance(result, Tensor):
        return result.to(dtype) if result.dtype is torch.float32 else result
    if isinstance(result, (tuple, list)):
        return type(result)(rounded(item, dtype) for item in result)
    return result


class _Kept(NamedTuple):
    """A tensor saved for backward: the tensor itself, or a low operand in place of (a view of) its upcast."""

    tensor: Tensor
    version: int  # of `tensor`: of packed tensors autograd checks no version counter, so `unpack` compares
    view: tuple[torch.Size, tuple[int, ...], Any] | None = None  # of the upcast: size, stride, offset


class Upcast:
    """Upcasts the operands of one call; in `run`, autograd keeps the low ones instead of their FP32 copies.

    The layer that made an operand keeps it already; FP32 copies beside it would make the activations of a training
    larger than FP32's own.
    """

    def __init__(self) -> None:
        self._exchanges = _may_exchange_saved()
        self._operands: dict[int, Tensor] = {}  # address of an upcast storage -> the low operand

    def __call__(self, operand: Tensor, dtype: torch.dtype) -> Tensor:
        if operand.dtype not in LOW_PRECISION:
            return operand
        wide = operand.to(dtype)
        # Tensor subclasses may have no storage of their own, and inference tensors have no version counter.
        if self._exchanges and type(operand) in (Tensor, nn.Parameter) and not operand.is_inference():
            self._operands[wide.untyped_storage()._cdata] = operand.detach()
        return wide

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The call."""
        if not self._operands:
            return function(*args, **kwargs)
        return saving_through(self._pack, _unpack, functools.partial(function, *args, **kwargs))

    def _pack(self, saved: Tensor) -> _Kept:
        operand = self._operands.get(saved.untyped_storage()._cdata) if type(saved) is Tensor else None
        if operand is None:
            # `detach`: a function that saves its own result would make a reference cycle of tensor and graph.
            # Autograd attaches unpacked tensors to the graph again.
            return _Kept(saved.detach(), saved._version)
        return _Kept(operand, operand._version, (saved.size(), saved.stride(), saved.storage_offset()))


def _unpack(kept: _Kept) -> Tensor:
    tensor, version, view = kept
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {version} "
            "instead (an operand of a norm computed in FP32, see low_precision_norms)"
        )
    return tensor if view is None else tensor.float().as_strided(*view)


def _may_exchange_saved() -> bool:
    """Whether `Upcast` may push saved-tensors hooks.

    Not under transforms, modes and traces, whose tensors have no storage. Not inside of hooks of checkpointing or the
    user, from which ours would hide the tensors; a recording's hooks only count, and do not matter.
    """
    topmost = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # torch 2.8 and newer
    return (
        torch.is_grad_enabled()
        and is_plain_eager()
        and not torch.compiler.is_compiling()
        and torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
        and topmost is not None
        and ((top := topmost(False)) is None or getattr(top[0], "_amp_counts", False))
    )
