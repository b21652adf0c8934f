"""`combine_ddp`, an argument of `initialize` that Huawei has added to Apex; DeepSpeed's several processes need it.

Name, default and meaning are those of Ascend/apex (patch/npu.patch).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, distributed, nn

from amp_patch.apex.parallel.distributed import flat_dist_call
from amp_patch.frontend import master_params
from amp_patch.masters.masters import master_of, publish
from amp_patch.policy import boolean
from amp_patch.support.blocks import block
from amp_patch.support.scripts_line import frames
from amp_patch.training.innermost import as_list, innermost
from amp_patch.training.stash import stash_of

_DEEPSPEED = "deepspeed.runtime.engine"


def combines(combine_ddp: Any) -> bool | None:
    """Check Huawei's argument `combine_ddp` of `initialize`, and return it as a boolean, or None.

    Raises:
        TypeError: an invalid value.
        RuntimeError: combine_ddp without a process group; or no combine_ddp, and DeepSpeed has called `initialize` in
            one of several processes.
    """
    checked = boolean("combine_ddp", combine_ddp)
    together = distributed.is_available() and distributed.is_initialized()
    several = together and distributed.get_world_size() > 1
    if several and not checked and any(frame.f_globals.get("__name__") == _DEEPSPEED for frame in frames()):
        # DeepSpeed averages `param.grad` after scale_loss has unscaled and checked it. One process could skip a step
        # that another makes, and at O2 the masters would not receive the average.
        raise RuntimeError(
            "initialize: DeepSpeed averages gradients over the processes too late for apex.amp; add "
            '"combine_ddp": true to "amp" in its config, by which amp averages them over all processes in scale_loss'
        )
    if checked and not together:
        raise RuntimeError(
            "initialize: combine_ddp=True averages gradients over the processes, and there is no process group; call "
            "torch.distributed.init_process_group() first, or leave combine_ddp out"
        )
    return checked


# ---------------------------------------------------------------------------------------------------------------------
# combine_ddp: gradients averaged by amp itself, instead of by DistributedDataParallel.


@torch.no_grad()
def broadcast(models: Iterable[nn.Module], optimizers: Iterable[Any]) -> None:
    """Broadcast the parameters, and their masters if any, from rank 0."""
    models, optimizers = list(models), list(optimizers)
    params = {id(p): p for model in models for p in model.parameters()}
    masters = {id(p): p for optimizer in optimizers for p in master_params(optimizer)}
    own = [p for key, p in params.items() if key not in masters and master_of(p) is None]
    flat_dist_call([*masters.values(), *own], distributed.broadcast, (0,))
    for target in _innermost(optimizers):
        if (stash := stash_of(target)) is not None:
            publish(stash.masters.links)


def averages(optimizers: Any) -> bool:
    """Tell whether the training of these optimizers has combine_ddp."""
    found: list[Any] = [stash_of(target) for target in _innermost(optimizers)]
    return any(stash is not None and getattr(stash.properties, "combine_ddp", None) for stash in found)


@block
def averaged(scaling: AbstractContextManager[Tensor], optimizers: Any) -> Generator[Tensor, None, None]:
    """Run a body of `scale_loss`; at its end replace the model's scaled gradients by their mean over the ranks.

    All ranks must do this equally often. A parameter without a gradient gets a gradient of zeros first, as with
    Huawei's combined tensors. No sync with the device.
    """
    with scaling as scaled_loss:
        yield scaled_loss
        with torch.no_grad():
            _average(_innermost(optimizers))


def _average(targets: Iterable[Any]) -> None:
    """Average the gradients of the parameters of the optimizers `targets` over the ranks, in place."""
    params = {
        id(param): param
        for target in targets
        if (stash := stash_of(target)) is not None
        for param, _ in stash.masters.pairs(target.param_groups)
        if param.requires_grad
    }
    for param in params.values():
        if param.grad is None:
            param.grad = torch.zeros_like(param)
    grads: list[Tensor] = [param.grad for param in params.values() if param.grad is not None]
    if grads:
        # The gradients are divided before they are summed over the ranks, because the sum may overflow in FP16.
        torch._foreach_div_(grads, distributed.get_world_size())
        flat_dist_call(grads, _all_reduce)


def _all_reduce(flat: Tensor) -> None:
    distributed.all_reduce(flat)


def _innermost(optimizers: Any) -> list[Any]:
    """Return the innermost optimizer of each of `optimizers`, one optimizer or a list."""
    return [innermost(optimizer) for optimizer in as_list(optimizers) if optimizer is not None]
