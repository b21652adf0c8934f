"""`cross_entropy` of FP16 and BF16 logits, in FP32 and without FP32 copies of the logits.

The logits are the largest tensor of a language model's step. Here each block of rows becomes FP32, gives its part of
the loss, and is dropped. Autograd saves the logits as they came, and backward computes the blocks again. Loss and
gradient are those of `cross_entropy(logits.float())` to the bit: each block is computed by torch's own kernels.

FP32 logits that a model's exit or a script has cast from low precision are served too, with the extension. The gradient
is then rounded once, here, and goes around the cast (csrc/casts/upcasts.cpp). A write that autograd knows puts another
node between cast and loss. One without a gradient (`torch.no_grad`, `data`) changes the values alone, which are read.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual
from torch.compiler import is_dynamo_compiling
from torch.overrides import _get_current_function_mode_stack

from amp_patch import multi_tensor
from amp_patch.casts.state import is_plain_eager
from amp_patch.casts.thread_state import this_thread
from amp_patch.casts.upcast import TOPMOST, AsItIs, other_hooks
from amp_patch.policy import LOW_PRECISION
from amp_patch.support.blocks import saving_through

SMALLEST = 2**22  # elements; for smaller logits the blocks take up to 1.6 times as long as copies, which a cache holds
BLOCK = 2**18  # elements of a block, for each thread of a CPU
_IGNORED = -100
_nll_loss: Any = torch.ops.aten.nll_loss_nd
_FLOATS = (torch.float32, *LOW_PRECISION)
_SIGNATURE = inspect.signature(nn.functional.cross_entropy)
_Part = tuple[slice, ...]


def cross_entropy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the FP32 `cross_entropy(*args, **kwargs)` of low-precision logits; None for a call that is not served."""
    logits: Any = args[0] if args else kwargs.get("input")
    if not _is_plain(logits) or logits.numel() < SMALLEST:
        return None
    try:
        bound = _SIGNATURE.bind(*args, **kwargs)
    except TypeError:
        return None
    bound.apply_defaults()
    _, target, weight, average, ignored, reduce, reduction, smoothing = bound.arguments.values()
    given = average is reduce is None and reduction in ("none", "mean", "sum") and 0 <= smoothing <= 1
    if not given or not _serves(logits, target, weight, ignored):
        return None
    shape, place = logits[:, 0].shape, None
    # One dimension of classes, and at most one more. A target of classes gets a dimension of size 1.
    target = target if target.is_floating_point() else target.unsqueeze(1)
    if logits.dim() > 3:
        logits, target = logits.flatten(2), target.flatten(2)
    made = getattr(multi_tensor.extension(), "Upcast", None)  # None if it was built from older sources
    source: Any = None if made is None or logits.grad_fn is None else made(logits)
    if logits.dtype is torch.float32 and (source is None or (place := source.place()) is None):
        return None
    weight = None if weight is None else weight.float()
    # Under hooks of a checkpoint, a recomputation must save the same types: by then the other tensor may be freed.
    alone = TOPMOST is not None and not other_hooks()
    low = source.low_of(logits) if alone and place is not None else None
    # With hooks each reader of saved tensors gets a tensor of its own, which counts where the gradient may be written.
    hooked = alone and TOPMOST(False) is None
    call = functools.partial(_Terms.apply, logits, place, source, low, hooked, target, weight, ignored, smoothing)
    terms = saving_through(AsItIs.of, lambda kept: kept.unpack().detach(), call) if hooked else call()
    loss = _reduced(terms, target, weight, ignored, smoothing, logits.shape[1], reduction)
    return loss.reshape(shape) if reduction == "none" else loss


def user_has_chosen() -> bool:
    """Tell whether user code has chosen a loss's type: by a torch.autocast, or a region that makes nothing low."""
    if torch._C._is_any_autocast_enabled():
        return True
    if is_dynamo_compiling() or not this_thread.stack:
        return False
    policy = this_thread.stack[-1].region.policy
    return bool(this_thread.uncastable_entries) or policy is None or not policy.makes_low_tensors


def _is_plain(tensor: Any) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def _serves(logits: Tensor, target: Any, weight: Any, ignored: int) -> bool:
    """Tell whether the blocks know these operands. All others take torch's way, with its errors."""
    # A mode that user code has entered must see the call. That of `torch.set_default_device` need not.
    modes = {type(mode).__module__ for mode in _get_current_function_mode_stack()}
    others = (target,) if weight is None else (target, weight)
    if not all(_is_plain(other) and not other.requires_grad and other.device == logits.device for other in others):
        return False
    has_classes = target.dtype is torch.int64 and target.shape == logits.shape[:1] + logits.shape[2:]
    return (
        is_plain_eager()
        and modes <= {"torch.utils._device"}
        and unpack_dual(logits).tangent is None
        and logits.dim() > 1
        and logits.device.type in ("cpu", "cuda")
        and logits.dtype in _FLOATS
        and (has_classes or (target.dtype in _FLOATS and target.shape == logits.shape and ignored < 0))
        and (weight is None or (weight.dtype in _FLOATS and weight.shape == logits.shape[1:2]))
    )


