"""`cross_entropy` of FP16 and BF16 logits, in FP32 and without FP32 copies of the logits.

The logits are the largest tensor of a language model's step. Here each block of rows becomes FP32, gives its part of
the loss, and is dropped. Autograd saves the logits as they came, and backward computes the blocks again. Loss and
gradient are those of `cross_entropy(logits.float())` to the bit: each block is computed by torch's own kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual
from torch.compiler import is_dynamo_compiling
from torch.overrides import _get_current_function_mode_stack

from amp_patch.casts.sources import Source, source_of
from amp_patch.casts.state import is_plain_eager
from amp_patch.casts.thread_state import this_thread
from amp_patch.policy import LOW_PRECISION

SMALLEST = 2**22  # elements; for smaller logits the blocks take up to 1.6 times as long as copies, which a cache holds
BLOCK = 2**18  # elements of a block, for each thread of a CPU
_IGNORED = -100
_nll_loss: Any = torch.ops.aten.nll_loss_nd
_FLOATS = (torch.float32, *LOW_PRECISION)
_Part = tuple[slice, ...]


class _Call(NamedTuple):
    """The arguments of `torch.nn.functional.cross_entropy`; the weight in FP32 once the call is served."""

    input: Tensor
    target: Tensor
    weight: Tensor | None = None
    size_average: bool | None = None
    ignore_index: int = -100
    reduce: bool | None = None
    reduction: str = "mean"
    label_smoothing: float = 0.0

    @property
    def has_classes(self) -> bool:
        """Whether the target has classes, not probabilities of all classes."""
        return not self.target.is_floating_point()

    def block(self, part: _Part) -> _Call:
        """Return the call for the block `part` of the logits."""
        return self._replace(target=_of(self.target, part))


def cross_entropy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the FP32 `cross_entropy(*args, **kwargs)` of low-precision logits; None for a call that is not served."""
    logits: Any = args[0] if args else kwargs.get("input")
    if not _is_plain(logits) or logits.numel() < SMALLEST:
        return None
    try:
        call = _Call(*args, **kwargs)
    except TypeError:
        return None
    if logits.dtype not in _FLOATS or not _serves(call):
        return None
    shape = logits[:, 0].shape
    if logits.dim() > 3:
        call = call._replace(input=logits.flatten(2), target=call.target.flatten(1 if call.has_classes else 2))
    if (source := source_of(call.input)) is None:
        return None
    call = call._replace(weight=None if call.weight is None else call.weight.float())
    terms = _Terms.apply(call.input, source.place, source, call)
    loss = (_reduced_classes if call.has_classes else _reduced_probabilities)(terms, call)
    return loss.reshape(shape) if call.reduction == "none" else loss


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


def _serves(call: _Call) -> bool:
    """Tell whether the blocks know this call on low-precision logits. All others take torch's way, with its errors."""
    logits, target, weight = call.input, call.target, call.weight
    if not is_plain_eager() or unpack_dual(logits).tangent is not None:
        return False
    # A mode that user code has entered must see the call. That of `torch.set_default_device` need not.
    if any(type(mode).__module__ != "torch.utils._device" for mode in _get_current_function_mode_stack()):
        return False
    if logits.dim() < 2 or logits.device.type not in ("cpu", "cuda"):
        return False
    if call.size_average is not None or call.reduce is not None or call.reduction not in ("none", "mean", "sum"):
        return False
    for tensor in (target,) if weight is None else (target, weight):
        if not _is_plain(tensor) or tensor.requires_grad or tensor.device != logits.device:
            return False
    if weight is not None and (weight.shape != logits.shape[1:2] or weight.dtype not in _FLOATS):
        return False
    if not 0 <= call.label_smoothing <= 1:
        return False
    if target.shape == logits.shape:
        return target.dtype in _FLOATS and call.ignore_index < 0
    return target.dtype is torch.int64 and target.shape == logits.shape[:1] + logits.shape[2:]


