"""The option `master_device="cpu"`: what it refuses, and the copies of gradients that backward queues.

The copies themselves are in masters/on_host.py.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

from torch import Tensor

from amp_patch import supported
from amp_patch.masters import on_host
from amp_patch.masters.grad_field import own_grad, set_own_grad
from amp_patch.masters.on_host import OnHost
from amp_patch.policy import Policy
from amp_patch.support.distributed import has_other_processes, is_dtensor, is_zero
from amp_patch.support.generated_class import base_class
from amp_patch.training.stash import Stash, stash_of


def check(optimizer: Any, policy: Policy) -> None:
    """Raise ValueError if masters are to be on the host, and `optimizer` or the masters of `policy` do not allow it."""
    if policy.master_device is None:
        return
    if policy.master_weights is not True:
        raise ValueError(
            f"initialize: master_device='cpu' is for whole FP32 masters, and master_weights is "
            f"{policy.master_weights!r}; leave one of the two at None"
        )
    sharded = any(is_dtensor(param) for group in optimizer.param_groups for param in group["params"])
    if sharded or is_zero(optimizer):
        name, surrounding = ("sharded parameters", "FSDP2") if sharded else ("a ZeroRedundancyOptimizer", "ZeRO")
        why = supported.reason("offload", surrounding)
        raise ValueError(f"initialize: master_device='cpu' is not for {name}: {why}")
    if any(group.get("capturable") for group in optimizer.param_groups):
        raise ValueError(
            f"initialize: master_device='cpu' is not for this {base_class(optimizer).__name__} with capturable=True, "
            "which steps on a device alone; make it with capturable=False"
        )


def refuse_capture(optimizer: Any, stash: Stash) -> None:
    """Raise RuntimeError if masters are on the host: a CUDA graph cannot capture their step."""
    if stash.policy.master_device is not None:
        on_host.refuse_capture(f"{base_class(optimizer).__name__}.step")


def enter(optimizer: Any, stash: Stash) -> None:
    """Let backward queue a copy of each complete gradient whose master is on the host, until the training is left."""
    links = stash.masters.links
    for param, record in links if links.on_host else ():
        if record.host is not None and param.requires_grad:  # torch takes no hook of others: the exit copies those
            hook = functools.partial(_gradient_is_whole, weakref.ref(optimizer), record.host)
            stash.neighbours.undo.append(param.register_post_accumulate_grad_hook(hook).remove)


def _gradient_is_whole(optimizer: weakref.ref[Any], host: OnHost, param: Tensor) -> None:
    stash, grad = stash_of(optimizer()), own_grad(param)
    body = None if stash is None or grad is None or has_other_processes() else stash.neighbours.body()
    if stash is None or grad is None or body is None or body.delay_unscale:
        return
    if host.take_early(grad, stash.masters.frees):
        set_own_grad(param, None)
