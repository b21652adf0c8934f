"""The option `master_device="cpu"`: what it refuses, and the copies of gradients that backward queues.

The copies themselves are in masters/on_host.py.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

from torch import Tensor, nn

from amp_patch import supported
from amp_patch.masters.grad_field import own_grad, set_own_grad
from amp_patch.masters.record import Record
from amp_patch.policy import Policy
from amp_patch.support.distributed import has_other_processes, is_dtensor, is_zero
from amp_patch.support.generated_class import base_class
from amp_patch.training.stash import Stash, stash_of


def check_models(models: list[nn.Module], policy: Policy, *_: Any) -> None:
    """Raise ValueError if masters are to be on the host, and are not whole, or a parameter of `models` is sharded."""
    if policy.master_device is None:
        return
    if policy.master_weights is not True:
        raise ValueError(
            f"initialize: master_device='cpu' is for whole FP32 masters, and master_weights is "
            f"{policy.master_weights!r}; leave one of the two at None"
        )
    if any(is_dtensor(p) for model in models for p in model.parameters()):
        raise ValueError(_not_for("sharded parameters", "FSDP2"))


def check_optimizer(optimizer: Any, policy: Policy) -> None:
    """Raise ValueError if masters are to be on the host, and `optimizer` is a ZeroRedundancyOptimizer."""
    if policy.master_device is not None and is_zero(optimizer):
        raise ValueError(_not_for("a ZeroRedundancyOptimizer", "ZeRO"))


def refuse_capture(optimizer: Any, stash: Stash) -> None:
    """Raise RuntimeError if masters are on the host: a CUDA graph cannot capture their step."""
    if stash.policy.master_device is not None:
        why = supported.reason("offload", "CUDA graphs")
        raise RuntimeError(
            f"{base_class(optimizer).__name__}.step: a CUDA graph is being captured, and master_device='cpu': {why}"
        )


def _not_for(what: str, surrounding: str) -> str:
    return f"initialize: master_device='cpu' is not for {what}: {supported.reason('offload', surrounding)}"


def enter(optimizer: Any, stash: Stash) -> None:
    """Let backward queue a copy of each complete gradient whose master is on the host, until the training is left."""
    around = stash.neighbours
    for param, record in stash.masters.links if stash.masters.links.on_host else ():
        if record.host is not None and not record.host.is_hooked:
            record.host.is_hooked = True
            hook = functools.partial(_gradient_is_whole, weakref.ref(optimizer), weakref.ref(record))
            around.undo.append(param.register_post_accumulate_grad_hook(hook).remove)
    if stash.masters.links.on_host and _forget not in around.before_backward:
        around.before_backward.append(_forget)


def _forget(_: Any, stash: Stash) -> None:
    """Before a body: forget copies of gradients that an exception has left behind."""
    for record in stash.masters.links.records:
        if record.host is not None:
            record.host.forget(freed=True)


def _gradient_is_whole(optimizer: weakref.ref[Any], record: weakref.ref[Record], param: Tensor) -> None:
    holder, known, grad = optimizer(), record(), own_grad(param)
    stash = None if holder is None else stash_of(holder)
    if stash is None or known is None or known.host is None or grad is None or has_other_processes():
        return
    body = stash.neighbours.body()
    if body is not None and not body.delay_unscale and known.host.take_early(grad):
        set_own_grad(param, None)