class _Terms(torch.autograd.Function):
    """The FP32 terms that a loss sums: one or two for each row; for probabilities one for each logit.

    `source` is the graph of FP32 logits back to a cast, `place` a tensor in the place of the cast's operand, and `low`
    the operand if it is alive. Low-precision logits have no cast. `hooked` tells whether the hooks of `AsItIs` act.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, place: Any, source: Any, low: Any, hooked: bool, *rest: Any) -> Any:
        target, weight, *how = rest
        terms = 2 if how[-1] > 0 and not target.is_floating_point() else 1
        results = tuple(torch.empty_like(target, dtype=torch.float32) for _ in range(terms))
        rows = logits[:, :1] if logits.device.type == "cpu" else logits[:0]
        peaks, sums = (torch.empty_like(rows, dtype=torch.float32) for _ in range(2))
        for part in _parts(logits, how[-1]):
            wide = logits[part].float()
            if low is not None and not torch.equal(low[part].float(), wide):
                low = None  # written by way of `data`
            logarithms = torch.log_softmax(wide, 1)
            if len(peaks):
                peaks[part], sums[part] = wide.amax(1, True), logarithms.amax(1, True)
            for result, term in zip(results, _terms(logarithms, target[part], weight, *how), strict=True):
                result[part] = term
        ctx.save_for_backward(logits if low is None else low, peaks, sums, target, weight)
        ctx.source, ctx.hooked, ctx.how, ctx.dtype = source, hooked, how, logits.dtype
        ctx.low = None if place is None else place.dtype
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, peaks, sums, target, weight = ctx.saved_tensors
        twice = torch.is_grad_enabled()
        if twice or any("Batched" in str(torch._C._dispatch_keys(grad)) for grad in grads):
            if logits.dtype is not ctx.dtype:
                logits = ctx.source.attached(logits.float())
            with torch.enable_grad():
                terms = _terms(torch.log_softmax(logits.float(), 1), target, weight, *ctx.how)
            return *torch.autograd.grad(terms, logits, grads, create_graph=twice), *[None] * 8
        goes_around = ctx.low is not None and ctx.source.is_alone()
        dtype = ctx.low if goes_around else ctx.dtype
        is_free = logits.dtype is dtype and ctx.hooked and ctx.source is not None and ctx.source.is_private(logits)
        result = logits if is_free else torch.empty_like(logits, dtype=dtype)
        for part in _parts(logits, ctx.how[-1]):
            if len(peaks):  # the order of torch's kernel for a CPU
                logarithms = torch.sub(logits[part], peaks[part]).add_(sums[part])
            else:
                logarithms = torch.log_softmax(logits[part].float(), 1)
            with torch.enable_grad():
                terms = _terms(logarithms.requires_grad_(), target[part], weight, *ctx.how)
            (spread,) = torch.autograd.grad(terms, logarithms, [grad[part] for grad in grads])
            result[part] = torch.ops.aten._log_softmax_backward_data(spread, logarithms, 1, torch.float32)
        return (None, ctx.source.through(result), *[None] * 7) if goes_around else (result, *[None] * 8)


def _parts(logits: Tensor, smoothing: float) -> list[_Part]:
    """Return the indices of the blocks of `logits`, [N, C] or [N, C, R].

    A block has two rows or more: torch adds up a result of one element in another order, on several threads. For the
    same reason, blocks of [N, C, R] under label smoothing have a row for each thread. The blocks of R begin at
    multiples of 64, because torch's kernels treat the elements after the last whole vector in another way.
    """
    count, classes, width = (*logits.shape, 1)[:3]
    threads = torch.get_num_threads() if logits.device.type == "cpu" else 64
    least = 2 if logits.dim() == 2 else threads if smoothing > 0 else 1
    size = BLOCK * threads // classes  # of a block, in rows of one column
    rows = max(size // width, least)
    columns = max(size // 64 * 64, 64) if rows == 1 else width
    blocks = itertools.product(_slices(count, rows), [slice(None)], _slices(width, columns))
    return [block[: logits.dim()] for block in blocks]


def _slices(length: int, step: int) -> list[slice]:
    """Return slices of `length` elements, of `step` or more."""
    starts = range(0, max(length // step, 1) * step, step)
    return [slice(start, length if start == starts[-1] else start + step) for start in starts]


def _terms(logarithms: Tensor, target: Tensor, weight: Any, ignored: int, smoothing: float) -> tuple[Tensor, ...]:
    def weighted(values: Tensor) -> Tensor:
        return values if weight is None else values * weight.view(-1, *[1] * (values.dim() - 2))

    if target.is_floating_point():
        target = target.float()
        if smoothing > 0:
            target = target * (1 - smoothing) + smoothing / target.shape[1]
        return (weighted(logarithms * target),)
    losses = _nll_loss(logarithms, target.squeeze(1), weight, 0, ignored).unsqueeze(1)
    if smoothing <= 0:
        return (losses,)
    return losses, -weighted(logarithms).sum(1, True).masked_fill(target == ignored, 0.0)


def _reduced(terms: Any, target: Tensor, weight: Any, ignored: int, smoothing: float, classes: int, how: str) -> Tensor:
    """Reduce the terms as torch does. Its kernel adds them up as the losses of one class, in its own order."""
    if target.is_floating_point():
        loss = -(terms[0].sum(1) if how == "none" else terms[0].sum())
        return loss / (target.numel() // classes) if how == "mean" else loss
    target = target.squeeze(1)
    kept = target != ignored
    places = torch.where(kept, 0, _IGNORED)

    def added(values: Tensor) -> Tensor:
        return _nll_loss(-values.unsqueeze(1), places, None, 2, _IGNORED)

    loss, *smooth = (term.squeeze(1) for term in terms)
    if how != "none":
        loss, smooth = added(loss), [each.sum() for each in smooth]
    if how == "mean":
        total = counted = kept.sum()
        if weight is not None:
            total, counted = added(weight[target.where(kept, 0)]), weight[target[kept]].sum()
        loss, smooth = loss / total, [each / counted for each in smooth]
    return (1 - smoothing) * loss + smooth[0] * (smoothing / classes) if smooth else loss
