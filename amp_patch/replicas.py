"""What torch's DistributedDataParallel does, as far as masters must follow.

What it makes equal on all processes when it wraps a model, the masters are too: it broadcasts the weights of the first process, low-precision ones at O2. The masters behind them would keep what each
process began with, rounded differently: equal weights, updated differently.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch.nn.parallel import distributed

from amp_patch import links
from amp_patch.patch import Patches

_FUNCTION = "_sync_module_states"  # by which torch's DDP broadcasts the weights, at construction
_patches = Patches()
_installed = False


def install() -> None:
    """Let torch's DistributedDataParallel broadcast masters with their weights; idempotent."""
    global _installed
    original = getattr(distributed, _FUNCTION, None)
    if _installed or original is None:
        return

    @functools.wraps(original)
    def with_masters(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        ignored = given["params_and_buffers_to_ignore"]
        synced = [param for name, param in given["module"].named_parameters() if name not in ignored]
        linked = links.linked(synced)
        if linked:
            masters = [link.master.detach() for _, link in linked]
            torch.distributed._broadcast_coalesced(
                given["process_group"], masters, given["broadcast_bucket_size"], given["src"]
            )
            links.publish(linked)
        return result

    _patches.set(distributed, _FUNCTION, with_masters)
    _installed = True


def gradients_stay_local() -> bool:
    """Whether the forward that runs is a DistributedDataParallel's inside its `no_sync()`.

    As in torch it is the forward that decides: the backward of what it computes will reduce nothing.
    """
    ddp = distributed.DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
    return ddp is not None and not ddp.require_backward_grad_sync


def uninstall() -> None:
    """Undo `install`."""
    global _installed
    _patches.remove()
    _installed = False
