"""Support for torch's DataParallel and DistributedDataParallel: masters and loss scales follow the weights.

DDP broadcasts the weights of one process to all when it wraps a model, and when the last process leaves `join()`. At O2
these are low-precision weights. Without masters, the broadcast would give all processes equal weights but different
masters, which each process would update differently. Therefore masters are broadcast with the weights. Loss scales are
broadcast too, because gradients that DDP averages must have the same scale.

After an overflow all processes skip the step: DDP averages gradients before the exit checks them, so each process finds
the same infinite or NaN elements, and `decide` of training/overflow.py skips everywhere.

A DDP that exists before `initialize` (around the model, or inside it) has C++ hooks on the accumulation nodes of the
weights, and buckets of the old dtype. A cast of the weights removes these nodes, so the DDP gets new hooks and buckets.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Iterable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parallel import distributed as torch_ddp

from amp_patch.masters.masters import links_of, publish
from amp_patch.policy import Policy
from amp_patch.support import distributed
from amp_patch.support.patches import Installation, Patches
from amp_patch.training.loss_scaler import LossScaler
from amp_patch.training.training import Training

_DDP = torch_ddp.DistributedDataParallel
_FUNCTION = "_sync_module_states"  # torch's DDP broadcasts the weights by this function
_installation = Installation()
_known: WeakSet[Any] = WeakSet()  # the DDPs of this process
_scalers: WeakKeyDictionary[nn.Module, list[LossScaler]] = WeakKeyDictionary()


def check_ddp(
    models: Iterable[nn.Module], policy: Policy, kept: list[nn.Module], retyped: Collection[Tensor], process_group: Any
) -> None:
    """Raise ValueError if after `initialize` DDP could not reduce gradients, or would reduce only some of a model's.

    In the first case an option of the DDP keeps copies of parameters whose dtype changes. In the second, parameters of
    the model are outside of the DDPs in it: after an overflow of their gradients only one process would skip.

    Args:
        retyped: the parameters whose dtype `initialize` is to change.
    """
    for ddp in _that_reduce(retyped):
        if ddp.mixed_precision is not None or any(p in retyped for p in ddp._delay_all_reduce_params):
            option = "mixed_precision" if ddp.mixed_precision is not None else "delay_all_reduce_named_params"
            raise ValueError(
                f"initialize: a {type(ddp.module).__name__} is in a DistributedDataParallel with {option}=, and "
                f"opt_level {policy.opt_level!r} changes the type of its parameters, which that option keeps copies of:"
                " call initialize() first, then wrap the model, or leave the option out"
            )
    for model in models:
        inside = {p for module in model.modules() if isinstance(module, _DDP) for p in module.parameters()}
        if not inside or not policy.checks_gradients or process_group is not None:
            continue
        for key, param in model.named_parameters():
            if param.requires_grad and param not in inside and not distributed.is_dtensor(param):
                raise ValueError(
                    f"initialize: parameter {key!r} of {type(model).__name__} is in none of the model's "
                    "DistributedDataParallels, so that an overflow of its gradient would be one process's alone, which "
                    "would skip a step that the others take; pass process_group=torch.distributed.group.WORLD, or wrap "
                    "the whole model instead"
                )


def note_ddp(module: nn.Module, name: str, child: Any) -> None:
    """Note each DistributedDataParallel that is made: torch calls this hook when any module gets a submodule."""
    if isinstance(module, _DDP):
        _known.add(module)


def _that_reduce(params: Collection[Tensor]) -> list[Any]:
    """Return the DistributedDataParallels with a reducer that have any parameter of `params`.

    A DDP whose constructor raised has no reducer, and one of Apex without trained parameters needs none.
    """
    if not (params and torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    made = [ddp for ddp in list(_known) if hasattr(ddp, "reducer")]
    return [ddp for ddp in made if any(p in params for p in ddp.parameters())]


def reduce_anew(params: Collection[Tensor]) -> None:
    """Give new hooks and buckets to each DDP around a parameter of `params`, whose dtype has changed.

    Call it on all ranks, between a backward and the next forward. No rank waits for another.
    """
    if params:
        install()  # for a DDP that is not known yet: its next forward makes it new hooks
    for ddp in _that_reduce(params):
        _make_reducer(ddp)


def _make_reducer(ddp: Any) -> None:
    """Give `ddp` new hooks and buckets, as unpickling does, and register its communication hooks again."""
    builtin = str(ddp._get_ddp_logging_data().get("comm_hook")).removeprefix("BuiltinCommHookType.")
    hooks, ddp._comm_hooks = ddp._comm_hooks, []
    ddp._remove_autograd_hooks()  # weights that stay FP32 still have their hooks
    if ddp.static_graph:
        ddp._static_graph_delay_allreduce_enqueued = False  # the next backward is the reducer's first
    _DDP.__setstate__(ddp, dict(vars(ddp)))
    for hook, state in hooks:
        ddp.register_comm_hook(state, hook)
    if not hooks and (kind := torch.distributed.BuiltinCommHookType.__members__.get(builtin)) is not None:
        ddp._register_builtin_comm_hook(kind)


def enter_models(training: Training, models: list[nn.Module], targets: list[Any]) -> None:
    """If `training` has masters or checks gradients, let DDP broadcast them and its scales with the weights."""
    if targets and (training.policy.master_weights or training.policy.checks_gradients):
        _scalers.update(dict.fromkeys(models, training.scalers))
        install()


def install() -> None:
    """Patch DDP to broadcast masters and scales, and to note forwards without a reduction; idempotent.

    DataParallel's `replicate` is patched to copy edited masters back to the weights first.
    """
    _installation.install(_replace)


def _replace(patches: Patches) -> None:
    patches.on_remove(_scalers.clear)
    patches.on_remove(distributed.unreduced.clear)
    original = getattr(torch_ddp, _FUNCTION, None)
    if original is None:  # not in this torch
        return

    @functools.wraps(original)
    def with_masters(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        ignored = given["params_and_buffers_to_ignore"]
        synced = [param for name, param in given["module"].named_parameters() if name not in ignored]
        if links := links_of(synced):
            masters = [master.detach() for master in links.masters]
            torch.distributed._broadcast_coalesced(
                given["process_group"], masters, given["broadcast_bucket_size"], given["src"]
            )
            publish(links)
        _broadcast_scales(given["module"], given["process_group"], given["broadcast_bucket_size"], given["src"])
        return result

    patches.set(torch_ddp, _FUNCTION, with_masters)
    patches.set(_DDP, "_pre_forward", _noting(_DDP._pre_forward))
    patches.set(nn.DataParallel, "replicate", _of_edited_masters(nn.DataParallel.replicate))


def _broadcast_scales(module: nn.Module, process_group: Any, bucket_size: int, src: int) -> None:
    scalers = dict.fromkeys(s for m in module.modules() for s in _scalers.get(m, ()) if s.dynamic)
    if not scalers:
        return
    states = [scaler.state_dict() for scaler in scalers]
    device = next(module.parameters()).device  # where this group can broadcast
    scales = torch.tensor([state["loss_scale"] for state in states], dtype=torch.float32, device=device)
    counts = torch.tensor([state["unskipped"] for state in states], dtype=torch.int32, device=device)
    torch.distributed._broadcast_coalesced(process_group, [scales, counts], bucket_size, src)
    for scaler, loss_scale, unskipped in zip(scalers, scales.tolist(), counts.tolist(), strict=True):
        scaler.load_state_dict({"loss_scale": loss_scale, "unskipped": unskipped})


def _noting(pre_forward: Any) -> Any:
    """Return DDP's `_pre_forward`, which also notes whether the next backward pass leaves gradients on this rank.

    As in torch, the flag that `no_sync()` sets is read here, at each forward in grad mode.
    """

    @functools.wraps(pre_forward)
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self not in _known:  # made before the import of amp_patch, or unpickled: its weights may have been cast
            _known.add(self)
            _make_reducer(self)
        if torch.is_grad_enabled():
            (distributed.unreduced.discard if self.require_backward_grad_sync else distributed.unreduced.add)(self)
        return pre_forward(self, *args, **kwargs)

    return noting


def _of_edited_masters(replicate: Any) -> Any:
    """Return a DataParallel `replicate` that first copies edited masters back to the weights.

    Normally the forward copies them back, but `replicate` copies the weights before any forward begins.
    """

    @functools.wraps(replicate)
    def up_to_date(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for m in module.modules():
            if (links := getattr(vars(m).get("_amp"), "links", None)) is not None:
                links.publish_written(m)
        return replicate(self, module, *args, **kwargs)

    return up_to_date
