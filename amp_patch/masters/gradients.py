"""Unscales low-precision gradients of parameters into FP32 gradients of masters, and checks for overflow (`gather`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_patch import multi_tensor
from amp_patch.masters import on_host
from amp_patch.masters.grad_field import own_grad, plain_gradients, set_own_grad
from amp_patch.masters.masters import link_of
from amp_patch.multi_tensor.checks import Number
from amp_patch.policy import LOW_PRECISION
from amp_patch.support import distributed
from amp_patch.support.blocks import without_grad
from amp_patch.support.devices import by_device

Groups = list[dict[str, Any]]
FoundInf = dict[torch.device, Tensor]
Pairs = Iterable[tuple[Tensor, Tensor]]  # (parameter, master)


class Aside(NamedTuple):
    """A gradient that `take` has removed from a parameter, so that the next backward does not add to it.

    Attributes:
        param: the parameter.
        grad: the parameter's gradient tensor, which `give_back` restores.
        value: the value of `grad`: the same tensor, or a copy if the next backward may write into its memory.
    """

    param: Tensor
    grad: Tensor
    value: Tensor

    @torch.no_grad()
    def give_back(self) -> None:
        """Restore the gradient that was set aside, bit for bit, in place of the parameter's present one."""
        if self.value is not self.grad:
            self.grad.copy_(self.value)
        set_own_grad(self.param, self.grad)

    @torch.no_grad()
    def give_back_scaled(self, scale: Tensor) -> Aside:
        """Add the gradient, times `scale` (FP32, shape []), to the parameter's scaled gradient; no sync.

        Returns:
            The rest, to be added after the sum is unscaled: the elements that are infinite or NaN after scaling, and 0
                in place of all other elements. If the rest were in the sum, the exit would find an overflow there.
        """
        param, value = self.param, self.value
        new = own_grad(param)
        if value.is_sparse:
            value = value.coalesce()
            held, rest = (_sparse(value, part) for part in _split(value._values(), scale))
            total = held if new is None else _sum(held, new)
        else:
            held, rest = _split(_values(param, value), scale)
            if new is not None and not new.is_sparse:
                held = _values(param, new) + held
            _values(param, self.grad).copy_(held)
            total = self.grad if new is None or not new.is_sparse else _sum(self.grad, new)
        set_own_grad(param, total)
        return Aside(param, total, rest)


def take(param: Tensor) -> Aside | None:
    """Set the gradient of `param` aside: remove it from `param` and return it; None if there is none."""
    grad = own_grad(param)
    if grad is None:
        return None
    if grad.is_neg() or grad.is_conj():
        grad = grad.resolve_conj().resolve_neg()
    # A view is part of a DDP bucket, and DDP reduces the next gradient into that memory.
    aside = Aside(param, grad, grad.clone() if grad._is_view() else grad)
    set_own_grad(param, None)  # last, so that an exception in this function keeps the gradient
    return aside


