"""Questions about an optimizer of a training: diagnose/, run/ and comparison/ ask them, and do not read its stash."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from amp_patch.masters.closed_master import drop_joined, form_of, is_closed
from amp_patch.masters.grad_field import own_grad
from amp_patch.masters.master import Master
from amp_patch.masters.masters import kernel_tensors
from amp_patch.policy import Policy
from amp_patch.support import distributed
from amp_patch.training.innermost import innermost
from amp_patch.training.joints import Optimizer
from amp_patch.training.stash import Body, enabled_stash, stash_of


def policy_of(optimizer: Optimizer) -> Policy | None:
    """Return the policy of the training that `optimizer`, or the one inside of it, is in; None without a training."""
    stash = stash_of(innermost(optimizer))
    return stash.policy if stash is not None and stash.enabled else None


def pairs_of(optimizer: Optimizer) -> Sequence[tuple[Tensor, Tensor]]:
    """Return (parameter, master) for each tensor in the groups. A parameter without a master is its own."""
    if (stash := stash_of(optimizer)) is not None:
        return stash.masters.pairs(optimizer.param_groups)
    return [(param, param) for group in optimizer.param_groups for param in group["params"]]


def stored(masters: list[Tensor]) -> list[Tensor]:
    """Return the tensors that store the values of `masters`: of a compressed master its low half or its weight."""
    return kernel_tensors(masters).tensors


def body_of(optimizer: Optimizer) -> Body | None:
    """Return the running body of `scale_loss` of this optimizer; None if there is none."""
    stash = stash_of(optimizer)
    return None if stash is None else stash.neighbours.body()


def loss_scale_of(optimizer: Optimizer) -> float | None:
    """Return the scale of the training's first loss; None if the optimizer is in no training. Syncs."""
    stash = stash_of(optimizer)
    return stash.scalers[0].loss_scale() if stash is not None and stash.scalers else None


def has_made_gradients(optimizer: Optimizer) -> bool:
    """Tell whether a body of `scale_loss` has made gradients for the optimizer's next step."""
    stash = stash_of(innermost(optimizer))
    return stash is not None and stash.unscaled is not None


def had_bodies(optimizer: Optimizer) -> bool:
    """Tell whether a body of `scale_loss` of this optimizer has ever begun."""
    stash = stash_of(optimizer)
    return stash is not None and stash.bodies > 0


def has_stepped(optimizer: Optimizer) -> bool:
    """Tell at `step_ends` whether a training's step has ended: not an inner `step`, which a subclass's has called."""
    stash = enabled_stash(optimizer)
    return stash is not None and stash.step is None


def last_skip(optimizer: Optimizer) -> Tensor | float:
    """Return 1 if the optimizer has skipped its last step, else 0: as a tensor, if only the device knows."""
    stash = enabled_stash(optimizer)
    assert stash is not None
    return stash.device_skips[-1].overflow if stash.device_skips else float(stash.last_skipped)


def count_skips(optimizer: Optimizer) -> None:
    """Count in the loss scalers the steps that the device has skipped. Syncs."""
    if (stash := stash_of(optimizer)) is not None:
        stash.collect_device_skips(wait=True)


def gradients_of(tensors: Collection[Tensor]) -> list[Tensor]:
    """Return the gradients of parameters and masters, deferred ones too, as they are stored."""
    records = [record for tensor in tensors if isinstance(tensor, Master) and (record := tensor.record()) is not None]
    waiting = dict.fromkeys(record.waiting for record in records if record.half is not None)
    deferred = [grad for table in waiting if table is not None for grad in table.grads()]
    return deferred + [grad for tensor in tensors if (grad := own_grad(tensor)) is not None]


@torch.no_grad()
def fp32_values(
    optimizer: Optimizer, names: Mapping[int, str], read: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, `read(FP32 value)`) of each parameter that is in low precision, or would be at some level.

    `read` must return a copy. `names` has names of parameters by id. A parameter that is not in it gets the name known
    to `initialize`, or else its place in the parameter groups as name.
    """
    stash, policy = stash_of(optimizer), policy_of(optimizer)
    known = {} if stash is None else stash.names()
    pairs = iter(pairs_of(optimizer))
    for index, group in enumerate(optimizer.param_groups):
        for position, (param, master) in enumerate(next(pairs) for _ in group["params"]):
            form = form_of(master)
            if master.dtype is not torch.float32 or master.layout is not torch.strided or (form and not form.is_exact):
                continue  # among others a stochastically rounded weight, which has no FP32 value
            casts = policy is not None and policy.cast_model_type is not None
            if casts and param is master and not distributed.is_dtensor(param):
                continue  # for example of a batch norm, which stays FP32 at each level
            was_closed = is_closed(master) and not master.is_open  # type: ignore[attr-defined]
            name = names.get(id(param)) or known.get(param, f"group {index}, parameter {position}")
            yield name, read(distributed.local(master.detach()))
            if was_closed:
                drop_joined([master])  # at once, so that only one master is materialized at a time
