"""Calls of a function on FP32 copies of its operands, for which autograd saves the low-precision operands instead."""

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
    """Return `result` rounded to `dtype` if it is an FP32 tensor, else `result`."""
    return result.to(dtype) if isinstance(result, Tensor) and result.dtype is torch.float32 else result


class _Kept(NamedTuple):
    """A tensor saved for backward: the tensor itself, or for an FP32 copy the low-precision operand."""

    tensor: Tensor
    version: int  # version counter of `tensor`; `_unpack` checks it, because autograd does not for packed tensors
    view: tuple[torch.Size, tuple[int, ...], Any] | None = None  # size, stride, offset in the FP32 copy; None: no copy


class Upcast:
    """Casts the operands of one call to FP32. During `run` autograd saves the low-precision operands instead.

    The layer that made an operand has usually saved it already. Without this class autograd would save the FP32 copy in
    addition, and activations would take more memory than in FP32 training.
    """

    def __init__(self) -> None:
        self._exchanges = _may_exchange_saved()
        self._operands: dict[int, Tensor] = {}  # address of an upcast storage -> the low operand

    def __call__(self, operand: Tensor, dtype: torch.dtype) -> Tensor:
        if operand.dtype not in LOW_PRECISION:
            return operand
        wide = operand.to(dtype)
        # Some tensor subclasses have no storage, and inference tensors have no version counter.
        if self._exchanges and type(operand) in (Tensor, nn.Parameter) and not operand.is_inference():
            self._operands[wide.untyped_storage()._cdata] = operand.detach()
        return wide

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call `function` on cast operands."""
        if not self._operands:
            return function(*args, **kwargs)
        return saving_through(self._pack, _unpack, functools.partial(function, *args, **kwargs))

    def _pack(self, saved: Tensor) -> _Kept:
        operand = self._operands.get(saved.untyped_storage()._cdata) if type(saved) is Tensor else None
        if operand is None:
            # Without `detach`, a function that saves its own result would make a reference cycle: the result references
            # its graph, and the graph the result. Autograd attaches unpacked tensors to the graph again.
            return _Kept(saved.detach(), saved._version)
        return _Kept(operand, operand._version, (saved.size(), saved.stride(), saved.storage_offset()))


def _unpack(kept: _Kept) -> Tensor:
    tensor, version, view = kept
    check_version(tensor, version, " (an operand of a norm computed in FP32, see low_precision_norms)")
    return tensor if view is None else tensor.float().as_strided(*view)


class AsItIs(NamedTuple):
    """A saved tensor as a pack hook returns it that changes nothing, with its version counter when it was saved."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> AsItIs:
        """Return the saved `tensor`.

        Detached, because a node that saves its own output would never be freed. A leaf is saved itself: a script may
        set its `data` before the backward.
        """
        return cls(tensor if tensor.is_leaf else tensor.detach(), tensor._version)

    def unpack(self) -> Tensor:
        """Return the saved tensor; raise torch's RuntimeError if code has written to it since it was saved."""
        check_version(self.tensor, self.version)
        return self.tensor


def check_version(tensor: Tensor, version: int, what: str = "") -> None:
    """Raise torch's RuntimeError if code has written to a saved tensor. Under saved-tensor hooks torch does not check.

    Args:
        version: the version of the tensor when it was saved.
        what: the end of the message.
    """
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {version} "
            f"instead{what}"
        )


def _may_exchange_saved() -> bool:
    """Tell whether `Upcast` may push saved-tensors hooks.

    False under transforms, modes and traces, whose tensors have no storage. False while saved-tensors hooks of
    checkpointing or of the user are active, because the hooks of `Upcast` would hide the tensors from them. Hooks of a
    recording (diagnose/recording/) are no obstacle: they only count.
    """
    return (
        torch.is_grad_enabled()
        and not torch.compiler.is_compiling()  # before `is_plain_eager`, which torch 2.6 cannot trace
        and is_plain_eager()
        and TOPMOST is not None
        and not other_hooks()
    )


TOPMOST: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # torch 2.8 and newer


def other_hooks() -> bool:
    """Tell whether saved-tensors hooks are disabled, or those of code other than a recording are the innermost ones.

    Before torch 2.8 other hooks are not seen.
    """
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return True
    top = None if TOPMOST is None else TOPMOST(False)
    return top is not None and not getattr(top[0], "_amp_counts", False)
