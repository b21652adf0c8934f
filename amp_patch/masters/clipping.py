"""Redirection of torch's gradient clipping: given low-precision parameters, it acts on their masters.

Torch's own function would clip the same gradients through `param.grad`, in up to ten times the time (docs/decisions.md
has the figures). The package's kernel computes the 2-norm of masters' gradients, and materializes no deferred ones. If
the gradients of the last iteration were clipped, the overflow check computes the norms of deferred ones in the same
pass. The clipping factor becomes another factor of the deferred gradients.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from amp_patch import multi_tensor
from amp_patch.masters import on_host
from amp_patch.masters.master import Master
from amp_patch.masters.masters import add_gradients, has_gradient, master_of
from amp_patch.multi_tensor.checks import DTYPES
from amp_patch.support import distributed
from amp_patch.support.patches import Installation, Patches, cell_of

_FUNCTIONS = ("clip_grad_norm_", "clip_grad_value_", "_clip_grads_with_norm_")
_installation = Installation()

# Called with the tensors whose gradients are about to be clipped; may raise.
before_clipping: list[Callable[[list[Tensor]], None]] = []


def install() -> None:
    """Patch torch's clipping functions (`_redirected`), also for scripts that imported them by name; idempotent."""
    _installation.install(_redirect)


def _redirect(patches: Patches) -> None:
    for name in _FUNCTIONS:
        function = getattr(clip_grad, name, None)
        if function is None:  # not in this torch
            continue
        cell = cell_of(function)
        if cell is not None:
            # Torch's function is a no_grad wrapper around a closure cell. Every reference to the function shares the
            # cell, also a script's import by name.
            patches.set_cell(cell, _redirected(cell.cell_contents, name))
            continue
        redirected = _redirected(function, name)
        for owner in (clip_grad, torch.nn.utils):
            patches.set(owner, name, redirected)


def _redirected(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def redirected(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        given_params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for subscriber in before_clipping:
            subscriber(given_params)
        holders = [_holder(p) for p in given_params]
        if name == "clip_grad_norm_":
            given = signature.bind(holders, *args, **kwargs)
            given.apply_defaults()
            norm = _clip_by_norm(holders, given.arguments)
            if norm is not None:
                return norm
        return function(holders, *args, **kwargs)

    return redirected


def _clip_by_norm(holders: list[Tensor], given: dict[str, Any]) -> Tensor | None:
    """Clip the gradients of `holders` as torch's `clip_grad_norm_` does with the arguments `given`, under no_grad.

    Syncs with the device if `error_if_nonfinite` is true, as torch's function does.

    Returns:
        The norm before clipping. None, with nothing changed, if torch must do it: norms other than the 2-norm, no
            gradients of masters, several devices, gradients that are sparse or sharded.
    """
    if float(given["norm_type"]) != 2.0:
        return None
    found = list(filter(has_gradient, holders))
    masters = [holder for holder in found if isinstance(holder, Master)]
    if not masters or len(set(found)) < len(found):
        return None
    add_gradients(masters)
    records = [record for master in masters if (record := master.record()) is not None and record.half is not None]
    tables: Any = list(dict.fromkeys(record.waiting for record in records))
    if sum(len(table.records) for table in tables) > len(records) or any(len(table.factors) > 1 for table in tables):
        tables = []  # only some deferred gradients are clipped, or for a second time: use FP32 ones
    own = _gradients(holder for holder in found if not isinstance(holder, Master))
    plain = _gradients(master for master in masters if not (tables and master.waits_alone()))
    everything = [*(grad for table in tables for grad in table.grads()), *plain, *own]
    deferred = len(everything) - len(own)
    devices = {g.device for g in everything[:deferred]}, {g.device for g in own}
    on_two = on_host.used and max(map(len, devices)) == 1  # of masters on the host, and of parameters without one
    if (len(devices[0] | devices[1]) > 1 and not on_two) or not all(map(_is_plain, everything)):
        return None
    norms = [table.norm_of_each() for table in tables]
    norms += [multi_tensor.multi_tensor_l2norm(grads, True)[1] for grads in (plain, own) if grads]
    norm = torch.linalg.vector_norm(torch.cat([each.to(norms[0].device) for each in norms] if on_two else norms))
    if given["error_if_nonfinite"] and not bool(norm.isfinite()):
        return None  # torch's function raises the error
    factor = (float(given["max_norm"]) / (norm + 1e-6)).clamp(max=1.0)
    for table in tables:
        table.factors.append(factor.float())
    for grads in (plain, own) if on_two else ([*plain, *own],):
        if grads:
            torch._foreach_mul_(grads, factor.to(grads[0].device))
    return norm


def _gradients(holders: Iterable[Tensor]) -> list[Tensor]:
    return [grad for holder in holders if (grad := holder.grad) is not None]


def _is_plain(grad: Tensor) -> bool:
    return grad.layout is torch.strided and grad.dtype in DTYPES and not distributed.is_dtensor(grad)


def _holder(param: Tensor) -> Tensor:
    """Return the master of `param` if that has a gradient, else `param`: the tensor whose gradient is clipped."""
    master = master_of(param)
    return param if master is None or not has_gradient(master) else master
