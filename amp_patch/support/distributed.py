"""What is asked of torch.distributed: this process's part of a tensor, overflow flags that all processes agree on."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

FoundInf = dict[torch.device, Tensor]

_PLAIN = {Tensor, nn.Parameter}  # the types that no DTensor has

# ---------------------------------------------------------------------------------------------------------------------
# DTensors.


def is_dtensor(tensor: Tensor) -> bool:
    """Whether `tensor` is one process's part of a larger one."""
    if type(tensor) in _PLAIN:
        return False
    dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return dtensor is not None and isinstance(tensor, dtensor)


def local(tensor: Tensor) -> Tensor:
    """The part of `tensor` that this process holds, as a plain tensor that shares its memory; else `tensor` itself."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        part: Any = tensor.to_local()  # type: ignore[attr-defined]
    return part.wait() if hasattr(part, "wait") else part  # AsyncCollectiveTensor: the collective may be running


def place_in_whole(tensor: Any) -> int | None:
    """The place, among all elements of a DTensor as they lie in a contiguous whole, of the first that is here.

    None where those that are here do not follow each other there: they are sharded along another dimension than the
    first, or twice.
    """
    sharded = [(dim, placement) for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if not sharded:
        return 0
    (dim, placement), *more = sharded
    if more or type(placement).__name__ != "Shard" or placement.dim != 0:  # `_StridedShard` is a Shard too
        return None
    count, mesh = tensor.shape[0], tensor.device_mesh
    rows = -(-count // mesh.size(dim))
    return min(mesh.get_local_rank(dim) * rows, count) * (tensor.numel() // max(count, 1))


def refuse(model: nn.Module, caller: str) -> None:
    """Raise if `model` has sharded parameters, of whose values and gradients `caller` would see a part or none."""
    if any(map(is_dtensor, model.parameters())):
        raise ValueError(
            f"{caller}: the parameters of this {type(model).__name__} are sharded (DTensors); give {caller} a copy of "
            "the model that is not, in one process"
        )


def agree(found: FoundInf, params: Iterable[Tensor]) -> FoundInf:
    """Let all processes that hold a part of `params` know of an overflow that one of them found; no sync.

    Each of them calls this with the same parameters. One all-reduce of four bytes for each dimension of their meshes.

    Args:
        found: per device an FP32 tensor of one element; may be overwritten.

    Returns:
        The same, equal on all processes. `found` itself where nothing is sharded.
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
    """Whether this process is the one that speaks for all: rank 0, or the only one."""
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