class _Terms(torch.autograd.Function):
    """The FP32 terms that a loss sums: one or two for each row; for probabilities one for each logit."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, place: Tensor | None, source: Source, call: _Call) -> tuple[Tensor, ...]:
        def empty(shape: torch.Size) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=logits.device)

        rows, low = logits[:, 0].shape, source.low_of(logits)
        both = call.has_classes and call.label_smoothing > 0
        results = tuple(empty(call.target.shape) for _ in range(2 if both else 1))
        peaks, sums = (empty(rows), empty(rows)) if logits.device.type == "cpu" else (None, None)
        for part in _parts(logits, call.label_smoothing):
            wide = logits[part].float()
            if low is not None and not torch.equal(low[part].float(), wide):
                low = None  # written by way of `data`
            logarithms = torch.log_softmax(wide, 1)
            if peaks is not None and sums is not None:
                _of(peaks, part).copy_(wide.amax(1))
                _of(sums, part).copy_(logarithms.amax(1))
            for result, term in zip(results, _terms(logarithms, call.block(part)), strict=True):
                _of(result, part).copy_(term)
        ctx.save_for_backward(source.to_save(logits) if low is None else low, peaks, sums, call.target, call.weight)
        ctx.source, ctx.dtype, ctx.low = source, logits.dtype, logits.dtype if place is None else place.dtype
        ctx.settings = call[3:]
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, peaks, sums, target, weight = ctx.saved_tensors
        call = _Call(logits, target, weight, *ctx.settings)
        is_batched = any("Batched" in str(torch._C._dispatch_keys(grad)) for grad in grads)
        is_plain = not (is_batched or torch.is_grad_enabled())

        def gradient(part: _Part) -> Tensor:
            if is_plain and peaks is not None:  # the order of torch's kernel for a CPU
                peak, sum_ = (_of(each, part).unsqueeze(1) for each in (peaks, sums))
                logarithms = torch.sub(logits[part], peak).add_(sum_)
            else:
                logarithms = torch.log_softmax(logits[part].float(), 1)
            spread = _spread([_of(grad, part) for grad in grads], logarithms, call.block(part), is_plain)
            return torch.ops.aten._log_softmax_backward_data(spread, logarithms, 1, torch.float32)

        goes_around = is_plain and ctx.source.takes_gradient()
        dtype = ctx.low if goes_around else ctx.dtype
        if not is_plain:  # for second derivatives, and batched gradients
            logits = ctx.source.attached(logits, ctx.dtype in LOW_PRECISION)
            result = gradient(()).to(dtype)
        else:
            is_free = logits.dtype is dtype and ctx.source.may_write(logits)
            result = logits if is_free else torch.empty_like(logits, dtype=dtype)
            for part in _parts(logits, call.label_smoothing):
                result[part].copy_(gradient(part))
        return (None, result, None, None) if goes_around else (result, None, None, None)


def _parts(logits: Tensor, smoothing: float) -> Iterator[_Part]:
    """Yield the indices of the blocks of `logits`, [N, C] or [N, C, R].

    A block has two rows or more: torch adds up a result of one element in another order, on several threads. For the
    same reason, blocks of [N, C, R] under label smoothing have a row for each thread. The blocks of R begin at
    multiples of 64, because torch's kernels treat the elements after the last whole vector in another way.
    """
    count, classes, *inner = logits.shape
    threads = torch.get_num_threads() if logits.device.type == "cpu" else 64
    width = inner[0] if inner else 1
    rows = max(BLOCK * threads // (classes * width), 1 if inner else 2, threads if inner and smoothing > 0 else 1)
    blocks = max(count // rows, 1)
    columns = max(BLOCK * threads // classes // 64 * 64, 64) if rows == 1 else width
    starts = range(0, max(width // columns, 1) * columns, columns)
    for block in range(blocks):
        some = slice(count * block // blocks, count * (block + 1) // blocks)
        if len(starts) == 1:
            yield (some,)
            continue
        for start in starts:
            yield some, slice(None), slice(start, width if start == starts[-1] else start + columns)


def _of(tensor: Tensor, part: _Part) -> Tensor:
    """Return the block `part` of the logits in `tensor`, which has no dimension of classes if it has one less."""
    if len(part) == 3 and tensor.dim() == 2:
        return tensor[part[0], part[2]]
    return tensor[part] if part else tensor


def _by_class(weight: Tensor, logarithms: Tensor) -> Tensor:
    return weight.view(-1, *[1] * (logarithms.dim() - 2))


def _smoothed(target: Tensor, smoothing: float) -> Tensor:
    target = target.float()
    return target * (1 - smoothing) + smoothing / target.shape[1] if smoothing > 0 else target


def _terms(logarithms: Tensor, call: _Call) -> tuple[Tensor, ...]:
    weight, smoothing = call.weight, call.label_smoothing
    if not call.has_classes:
        terms = logarithms * _smoothed(call.target, smoothing)
        return (terms if weight is None else terms * _by_class(weight, logarithms),)
    losses = _nll_loss(logarithms, call.target, weight, 0, call.ignore_index)
    if smoothing <= 0:
        return (losses,)
    return losses, -(logarithms if weight is None else logarithms * _by_class(weight, logarithms)).sum(1)


def _spread(grads: list[Tensor], logarithms: Tensor, call: _Call, in_place: bool) -> Tensor:
    """Return the gradient of `logarithms` for `grads`, those of `_terms`."""
    target, weight = call.target, call.weight
    if not call.has_classes:
        grad = grads[0] if weight is None else grads[0] * _by_class(weight, logarithms)
        return grad * _smoothed(target, call.label_smoothing)
    is_ignored = target == call.ignore_index
    place = target.masked_fill(is_ignored, 0)
    grad = -grads[0] if weight is None else -grads[0] * weight[place]
    grad, place = grad.masked_fill(is_ignored, 0.0).unsqueeze(1), place.unsqueeze(1)
    if call.label_smoothing > 0:
        smooth = -grads[1].unsqueeze(1)
        spread = smooth.expand_as(logarithms).clone() if weight is None else smooth * _by_class(weight, logarithms)
        grad = grad + spread.gather(1, place)
    else:
        spread = torch.zeros_like(logarithms)
    return spread.scatter_(1, place, grad) if in_place else spread.scatter(1, place, grad)


def _reduced_probabilities(terms: tuple[Tensor, ...], call: _Call) -> Tensor:
    if call.reduction == "none":
        return -terms[0].sum(1)
    loss = -terms[0].sum()
    return loss / (call.target.numel() // call.input.shape[1]) if call.reduction == "mean" else loss


def _reduced_classes(terms: tuple[Tensor, ...], call: _Call) -> Tensor:
    """Reduce the terms as torch does. Its kernel adds them up as the losses of one class, in its own order."""
    target, weight, is_mean = call.target, call.weight, call.reduction == "mean"
    is_ignored = target == call.ignore_index
    loss, *rest = terms
    if call.reduction != "none":
        places = torch.zeros_like(target).masked_fill_(is_ignored, _IGNORED)

        def added(values: Tensor, reduction: int) -> Tensor:
            return _nll_loss(-values.unsqueeze(1), places, None, reduction, _IGNORED)

        loss = added(loss, 1 if is_mean and weight is None else 2)
        if is_mean and weight is not None:
            loss = loss / added(weight[target.masked_fill(is_ignored, 0)], 2)
    if not rest:
        return loss
    smooth = rest[0].masked_fill(is_ignored, 0.0)
    if call.reduction != "none":
        smooth = smooth.sum()
    if is_mean:
        kept = ~is_ignored
        smooth = smooth / (kept if weight is None else weight[target.masked_select(kept)]).sum()
    return (1 - call.label_smoothing) * loss + smooth * (call.label_smoothing / call.input.shape[1])
