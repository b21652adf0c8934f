"""Masters and loss scales follow what torch's DataParallel and DistributedDataParallel do to a model.

DDP broadcasts the weights of one process to all when it wraps a model, and when the last process leaves `join()`. At O2
these are low-precision weights. The masters behind them would keep what each process had before: equal weights, which
each process would update differently. So masters are broadcast with the weights. So are loss scales: gradients that DDP
averages must be scaled alike.
"""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parallel import distributed as torch_ddp

from amp_patch.masters.masters import linked, publish
from amp_patch.policy import Policy
from amp_patch.support import distributed
from amp_patch.support.patches import Installation, Patches
from amp_patch.training.loss_scaler import LossScaler

_DDP = torch_ddp.DistributedDataParallel
_FUNCTION = "_sync_module_states"  # by which torch's DDP broadcasts the weights
_installation = Installation()
_scalers: WeakKeyDictionary[nn.Module, list[LossScaler]] = WeakKeyDictionary()


def check_ddp(models: Iterable[nn.Module], retyped: Collection[int], policy: Policy, process_group: Any) -> None:
    """Raise if a DistributedDataParallel that is inside of a model, or around it, could not go on reducing gradients.

    `retyped`: ids of the parameters whose type `initialize` would change.
    """
    around = _hooked_from_outside() if retyped else set()
    for model in models:
        name = type(model).__name__
        inside = {id(p) for module in model.modules() if isinstance(module, _DDP) for p in module.parameters()}
        for key, param in model.named_parameters():
            if id(param) in retyped and id(param) in inside | around:
                raise ValueError(
                    f"initialize: parameter {key!r} of {name} is in a DistributedDataParallel already, and opt_level "
                    f"{policy.opt_level!r} changes its type: autograd would forget DDP's hooks, and the processes "
                    "drift apart; call initialize() first, then wrap the model or its part, or keep that part in FP32 "
                    "(keep_fp32)"
                )
            if not inside or not policy.scales_loss or process_group is not None or distributed.is_dtensor(param):
                continue
            if param.requires_grad and id(param) not in inside:
                raise ValueError(
                    f"initialize: parameter {key!r} of {name} is in none of the model's DistributedDataParallels, so "
                    "that an overflow of its gradient would be one process's alone, which would skip a step that the "
                    "others take; pass process_group=torch.distributed.group.WORLD, or wrap the whole model instead"
                )


def _hooked_from_outside() -> set[int]:
    """The ids of the parameters of all DistributedDataParallels of this process.

    Nothing leads from a parameter to the DDP around it, so that the garbage collector is asked for all of them.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return set()
    if any(issubclass(type(found), _DDP) for found in gc.get_objects()):
        gc.collect()  # some may be garbage
    return {id(p) for found in gc.get_objects() if issubclass(type(found), _DDP) for p in found.parameters()}


def follow(models: Iterable[nn.Module], scalers: list[LossScaler]) -> None:
    """Let the scales of `scalers` be broadcast with the weights of `models`, which their losses train."""
    for model in models:
        _scalers[model] = scalers
    install()


def install() -> None:
    """Let torch's DDP broadcast masters and scales, and tell models of `no_sync()`; idempotent.

    DataParallel's `replicate` publishes edited masters first.
    """
    _installation.install(_replace)


def _replace(patches: Patches) -> None:
    patches.on_remove(_scalers.clear)
    original = getattr(torch_ddp, _FUNCTION, None)
    if original is None:  # not in this torch
        return

    @functools.wraps(original)
    def with_masters(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        ignored = given["params_and_buffers_to_ignore"]
        synced = [param for name, param in given["module"].named_parameters() if name not in ignored]
        pairs = linked(synced)
        if pairs:
            masters = [link.master.detach() for _, link in pairs]
            torch.distributed._broadcast_coalesced(
                given["process_group"], masters, given["broadcast_bucket_size"], given["src"]
            )
            publish(pairs)
        _broadcast_scales(given["module"], given["process_group"], given["broadcast_bucket_size"], given["src"])
        return result

    patches.set(torch_ddp, _FUNCTION, with_masters)
    patches.set(_DDP, "no_sync", _telling(_DDP.no_sync))
    patches.set(nn.DataParallel, "replicate", _of_edited_masters(nn.DataParallel.replicate))


def _broadcast_scales(module: nn.Module, process_group: Any, bucket_size: int, src: int) -> None:
    scalers = {id(s): s for m in module.modules() for s in _scalers.get(m, ()) if s.dynamic}.values()
    if not scalers:
        return
    states = [scaler.state_dict() for scaler in scalers]
    values = torch.tensor([[state["loss_scale"], state["unskipped"]] for state in states], dtype=torch.float64)
    values = values.to(next(module.parameters()).device)  # where this group can broadcast
    torch.distributed._broadcast_coalesced(process_group, [values], bucket_size, src)
    for scaler, (loss_scale, unskipped) in zip(scalers, values.tolist(), strict=True):
        scaler.load_state_dict({"loss_scale": loss_scale, "unskipped": unskipped})


def _telling(no_sync: Any) -> Any:
    """DDP's `no_sync`, which tells the models inside of the DDP and around it.

    Each notes in its forward whether `no_sync()` is entered: as in torch, the forward decides what backward reduces.
    """

    @functools.wraps(no_sync)
    @contextmanager
    def telling(self: Any) -> Iterator[None]:
        inside = {id(m): m for m in self.module.modules()}
        around = [m for m in list(_scalers) if id(m) not in inside and any(part is self for part in m.modules())]
        models = (*inside.values(), *around)
        states = [state for m in models if hasattr(state := vars(m).get("_amp"), "no_sync")]
        before = [state.no_sync for state in states]
        with no_sync(self):
            for state in states:
                state.no_sync = True
            try:
                yield
            finally:
                for state, earlier in zip(states, before, strict=True):
                    state.no_sync = earlier

    return telling


def _of_edited_masters(replicate: Any) -> Any:
    """DataParallel's `replicate`, which publishes edited masters first.

    It copies the weights before any forward, which would do that, has begun.
    """

    @functools.wraps(replicate)
    def up_to_date(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for m in module.modules():
            if (edits := getattr(vars(m).get("_amp"), "edits", None)) is not None:
                edits.publish(m)
        return replicate(self, module, *args, **kwargs)

    return up_to_date