def _split(values: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return (scaled, rest). Where `values * scale` is finite: (`values * scale`, 0), elsewhere (0, `values`)."""
    wide = values if values.dtype is torch.float64 else values.float()
    scaled = (wide * scale.to(values.device)).to(values.dtype)
    finite = scaled.isfinite()
    return torch.where(finite, scaled, 0.0), torch.where(finite, 0.0, values)


def gather(pairs: Pairs, inverse: Number | None, *, aside: Mapping[Tensor, Aside] | None = None) -> FoundInf:
    """Turn scaled gradients of parameters into unscaled gradients of their masters, in one fused pass; no sync.

    With a master: `master.grad = param.grad * inverse [+ master.grad]` in FP32, and `param.grad` becomes None. Without
    one: `param.grad = param.grad * inverse [+ the gradient set aside]`, in place. If backward has made no gradient, the
    one set aside is restored unchanged. A gradient that is only checked (`inverse` is 1.0, no master, nothing set
    aside) is not written.

    Args:
        pairs: (param, master), each parameter once; a parameter without a master is paired with itself.
        inverse: FP32, shape []; 1.0 for gradients that are not scaled; None for gradients that are not checked either.
        aside: parameter -> the gradient that `take` removed, for parameters without a master.

    Returns:
        Per device an FP32 tensor of one element: 1.0 if a scaled gradient there was not finite. (Earlier gradients were
            checked when they were made.) It covers the local shards only; `distributed.agree` reduces it over
            processes.
    """
    batches: dict[torch.device, _Batch] = defaultdict(_Batch)
    is_scaled = isinstance(inverse, Tensor)
    sums: list[tuple[Tensor, Tensor]] = []  # (master, its earlier gradient), if one of the two is sparse
    if is_scaled and not aside:
        pairs = list(pairs)
        grads = plain_gradients([param for param, master in pairs if param is master])
        if grads is not None:
            pairs = [pair for pair in pairs if pair[0] is not pair[1]]
            if grads:
                batches[grads[0].device].own = grads
    pairs = list(pairs)
    copies, on_cpu = _brought(pairs, inverse) if on_host.used else ({}, inverse)
    for param, master in pairs:
        grad = copies[param] if param in copies else own_grad(param)
        before = aside.get(param) if aside else None
        if grad is None or (param is master and inverse is None and before is None):
            if before is not None:
                before.give_back()
            continue
        batch = batches[grad.device]
        if param is master:
            if before is not None and not before.value.is_sparse and not grad.is_sparse:
                batch.added.append(tuple(_values(param, part) for part in (grad, before.value, before.grad)))
                set_own_grad(param, before.grad)
                continue
            if is_scaled:
                batch.own.append(_values(param, grad))
            elif inverse is not None:
                batch.seen.append(_values(None, grad))
            if before is not None:
                sums.append((param, before.value))
            continue
        if master.device != grad.device:
            raise RuntimeError(
                f"scale_loss: a parameter of shape {list(param.shape)} is on {grad.device}, its master on "
                f"{master.device}; move the model to its device before initialize()"
            )
        if master.requires_grad is not param.requires_grad:  # the parameter was frozen or unfrozen after `initialize`
            master.requires_grad_(param.requires_grad)
        total: Tensor | None = master.grad
        if total is not None and not total.is_sparse and not grad.is_sparse:
            batch.added.append((grad, total, total))
        else:
            master.grad = _fp32_like(param, grad, batch)
            if total is not None:
                sums.append((master, total))
        set_own_grad(param, None)
    found = {place: batch.run(on_cpu if place.type == "cpu" else inverse, place) for place, batch in batches.items()}
    for master, total in sums:
        new: Any = master.grad
        master.grad = _sum(total, new)
    return found


def _brought(pairs: Pairs, inverse: Number | None) -> tuple[dict[Tensor, Tensor], Number | None]:
    """Return ({parameter: copy of the gradient}, `inverse`), on the host where masters are; waits for them once."""
    copies = {}
    for param, master in pairs:
        link = None if param is master else link_of(param)
        if link is not None and link.host is not None and (grad := on_host.gradient(param, link)) is not None:
            copies[param] = link.host.fetch(grad)
    on_cpu: Number | None = on_host.number(inverse) if copies else inverse
    on_host.arrive()
    return copies, on_cpu


@without_grad
def check_finite(grads: Iterable[Tensor], inverse: Number | None) -> FoundInf:
    """Return the overflow flags of `grads` times `inverse`, as `gather` does; write no gradient. No sync."""
    found: FoundInf = {}
    for device, (tensors,) in by_device((held(grad),) for grad in grads if inverse is not None).items():
        if device.type == "cpu":  # a copy of one that the device has freed
            on_host.arrive()
        found[device] = torch.zeros((), dtype=torch.float32, device=device)
        factor = inverse.to(device) if isinstance(inverse, Tensor) else 1.0
        multi_tensor.multi_tensor_check_finite(tensors, found[device], factor)
    return found


@without_grad
def clear_overflowed(params: Iterable[Tensor], found: FoundInf) -> None:
    """Zero the gradients of `params`, in place, on each device whose flag in `found` is set; no sync."""
    for param in params:
        grad = own_grad(param)
        if grad is not None and (found_inf := found.get(grad.device)) is not None:
            held(grad).masked_fill_(found_inf > 0, 0)


def held(grad: Tensor) -> Tensor:
    """Return the local elements of a gradient: the values of a sparse one, uncoalesced; the shard of a sharded one."""
    return grad._values() if grad.is_sparse else distributed.local(grad)


def rescale(pairs: Pairs, factor: Tensor) -> None:
    """Multiply the parameters' scaled gradients by `factor`, in place, after a change of the scale; no sync."""
    grads = [(_values(param, grad),) for param, _ in pairs if (grad := own_grad(param)) is not None]
    for device, (tensors,) in by_device(grads).items():
        ignored = torch.zeros((), dtype=torch.float32, device=device)
        multi_tensor.multi_tensor_unscale(tensors, factor.to(device), ignored)


class _Batch:
    """The gradients on one device that one `gather` unscales, in a list for each kind of kernel call."""

    def __init__(self) -> None:
        self.own: list[Tensor] = []
        self.seen: list[Tensor] = []  # only checked, not scaled
        self.fresh: list[tuple[Tensor, Tensor]] = []  # (scaled gradient, destination)
        self.added: list[tuple[Tensor, ...]] = []  # (scaled gradient, addend, destination)

    @without_grad
    def run(self, inverse: Number | None, device: torch.device) -> Tensor:
        found_inf = torch.zeros((), dtype=torch.float32, device=device)
        factor = inverse.to(device) if isinstance(inverse, Tensor) else 1.0
        watch = None if inverse is None else found_inf
        if self.own:
            multi_tensor.multi_tensor_unscale(self.own, factor, found_inf)
        if self.seen:
            multi_tensor.multi_tensor_check_finite(self.seen, found_inf)
        if self.fresh:
            sources, results = map(list, zip(*self.fresh, strict=True))
            multi_tensor.multi_tensor_scale(sources, results, factor, watch)
        if self.added:
            sources, earlier, sums = map(list, zip(*self.added, strict=True))
            # Only the new gradients are checked: an overflow in the earlier ones was flagged when they were made.
            multi_tensor.multi_tensor_axpby(factor, sources, 1.0, earlier, sums, watch, check="x")
        return found_inf


def _fp32_like(param: Tensor, grad: Tensor, batch: _Batch) -> Tensor:
    """Return the FP32 tensor, sparse if `grad` is, that `batch.run` fills with the unscaled `grad` of `param`."""
    if grad.is_sparse:
        sparse = grad.detach().to(torch.float32, copy=True).coalesce()
        batch.own.append(sparse._values())
        return sparse
    values = _values(param, grad)
    link = link_of(param)
    result = torch.empty_like(values, dtype=torch.float32) if link is None else link.memory.empty_like(values)
    batch.fresh.append((values, result))
    return result


def _sparse(like: Tensor, values: Tensor) -> Tensor:
    """Return a sparse tensor with the indices of `like`, which is coalesced, and the values `values`.

    Not by `torch.sparse_coo_tensor`: in torch 2.11 it warns that it checks nothing, even if checks are turned off.
    """
    result = like.to(values.dtype, copy=True)
    result._values().copy_(values)
    return result


def _values(param: Tensor | None, grad: Tensor) -> Tensor:
    """Return a gradient of `param` as dense real values, to be written in place; without `param`, only to be read.

    The values of a sparse gradient are coalesced first. For a sharded gradient, return the local shard.
    """
    if distributed.is_dtensor(grad):
        grad = distributed.local(grad)
    else:
        plain = grad.coalesce() if grad.is_sparse else grad.resolve_conj().resolve_neg()
        if param is not None and plain is not grad:
            set_own_grad(param, plain)
        grad = plain._values() if plain.is_sparse else plain
    if grad.requires_grad:
        grad = grad.detach()
    return torch.view_as_real(grad) if grad.dtype.is_complex else grad


def _sum(earlier: Tensor, new: Tensor) -> Tensor:
    """Return the sum of two gradients, one of them sparse.

    Torch adds a sparse tensor only to a dense one on its left, and does not add two sparse FP16 tensors on a CPU.
    """
    if earlier.is_sparse and new.is_sparse:
        return (earlier.float() + new.float()).to(new.dtype) if new.dtype in LOW_PRECISION else earlier + new
    return new + earlier if earlier.is_sparse else earlier + new
