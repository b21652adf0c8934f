"""`apex.parallel.sync_batchnorm`: batch norm with statistics over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["SyncBatchNorm", "convert_syncbn_model", "create_syncbn_process_group"]


class SyncBatchNorm(_BatchNorm):
    """A batch norm over all ranks with Apex's arguments; it runs on the CPU too, where torch's SyncBatchNorm raises.

    As in Apex it is no subclass of `torch.nn.SyncBatchNorm`, which torch's DistributedDataParallel refuses on the CPU.
    The result has the input's type; statistics are FP32. With one process, and in eval mode, it is a plain batch norm.

    Args:
        num_features, eps, momentum, affine, track_running_stats, process_group: as in torch.nn.SyncBatchNorm.
        channel_last: the channels are the input's last dimension, not its second.
        fuse_relu: apply ReLU to the result.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_group = process_group
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalize `input` of shape [N, C, ...], or [N, ..., C] if `channel_last`; add `z`, of that shape; apply ReLU.

        The last two are optional.
        """
        swap = self.channel_last and input.dim() > 2
        channels_second = input.movedim(-1, 1) if swap else input
        if input.device.type != "cpu":
            output = nn.SyncBatchNorm.forward(self, channels_second)  # type: ignore[arg-type]
        elif self.training and self._world_size() > 1:
            output = self._synchronised(channels_second)
        else:
            output = super().forward(channels_second)
        output = output.to(input.dtype)
        if swap:
            output = output.movedim(1, -1)
        if z is not None:
            output = output + z
        return F.relu(output) if self.fuse_relu else output

    # `forward` calls `nn.SyncBatchNorm.forward(self, ...)`, which needs these two methods of that class.
    _check_input_dim: Any = nn.SyncBatchNorm._check_input_dim
    _check_non_zero_input_channels: Any = nn.SyncBatchNorm._check_non_zero_input_channels

    def _world_size(self) -> int:
        if not (distributed.is_available() and distributed.is_initialized()):
            return 1
        return distributed.get_world_size(self.process_group)

    def _synchronised(self, input: Tensor) -> Tensor:
        """Return the batch norm over the inputs of all ranks, whose batch sizes may differ; two all-reduces."""
        self._check_input_dim(input)
        wide = input if input.dtype is torch.float64 else input.float()
        others = [0, *range(2, input.dim())]
        shape = [1, -1, *(1 for _ in others[1:])]
        count = wide.new_full((1,), input.numel() // input.shape[1])
        first = _Sum.apply(torch.cat([wide.sum(others), count]), self.process_group)
        mean, total = first[:-1] / first[-1], first[-1].detach()
        centred = wide - mean.view(shape)
        variance = _Sum.apply(centred.square().sum(others), self.process_group) / total
        if self.track_running_stats:
            self._track(mean.detach(), (variance * total / (total - 1)).detach())
        output = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            output = output * self.weight.view(shape) + self.bias.view(shape)
        return output

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        # A momentum of None means the average of all batches so far.
        share = 1.0 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
        for running, new in ((self.running_mean, mean), (self.running_var, variance)):
            assert running is not None
            running.lerp_(new.to(running.dtype), share)


class _Sum(torch.autograd.Function):
    """The sum of a tensor over all ranks. Its backward sums the gradients over all ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = tensor.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(grads[0], ctx.group), None


def convert_syncbn_model(module: nn.Module, process_group: Any = None, channel_last: bool = False) -> nn.Module:
    """Replace every batch norm in `module` by a `SyncBatchNorm`, in place; returns `module`.

    If `module` is itself a batch norm, return a new module. Parameters and buffers stay the same objects, so an
    optimizer or DistributedDataParallel that already holds them still works. The mode (training, eval) stays too.
    """
    return _convert(module, process_group, channel_last, {})


def _convert(module: nn.Module, process_group: Any, channel_last: bool, made: dict[int, nn.Module]) -> nn.Module:
    if id(module) in made:  # a module may be in two places
        return made[id(module)]
    result = made[id(module)] = module
    if isinstance(module, _BatchNorm):
        result = made[id(module)] = SyncBatchNorm(
            module.num_features,
            module.eps,
            module.momentum,
            module.affine,
            module.track_running_stats,
            process_group,
            channel_last=channel_last,
        ).train(module.training)
        result.weight, result.bias = module.weight, module.bias
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            setattr(result, name, getattr(module, name))
    for name, child in module.named_children():
        converted = _convert(child, process_group, channel_last, made)
        if converted is not child:
            setattr(module, name, converted)
    return result


def create_syncbn_process_group(group_size: int) -> Any:
    """Return this rank's process group of `group_size` consecutive ranks. For 0 return None, which means all ranks.

    Every rank must call this. `group_size` must divide the number of ranks.
    """
    if group_size == 0:
        return None
    world_size = distributed.get_world_size()
    if not 0 < group_size <= world_size or world_size % group_size:
        raise ValueError(
            f"create_syncbn_process_group: group_size is {group_size}; wanted a divisor of the {world_size} processes, "
            "or 0 for one group of all"
        )
    groups = [
        distributed.new_group(ranks=list(range(first, first + group_size)))
        for first in range(0, world_size, group_size)
    ]
    return groups[distributed.get_rank() // group_size]
