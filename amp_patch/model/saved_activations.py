"""Activations in eight bits: the floating tensors that autograd saves in a model's forward are stored as codes.

A code has the format of `torch.float8_e4m3fn`; each block of 256 elements shares an FP32 scale (`multi_tensor_encode`,
whose rounding has no bias). Backward decodes them. Zeros, signs, and elements of a block's largest magnitude are exact,
so that masks and dropout's factors are. The forward's own numbers do not change.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.multiprocessing.reductions import StorageWeakRef

from amp_patch import multi_tensor
from amp_patch.casts.upcast import AsItIs, other_hooks
from amp_patch.model.joints import Call, Entry, ForwardGuest
from amp_patch.multi_tensor.checks import BLOCK, KEPT
from amp_patch.policy import LOW_PRECISION
from amp_patch.support import tree
from amp_patch.support.blocks import saving_through, unlike_users

LEAST = 4096  # elements of the smallest tensor that is stored as codes
_CODED = (torch.float32, *LOW_PRECISION)
# A saved tensor with at most this share of the elements of a tensor that was saved just before is a statistic of
# it: the mean of a norm, the logarithm of attention's sums. Backward takes its exponential, so it is not coded.
_STATISTIC = 1 / 8
# Backward takes the exponential of these nodes' results, or compares them with the operands that are saved just before:
# {the node: the number of these operands}.
_OF_ONE = (
    *("LogSoftmaxBackward0", "LogsumexpBackward0", "LogcumsumexpBackward0", "AmaxBackward0", "AminBackward0"),
    *("AminmaxBackward0", "MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0"),
    *("LinalgVectorNormBackward0", "NormBackward0", "NormBackward1", "PdistBackward0"),
)
_OF_TWO = "ScatterReduceBackward0", "IndexReduceBackward0", "SegmentReduceBackward0", "CdistBackward0", "DistBackward0"
_EXACT = dict.fromkeys(_OF_ONE, 1) | dict.fromkeys(_OF_TWO, 2)
# Checkpoints save the inputs of a part, from which backward computes it again; a loss saves logits, and backward takes
# their exponential.
_EXACT_FILES = {"torch.utils.checkpoint", "amp_patch.casts.lean_loss"}
# The ends of names in torch.nn.functional: losses compare predictions with targets that they are close to, and
# coordinates are positions in an image.
_EXACT_FUNCTIONS = "_loss", "cross_entropy", "with_logits", "grid_sample"
_COMPARED = (
    "forward: saved_activations='8bit' has stored the operand of an op such as amax or logsumexp as codes, and its "
    "backward compares the operand with the result; run the op inside "
    "torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)"
)
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


_Packed = list[AsItIs | _Coded]  # one object; the tensor that is saved next may replace it


class _Saves:
    """The saved tensors of one call of `model`: each value is coded once, parameters and their casts are not."""

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        held = [t for t in (*model.parameters(), *model.buffers()) if type(t) in (Tensor, nn.Parameter)]
        self._memory = {t.untyped_storage().data_ptr() for t in held}
        # Without a gradient, only the first input and its cast are coded: others are masks, statistics, frozen weights.
        self._inputs = {t.shape for t in tree.tensors(inputs)[:1]}
        self._latest: deque[int] = deque(maxlen=4)  # numbers of elements of the activations that were saved last
        self._last: deque[tuple[_Packed, weakref.ref[Tensor]]] = deque(maxlen=2)
        self._made: dict[Any, tuple[StorageWeakRef, _Coded | None]] = {}  # None: the value is saved as it is

    @unlike_users
    def pack(self, saved: Tensor) -> _Packed:
        """Return what autograd stores in place of `saved`; no sync with the device."""
        operands = 0 if saved.grad_fn is None else _EXACT.get(saved.grad_fn.name(), 0)
        for each in list(self._last)[-operands:] if operands else ():
            self._restore(*each)
        coded = self._coded(saved, operands > 0) if self._takes(saved) else None
        packed: _Packed = [AsItIs.of(saved) if coded is None else coded]
        self._last.append((packed, weakref.ref(saved)))
        return packed

    def forget(self) -> None:
        """Release all codes, which the graph owns from now on."""
        self._last.clear()
        self._made.clear()

    def _takes(self, saved: Tensor) -> bool:
        size = saved.numel()
        if (
            type(saved) is not Tensor
            or saved.dtype not in _CODED
            or size < LEAST
            or saved.layout is not torch.strided
            or saved.untyped_storage().data_ptr() in self._memory
            or not (_is_computed(saved) if saved.requires_grad else saved.shape in self._inputs)
        ):
            return False
        is_statistic = size <= max(self._latest, default=0) * _STATISTIC
        self._latest.append(size)
        return not is_statistic and not _is_saved_exactly()

    def _coded(self, saved: Tensor, is_exact: bool) -> _Coded | None:
        """Return the codes of `saved`, of which each value has one; None for one that is saved as it is."""
        x = saved.detach()
        dense = x.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(x)
        place = (x.numel(),) if dense else (x.shape, x.stride())
        storage = x.untyped_storage()
        if not dense and x.numel() * x.element_size() > storage.nbytes():
            return None  # expanded, or windows that overlap: its memory is smaller than its codes may be
        key = storage.data_ptr(), x.storage_offset(), place, x.dtype, x._version
        found = self._made.get(key)
        if found is None or found[0].expired() or is_exact:  # a later tensor may have the memory of a freed one
            coded = None if is_exact else _encode(x if dense else x.contiguous())
            self._made[key] = (StorageWeakRef(storage), coded)
            return coded
        coded = found[1]
        return coded._replace(size=x.shape, stride=x.stride()) if dense and coded is not None else coded

    def _restore(self, packed: _Packed, reference: weakref.ref[Tensor]) -> None:
        """Store a tensor that was saved just before as it is."""
        tensor = reference()
        if tensor is not None:
            packed[0] = AsItIs.of(tensor)
        elif isinstance(packed[0], _Coded):
            raise RuntimeError(_COMPARED)


def _is_computed(saved: Tensor) -> bool:
    """Tell whether a tensor with a gradient is no function of one weight alone, such as a weight's cast.

    The rows that an embedding chooses are activations.
    """
    node = (saved if saved._base is None else saved._base).grad_fn
    for _ in range(4):
        if node is None or len(node.next_functions) != 1 or node.name() == "EmbeddingBackward0":
            break
        node = node.next_functions[0][0]
    return not isinstance(getattr(node, "variable", None), nn.Parameter)


def _is_saved_exactly() -> bool:
    frame: Any = sys._getframe(3)  # the code whose call saves; `Function.apply` may be between
    for caller in (frame, frame.f_back or frame):
        file = caller.f_globals.get("__name__")
        if file in _EXACT_FILES or (file == F.__name__ and caller.f_code.co_name.endswith(_EXACT_FUNCTIONS)):
            return True
    return False


def _encode(x: Tensor) -> _Coded:
    """Return the codes of a dense tensor; a number other than zero does not become zero."""
    flat = x.as_strided((x.numel(),), (1,))
    codes = torch.empty_like(flat, dtype=KEPT[0])
    scales = torch.empty(math.ceil(flat.numel() / BLOCK), dtype=torch.float32, device=x.device)
    multi_tensor.multi_tensor_encode([flat], [codes], [scales])
    return _Coded(codes, scales, x.dtype, x.shape, x.stride())


def _unpack(packed: _Packed) -> Tensor:
    (saved,) = packed
    if isinstance(saved, AsItIs):
        return saved.unpack()
    values = torch.empty_like(saved.codes, dtype=saved.dtype)
    multi_tensor.multi_tensor_decode([saved.codes], [values], [saved.scales])
    return values.as_strided(saved.size, saved.stride)


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
    saves = _Saves(model, (args, kwargs))
    try:
        return saving_through(saves.pack, _unpack, partial(method, model, *args, **kwargs))
    finally:
        saves.forget()  # the graph references these hooks; backward frees the codes node by node


def choose(model: nn.Module, entry: Entry) -> CodedActivations | None:
    """Return a guest if the training stores activations in eight bits."""
    return None if entry.policy.saved_activations is None else CodedActivations()
