"""Activations in eight bits: the floating tensors that autograd saves in a model's forward are stored as codes.

A code has the format of `torch.float8_e4m3fn`; each block of 256 elements shares an FP32 scale (`multi_tensor_encode`,
whose rounding has no bias). Backward decodes them. Zeros, signs, and elements of a block's largest magnitude are exact,
so that masks and dropout's factors are. The forward's own numbers do not change.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.multiprocessing.reductions import StorageWeakRef

from amp_patch import multi_tensor
from amp_patch.casts.upcast import AsItIs, other_hooks
from amp_patch.model.joints import Call, Entry, ForwardGuest
from amp_patch.multi_tensor.checks import BLOCK
from amp_patch.policy import LOW_PRECISION
from amp_patch.support.blocks import saving_through

LEAST = 4096  # elements of the smallest tensor that is stored as codes
_CODED = (torch.float32, *LOW_PRECISION)
# A saved tensor with at most this share of the elements of a tensor that was saved just before is a statistic of
# it: the mean of a norm, the logarithm of attention's sums. Backward takes its exponential, so it is not coded.
_STATISTIC = 1 / 8
_COMPILED = (
    "forward: torch.compile has reached a model with saved_activations='8bit', whose saved tensors compiled code "
    "chooses; leave the rung act8 out, or the model uncompiled"
)


class _Coded(NamedTuple):
    """A tensor of `size` and `stride`, as codes in the order of its memory."""

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]


class _Saves:
    """The saved tensors of one call of `model`: each value is coded once, parameters and their casts are not.

    A cast has the shape of its parameter, maybe transposed, and memory of its own. Activations of such a shape stay
    uncoded too.
    """

    def __init__(self, model: nn.Module) -> None:
        held = [t for t in (*model.parameters(), *model.buffers()) if type(t) in (Tensor, nn.Parameter)]
        self._memory = {t.untyped_storage().data_ptr() for t in held}
        self._shapes = {tuple(sorted(t.shape)) for t in held if t.numel() >= LEAST}
        self._latest: deque[int] = deque(maxlen=4)  # numbers of elements of the tensors that were saved last
        self._made: dict[Any, tuple[StorageWeakRef, _Coded]] = {}

    def pack(self, saved: Tensor) -> AsItIs | _Coded:
        """Return what autograd stores in place of `saved`; no sync with the device."""
        largest = max(self._latest, default=0)
        self._latest.append(saved.numel())
        if not self._takes(saved, largest):
            return AsItIs.of(saved)
        x = saved.detach()
        dense = torch.ops.aten.is_non_overlapping_and_dense(x)
        place = (x.numel(),) if dense else (x.shape, x.stride())
        storage = x.untyped_storage()
        key = storage.data_ptr(), x.storage_offset(), place, x.dtype, x._version
        found = self._made.get(key)
        if found is None or found[0].expired():  # a later tensor may have the memory of a freed one
            found = self._made[key] = (StorageWeakRef(storage), _encode(x if dense else x.contiguous()))
        return found[1]._replace(size=x.shape, stride=x.stride()) if dense else found[1]

    def _takes(self, saved: Tensor, largest: int) -> bool:
        size = saved.numel()
        return (
            type(saved) is Tensor
            and saved.dtype in _CODED
            and size >= LEAST
            and saved.layout is torch.strided
            and size > largest * _STATISTIC
            and tuple(sorted(saved.shape)) not in self._shapes
            and saved.untyped_storage().data_ptr() not in self._memory
            and not _is_checkpoints()
        )


def _is_checkpoints() -> bool:
    """Tell whether torch's checkpoint saves the inputs of a part, from which backward computes it again."""
    frame: Any = sys._getframe(3)  # the code whose call saves; `Function.apply` may be between
    callers = frame, frame.f_back
    return any(each is not None and each.f_globals.get("__name__") == "torch.utils.checkpoint" for each in callers)


def _encode(x: Tensor) -> _Coded:
    """Return the codes of a dense tensor; a number other than zero does not become zero."""
    flat = x.as_strided((x.numel(),), (1,))
    codes = torch.empty_like(flat, dtype=torch.int8)
    scales = flat.new_empty(math.ceil(flat.numel() / BLOCK), dtype=torch.float32)
    multi_tensor.multi_tensor_encode([flat.float()], [codes], [scales])
    # +0 and -0 of numbers that are not zero become the smallest codes: ReLU's backward asks which outputs are positive.
    codes.add_((codes << 1).eq_(0).mul_(flat != 0))
    return _Coded(codes, scales, x.dtype, x.shape, x.stride())


def _unpack(saved: AsItIs | _Coded) -> Tensor:
    if isinstance(saved, AsItIs):
        return saved.unpack()
    values = torch.empty_like(saved.codes, dtype=torch.float32)
    multi_tensor.multi_tensor_decode([saved.codes], [values], [saved.scales])
    return values.to(saved.dtype).as_strided(saved.size, saved.stride)


class CodedActivations(ForwardGuest):
    """Stores what autograd saves in the calls of one model as codes.

    Saved-tensors hooks of the user, and of checkpoints, around the call or inside of it, keep what they handle.
    """

    def call(self, call: Call, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return `method` with the hooks around it, if it saves tensors and no other hooks are active."""
        if is_dynamo_compiling():
            raise RuntimeError(_COMPILED)
        return partial(_saving, method) if torch.is_grad_enabled() and not other_hooks() else method


def _saving(method: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return saving_through(_Saves(model).pack, _unpack, partial(method, model, *args, **kwargs))


def choose(model: nn.Module, entry: Entry) -> CodedActivations | None:
    """Return a guest if the training stores activations in eight bits."""
    return None if entry.policy.saved_activations is None else CodedActivations()
