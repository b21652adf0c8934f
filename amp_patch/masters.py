"""Masters: the FP32 weights that an optimizer updates in place of a model's low-precision ones.

A parameter without a master is its own master. That one rule serves every level: O0, O1 and O3 have no other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch import links, multi_tensor, shards
from amp_patch.policy import LOW_PRECISION

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
        for group in optimizer.param_groups:
            params = group["params"]
            for index, master in enumerate(params):
                param = self._param_of(master)
                if param is not master:
                    _replace(optimizer, params, index, param)
                    if param.dtype is master.dtype:
                        param.grad = master.grad
        self._params.clear()

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


def gather(pairs: Iterable[tuple[Tensor, Tensor]], inverse: Tensor | None, *, keep: bool = False) -> FoundInf:
    """Turn the scaled gradients of the parameters into unscaled ones of their masters; no sync.

    With a master: `master.grad = param.grad * inverse [+ master.grad]` in FP32, and `param.grad` becomes None, unless
    `keep` leaves it as it is.
    A parameter that is its own master: `param.grad *= inverse` in place. One fused pass each.

    Args:
        pairs: (param, master), each parameter once.
        inverse: FP32, shape []; None for a scale of 1 whose gradients nobody checks.

    Returns:
        Per device an FP32 tensor of one element: 1.0 if a gradient there was not finite. Of sharded gradients this
        process's shards count: `shards.agree` tells the others.
    """
    batches: dict[torch.device, _Batch] = {}
    sums: list[tuple[Tensor, Tensor]] = []  # (master, its earlier gradient): where one of the two is sparse
    for param, master in pairs:
        grad = param.grad
        if grad is None or (param is master and inverse is None):
            continue
        device = grad.device
        batch = batches.get(device)
        if batch is None:
            batch = batches[device] = _Batch()
        if param is master:
            batch.own.append(_values(param, grad))
            continue
        if master.device != device:
            raise RuntimeError(
                f"scale_loss: a parameter of shape {list(param.shape)} is on {device}, its master on {master.device}; "
                "move the model to its device before initialize()"
            )
        if master.requires_grad is not param.requires_grad:  # it may have been frozen when initialize saw it
            master.requires_grad_(param.requires_grad)
        earlier: Tensor | None = master.grad
        if earlier is not None and not earlier.is_sparse and not grad.is_sparse:
            batch.added.append((grad, earlier))
        else:
            master.grad = _fp32_like(param, grad, batch)
            if earlier is not None:
                sums.append((master, earlier))
        if not keep:
            param.grad = None
    found = {device: batch.run(inverse, device) for device, batch in batches.items()}
    for master, earlier in sums:
        assert master.grad is not None
        master.grad = earlier + master.grad
    return found


def rescale(pairs: Iterable[tuple[Tensor, Tensor]], factor: Tensor, *, own_only: bool) -> None:
    """Multiply the gradients of the parameters (`own_only`: that are their own master) in place; no sync."""
    grads: dict[torch.device, list[Tensor]] = {}
    for param, master in pairs:
        grad = param.grad
        if grad is not None and (param is master or not own_only):
            grads.setdefault(grad.device, []).append(_values(param, grad))
    for device, tensors in grads.items():
        ignored = torch.zeros((), device=device)
        multi_tensor.multi_tensor_unscale(tensors, factor.to(device), ignored)


class _Batch:
    """The lists of one gather on one device."""

    def __init__(self) -> None:
        self.own: list[Tensor] = []
        self.fresh: list[tuple[Tensor, Tensor]] = []  # (scaled, where the unscaled goes)
        self.added: list[tuple[Tensor, Tensor]] = []  # (scaled, what the unscaled is added to)

    @torch.no_grad()
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
            sources, sums = map(list, zip(*self.added, strict=True))
            # Only the new gradients are watched: an overflow in the earlier ones was flagged when they were made.
            multi_tensor.multi_tensor_axpby(factor, sources, 1.0, sums, sums, watch, check="x")
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
    return torch.sparse_coo_tensor(grad.indices(), result, grad.shape, check_invariants=False, is_coalesced=True)


def _values(param: Tensor, grad: Tensor) -> Tensor:
    """The gradient as dense real values, to be written in place: of a sparse one its values, coalesced first.

    Of a sharded one what this process holds.
    """
    if shards.is_dtensor(grad):
        grad = shards.local(grad)
    elif grad.is_sparse:
        if not grad.is_coalesced():
            param.grad = grad = grad.coalesce()
        grad = grad._values()
    elif grad.is_neg() or grad.is_conj():
        param.grad = grad = grad.resolve_conj().resolve_neg()
    if grad.requires_grad:
        grad = grad.detach()
    return torch.view_as_real(grad) if grad.dtype.is_complex else grad


def _replace(optimizer: Any, params: list[Tensor], index: int, new: Tensor) -> None:
    old, params[index] = params[index], new
    _rekey(optimizer, old, new)


def _rekey(optimizer: Any, old: Tensor, new: Tensor) -> None:
    state = getattr(optimizer, "state", None)
    if state is not None and old in state:
        state[new] = state.pop(old)
