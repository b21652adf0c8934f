"""Masters: the FP32 weights that an optimizer updates in place of a model's low-precision ones.

A parameter without a master is its own master. That one rule serves every level: O0, O1 and O3 have no other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amp_patch import links, multi_tensor
from amp_patch.policy import LOW_PRECISION
from amp_patch.support import distributed
from amp_patch.support.blocks import without_grad
from amp_patch.support.patches import Attempts

Groups = list[dict[str, Any]]
FoundInf = dict[torch.device, Tensor]


class Masters:
    """The parameters of one optimizer as pairs (param, master), and what moves between the two.

    The optimizer's groups hold the masters, in the user's order; the only state here is the way back from a master to
    the model's parameter. Methods are handed the groups, so that nothing has to be kept in step with them.
    """

    def __init__(self) -> None:
        self._params: dict[int, links.Linked] = {}  # id(master) -> the parameter and its link to this master

    def __getstate__(self) -> list[tuple[Tensor, Tensor]]:
        return [(param, link.master) for param, link in self._params.values()]

    def __setstate__(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        self._params = {id(master): (param, links.connect(param, master)) for param, master in pairs}

    def pairs(self, groups: Groups) -> list[tuple[Tensor, Tensor]]:
        """(param, master) for every parameter in `groups`; the same tensor twice where it is its own master."""
        params = self._params
        return [
            (params[id(master)][0] if id(master) in params else master, master)
            for group in groups
            for master in group["params"]
        ]

    def linked(self) -> list[links.Linked]:
        """The parameters that have a master, with their links."""
        return list(self._params.values())

    def attach(self, optimizer: Any, group: dict[str, Any], about_to_be_cast: Collection[int] = ()) -> None:
        """Put masters into one of the optimizer's groups, in place.

        A parameter whose id is in `about_to_be_cast` gives its FP32 storage to its master: the caller gives the
        parameter a low-precision one next. A parameter that is float16 or bfloat16 already gets the master that it
        has, or an FP32 copy. The optimizer's state and an existing gradient move to the master.
        """
        params = group["params"]
        for index, param in enumerate(params):
            if id(param) not in about_to_be_cast and param.dtype not in LOW_PRECISION:
                continue
            master = links.master_of(param)  # another optimizer's, maybe
            if master is None:
                # `.data`, since a detached tensor would share the parameter's version counter too
                master = nn.Parameter(param.data.float(), requires_grad=param.requires_grad)
            self._params[id(master)] = (param, links.connect(param, master))
            _replace(optimizer, params, index, master)
            if param.grad is not None:
                master.grad, param.grad = param.grad.to(master.dtype), None

    def detach(self, optimizer: Any) -> None:
        """The way back: the parameters in the groups, with their state, and their gradients if they are FP32 again."""
        attempt = Attempts()
        for group in optimizer.param_groups:
            attempt(self._detach_group, optimizer, group)
        self._params.clear()
        attempt.finish()

    def _detach_group(self, optimizer: Any, group: dict[str, Any]) -> None:
        params = group["params"]
        for index, master in enumerate(params):
            param = self._param_of(master)
            if param is not master:
                _replace(optimizer, params, index, param)
                if param.dtype is master.dtype:
                    param.grad = master.grad

    def follow(self, wrapper: Any) -> None:
        """Move what `wrapper`, around an optimizer with these masters, keeps for the parameters to the masters."""
        for param, link in self._params.values():
            _rekey(wrapper, param, link.master)

    def unfollow(self, wrapper: Any) -> None:
        """Undo `follow`."""
        for param, link in self._params.values():
            _rekey(wrapper, link.master, param)

    def _param_of(self, master: Tensor) -> Tensor:
        known = self._params.get(id(master))
        return master if known is None else known[0]


class Earlier(NamedTuple):
    """A gradient that was taken off a parameter, so that the next backward adds nothing to it.

    Attributes:
        grad: the tensor that the parameter had, and gets back.
        value: what it held: itself, or a copy where the next backward may write into its memory.
    """

    grad: Tensor
    value: Tensor


_NONE: Mapping[int, Earlier] = MappingProxyType({})


def take(param: Tensor) -> Earlier | None:
    """Take the gradient off `param`, which has none then; None if it had none."""
    grad = param.grad
    if grad is None:
        return None
    if grad.is_neg() or grad.is_conj():
        grad = grad.resolve_conj().resolve_neg()
    # A part of a DDP's bucket, into which that reduces the next gradient.
    earlier = Earlier(grad, grad.clone() if grad._is_view() else grad)
    param.grad = None  # last: an exception in here leaves it
    return earlier


@torch.no_grad()
def put_back(param: Tensor, earlier: Earlier) -> None:
    """Give `param` the gradient that was taken, bit for bit, in place of what it has."""
    if earlier.value is not earlier.grad:
        earlier.grad.copy_(earlier.value)
    param.grad = earlier.grad


@torch.no_grad()
def put_back_scaled(param: Tensor, earlier: Earlier, scale: Tensor) -> Earlier:
    """Add what was taken, times `scale` (FP32, shape []), to the scaled gradient of `param`; no sync.

    Returns:
        What must be added when that is unscaled: the elements that overflow when they are scaled, or did before, which
        would pass for an overflow of the gradients that are scaled now. 0 elsewhere.
    """
    new, value = param.grad, earlier.value
    if value.is_sparse:
        value = value.coalesce()
        held, rest = (_sparse(value, part) for part in _split(value._values(), scale))
        param.grad = held if new is None else _sum(held, new)
        return Earlier(param.grad, rest)
    held, rest = _split(_values(param, value), scale)
    if new is not None and not new.is_sparse:
        held = _values(param, new) + held
    _values(param, earlier.grad).copy_(held)
    param.grad = earlier.grad if new is None or not new.is_sparse else _sum(earlier.grad, new)
    return Earlier(param.grad, rest)


def _split(values: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """`values * scale` where that is finite, and `values` elsewhere."""
    wide = values if values.dtype is torch.float64 else values.float()
    scaled = (wide * scale.to(values.device)).to(values.dtype)
    finite = scaled.isfinite()
    return torch.where(finite, scaled, 0.0), torch.where(finite, 0.0, values)


def gather(
    pairs: Iterable[tuple[Tensor, Tensor]],
    inverse: Tensor | None,
    *,
    keep: bool = False,
    earlier: Mapping[int, Earlier] = _NONE,
) -> FoundInf:
    """Turn the scaled gradients of the parameters into unscaled ones of their masters; no sync.

    With a master: `master.grad = param.grad * inverse [+ master.grad]` in FP32, and `param.grad` becomes None, unless
    `keep` leaves it as it is.
    A parameter that is its own master: `param.grad = param.grad * inverse [+ what was taken off it]`, in place; what
    was taken comes back as it was where there is no other. One fused pass each.

    Args:
        pairs: (param, master), each parameter once.
        inverse: FP32, shape []; None for a scale of 1 whose gradients nobody checks.
        earlier: by the parameter's id what `take` took off those that are their own master.

    Returns:
        Per device an FP32 tensor of one element: 1.0 if a scaled gradient there was not finite (earlier ones were
        checked when they were made). Of sharded gradients this process's shards count: `shards.agree` tells others.
    """
    batches: dict[torch.device, _Batch] = {}
    sums: list[tuple[Tensor, Tensor]] = []  # (master, its earlier gradient): where one of the two is sparse
    for param, master in pairs:
        grad = param.grad
        before = earlier.get(id(param)) if earlier else None
        if grad is None or (param is master and inverse is None and before is None):
            if before is not None:
                put_back(param, before)
            continue
        device = grad.device
        batch = batches.get(device)
        if batch is None:
            batch = batches[device] = _Batch()
        if param is master:
            if before is not None and not before.value.is_sparse and not grad.is_sparse:
                batch.added.append(tuple(_values(param, part) for part in (grad, before.value, before.grad)))
                param.grad = before.grad
                continue
            batch.own.append(_values(param, grad))
            if before is not None:
                sums.append((param, before.value))
            continue
        if master.device != device:
            raise RuntimeError(
                f"scale_loss: a parameter of shape {list(param.shape)} is on {device}, its master on {master.device}; "
                "move the model to its device before initialize()"
            )
        if master.requires_grad is not param.requires_grad:  # it may have been frozen when initialize saw it
            master.requires_grad_(param.requires_grad)
        total: Tensor | None = master.grad
        if total is not None and not total.is_sparse and not grad.is_sparse:
            batch.added.append((grad, total, total))
        else:
            master.grad = _fp32_like(param, grad, batch)
            if total is not None:
                sums.append((master, total))
        if not keep:
            param.grad = None
    found = {device: batch.run(inverse, device) for device, batch in batches.items()}
    for master, total in sums:
        assert master.grad is not None
        master.grad = _sum(total, master.grad)
    return found


def rescale(pairs: Iterable[tuple[Tensor, Tensor]], factor: Tensor) -> None:
    """Multiply the gradients of the parameters in place; no sync."""
    grads: dict[torch.device, list[Tensor]] = {}
    for param, _ in pairs:
        grad = param.grad
        if grad is not None:
            grads.setdefault(grad.device, []).append(_values(param, grad))
    for device, tensors in grads.items():
        ignored = torch.zeros((), device=device)
        multi_tensor.multi_tensor_unscale(tensors, factor.to(device), ignored)


class _Batch:
    """The lists of one gather on one device."""

    def __init__(self) -> None:
        self.own: list[Tensor] = []
        self.fresh: list[tuple[Tensor, Tensor]] = []  # (scaled, where the unscaled goes)
        self.added: list[tuple[Tensor, ...]] = []  # (scaled, what the unscaled is added to, where that goes)

    @without_grad
    def run(self, inverse: Tensor | None, device: torch.device) -> Tensor:
        found_inf = torch.zeros((), device=device)
        factor = 1.0 if inverse is None else inverse.to(device)
        watch = None if inverse is None else found_inf
        if self.own and inverse is not None:
            multi_tensor.multi_tensor_unscale(self.own, factor, found_inf)
        if self.fresh:
            sources, results = map(list, zip(*self.fresh, strict=True))
            multi_tensor.multi_tensor_scale(sources, results, factor, watch)
        if self.added:
            sources, earlier, sums = map(list, zip(*self.added, strict=True))
            # Only the new gradients are watched: an overflow in the earlier ones was flagged when they were made.
            multi_tensor.multi_tensor_axpby(factor, sources, 1.0, earlier, sums, watch, check="x")
        return found_inf


def _fp32_like(param: Tensor, grad: Tensor, batch: _Batch) -> Tensor:
    """An FP32 tensor for the unscaled `grad` of `param`, sparse as that is; `batch` will fill it."""
    if grad.is_sparse:
        grad = grad.coalesce()
    values = _values(param, grad)
    link = None if grad.is_sparse else links.link_of(param)
    result = torch.empty_like(values, dtype=torch.float32) if link is None else link.gradients.empty_like(values)
    batch.fresh.append((values, result))
    if not grad.is_sparse:
        return result
    return _sparse(grad, result)


def _sparse(like: Tensor, values: Tensor) -> Tensor:
    """A tensor with the indices of `like`, which is coalesced."""
    return torch.sparse_coo_tensor(like.indices(), values, like.shape, check_invariants=False, is_coalesced=True)


def _values(param: Tensor, grad: Tensor) -> Tensor:
    """A gradient of `param` as dense real values, to be written in place: of a sparse one its values, coalesced first.

    Of a sharded one what this process holds.
    """
    if distributed.is_dtensor(grad):
        grad = distributed.local(grad)
    elif grad.is_sparse:
        if not grad.is_coalesced():
            param.grad = grad = grad.coalesce()
        grad = grad._values()
    elif grad.is_neg() or grad.is_conj():
        param.grad = grad = grad.resolve_conj().resolve_neg()
    if grad.requires_grad:
        grad = grad.detach()
    return torch.view_as_real(grad) if grad.dtype.is_complex else grad


def _sum(earlier: Tensor, new: Tensor) -> Tensor:
    """The sum of two gradients one of which is sparse; torch adds to a dense one only."""
    return new + earlier if earlier.is_sparse and not new.is_sparse else earlier + new


def _replace(optimizer: Any, params: list[Tensor], index: int, new: Tensor) -> None:
    old, params[index] = params[index], new
    _rekey(optimizer, old, new)


def _rekey(optimizer: Any, old: Tensor, new: Tensor) -> None:
    state = getattr(optimizer, "state", None)
    if state is not None and old in state:
        state[new] = state.pop(old)
