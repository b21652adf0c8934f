"""Helpers for torch.distributed: the local shard of a DTensor, and overflow flags reduced over all ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

FoundInf = dict[torch.device, Tensor]

# The DistributedDataParallels whose last forward in grad mode was without a reduction; around/ddp.py fills it.
unreduced: WeakSet[Any] = WeakSet()

_PLAIN = {Tensor, nn.Parameter}  # types that are no DTensor: tested first, because the test is cheap

# ---------------------------------------------------------------------------------------------------------------------
# DTensors.


def is_dtensor(tensor: Tensor) -> bool:
    """Tell whether `tensor` is a DTensor, one rank's shard of a larger tensor."""
    if type(tensor) in _PLAIN:
        return False
    dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return dtensor is not None and isinstance(tensor, dtensor)


def local(tensor: Tensor) -> Tensor:
    """Return a DTensor's local shard, a plain tensor that shares its memory; a plain `tensor` is returned as is."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        part: Any = tensor.to_local()  # type: ignore[attr-defined]
    return part.wait() if hasattr(part, "wait") else part  # AsyncCollectiveTensor: the collective may be running


def refuse(model: nn.Module, caller: str) -> None:
    """Raise ValueError if `model` has sharded parameters, because `caller` would see only one rank's values."""
    if any(map(is_dtensor, model.parameters())):
        raise ValueError(
            f"{caller}: the parameters of this {type(model).__name__} are sharded (DTensors); give {caller} a copy of "
            "the model that is not, in one process"
        )


def agree(found: FoundInf, params: Iterable[Tensor]) -> FoundInf:
    """Reduce overflow flags over all ranks that hold shards of `params`; no sync.

    Every such rank must call this with the same parameters. It makes one all-reduce of four bytes for each dimension of
    the parameters' meshes.

    Args:
        found: {device: FP32 flag of one element}; may be overwritten.
        params: the parameters whose gradients were checked.

    Returns:
        {device: FP32 flag}, equal on all ranks. `found` itself if no parameter is sharded.
    """
    params = list(params)
    if set(map(type, params)) <= _PLAIN:
        return found
    meshes = dict.fromkeys(param.device_mesh for param in params if is_dtensor(param))  # type: ignore[attr-defined]
    if not meshes:
        return found
    device = next(iter(found)) if found else torch.device(next(iter(meshes)).device_type)
    overall = torch.zeros((), dtype=torch.float32, device=device)
    for flag in found.values():
        overall = torch.maximum(overall, flag.to(device).reshape(()))
    groups = {id(group): (group, mesh.device_type) for mesh in meshes for group in mesh.get_all_groups()}
    for group, kind in groups.values():
        # Flags of gradients that are offloaded to the CPU are reduced on their mesh's devices.
        flag = overall if device.type == kind else overall.to(kind)
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=group)
        overall = flag.to(device)
    return {where: overall.to(where) for where in found} or {device: overall}


def is_first_rank() -> bool:
    """Tell whether this process is rank 0 or the only process. Only that process prints messages."""
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


# ---------------------------------------------------------------------------------------------------------------------
# torch's ZeroRedundancyOptimizer. Its module is looked up in `sys.modules`: without it there is no such optimizer.


def is_zero(optimizer: Any) -> bool:
    """Tell whether `optimizer` is a ZeroRedundancyOptimizer."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def stateful(optimizer: Any) -> Any:
    """Return the optimizer that keeps the state: the one inside a ZeroRedundancyOptimizer, else `optimizer` itself."""
    return optimizer.optim if is_zero(optimizer) and hasattr(optimizer, "optim") else optimizer


def has_other_processes() -> bool:
    """Tell whether torch.distributed runs with several processes."""
    dist = torch.distributed
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
