"""`apex.parallel.distributed`: gradients averaged over the processes, with Apex's arguments, over torch's DDP."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as TorchDDP

__all__ = ["DistributedDataParallel", "Reducer", "flat_dist_call"]

# Apex leaves buffers to each process. torch 2.13 renames the argument that says so.
_BUFFERS = (
    "forward_sync_buffers" if "forward_sync_buffers" in inspect.signature(TorchDDP).parameters else "broadcast_buffers"
)


@torch.no_grad()
def flat_dist_call(tensors: Iterable[Tensor], call: Callable[..., Any], extra_args: Sequence[Any] = ()) -> None:
    """`call(flat, *extra_args)` of torch.distributed on all `tensors`, in place: one call per dtype and device.

    `distributed.all_reduce` is made a mean over the processes.
    """
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for group in groups.values():
        flat = _flatten_dense_tensors(group)
        call(flat, *(extra_args or ()))
        if call is distributed.all_reduce:
            flat /= distributed.get_world_size()
        for tensor, result in zip(group, _unflatten_dense_tensors(flat, group), strict=True):
            tensor.copy_(result)


class Reducer:
    """Averages gradients over the processes when told to.

    Args:
        module_or_grads_list: a module, whose parameters are made those of rank 0 now and whose gradients are averaged;
            or gradients, in lists nested as you like, that are averaged in place.
    """

    def __init__(self, module_or_grads_list: Any) -> None:
        self.module: nn.Module | None = None
        self.grads: list[Tensor] = []
        if isinstance(module_or_grads_list, nn.Module):
            self.module = module_or_grads_list
            flat_dist_call([param.data for param in self.module.parameters()], distributed.broadcast, (0,))
        else:
            _extract(module_or_grads_list, self.grads)

    def reduce(self) -> None:
        """Average in place; parameters without a gradient are left out, so the same on every process must have one."""
        grads = self.grads
        if self.module is not None:
            grads = [param.grad for param in self.module.parameters() if param.grad is not None]
        flat_dist_call(grads, distributed.all_reduce)


def _extract(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, Iterable):
        for item in value:
            _extract(item, found)


class DistributedDataParallel(TorchDDP):
    """torch's DistributedDataParallel with the arguments of Apex's.

    Parameters are made those of rank 0 now, gradients are averaged over all processes during backward, buffers stay as
    they are. Give it what `amp.initialize` returned. Parameters may go without a gradient, as in Apex. Each forward
    allows one backward that reduces, as in Apex.

    Args:
        module: on any one device, under any backend of torch.distributed. Without a trainable parameter it is only
            broadcast.
        message_size: elements of a bucket of gradients that are reduced together.
        delay_allreduce, num_allreduce_streams, allreduce_communicators, allreduce_trigger_params,
        retain_allreduce_buffers, gradient_average_split_factor, prof: accepted and without effect: torch finds when to
            reduce what, and on which stream. What Apex refused of them is refused.
        shared_param: refused, as in Apex.
        allreduce_always_fp32: send low-precision gradients as FP32.
        gradient_average: False sums over the processes.
        gradient_predivide_factor: divide by it before the sum, and multiply by it over the number of processes after.
            With the default and none of the two above, torch divides all before the sum, Apex after: the same but for
            over- and underflow in FP16.
        find_unused_parameters: False spares torch a walk through the graph, where every parameter gets a gradient from
            every backward. Not in Apex.

    Attributes:
        needs_refresh: True until the first forward that prepares a reduction.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10000000,
        delay_allreduce: bool = False,
        shared_param: Any = None,
        allreduce_trigger_params: Any = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: Any = None,
        prof: bool = False,
        *,
        find_unused_parameters: bool = True,
    ) -> None:
        if shared_param is not None:
            raise ValueError("DistributedDataParallel: shared_param is no longer an option; leave it out")
        if delay_allreduce and (allreduce_trigger_params is not None or num_allreduce_streams > 1):
            raise ValueError(
                "DistributedDataParallel: allreduce_trigger_params and num_allreduce_streams are for reductions during "
                "backward; use delay_allreduce=False with them"
            )
        if not gradient_predivide_factor > 0:
            raise ValueError(
                f"DistributedDataParallel: gradient_predivide_factor is {gradient_predivide_factor!r}; wanted a "
                "positive number"
            )
        trainable = [param for param in module.parameters() if param.requires_grad]
        if trainable:
            buffers: dict[str, Any] = {_BUFFERS: False}
            widest = max(param.element_size() for param in trainable)
            super().__init__(
                module,
                bucket_cap_mb=message_size * widest / 2**20,
                find_unused_parameters=find_unused_parameters,
                **buffers,
            )
            if allreduce_always_fp32 or not gradient_average or gradient_predivide_factor != 1.0:
                self.register_comm_hook(
                    _Sending(allreduce_always_fp32, gradient_average, gradient_predivide_factor), _reduce
                )
        else:  # torch's constructor refuses a module without trainable parameters
            nn.Module.__init__(self)
            self.module = module
            flat_dist_call([param.data for param in module.parameters()], distributed.broadcast, (0,))
        self.reduces = bool(trainable)
        self.message_size = message_size
        self.delay_allreduce = delay_allreduce
        self.allreduce_always_fp32 = allreduce_always_fp32
        self.gradient_average = gradient_average
        self.gradient_predivide_factor = gradient_predivide_factor
        self.needs_refresh = True

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the module's result. With grad mode on, outside of `no_sync`, the next backward reduces."""
        if not self.reduces:
            return self.module(*inputs, **kwargs)
        output = super().forward(*inputs, **kwargs)
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self.needs_refresh = False
        return output

    def disable_allreduce(self) -> None:
        """Let gradients add up on this process, from the next forward on."""
        self.require_backward_grad_sync = False

    def enable_allreduce(self) -> None:
        """Average gradients again from the next forward on, including gradients that have added up in between."""
        self.require_backward_grad_sync = True


class _Sending(NamedTuple):
    """Apply Apex's three arguments about the type that is sent and about the division."""

    always_fp32: bool
    average: bool
    predivide: float


def _reduce(how: _Sending, bucket: distributed.GradBucket) -> Future[Tensor]:
    """The communication hook of one bucket of gradients."""
    flat = bucket.buffer()
    sent = flat.float() if how.always_fp32 else flat
    if how.predivide != 1.0:
        sent.mul_(1.0 / how.predivide)
    work = distributed.all_reduce(sent, async_op=True)
    assert work is not None

    def finish(future: Future[list[Tensor]]) -> Tensor:
        total = future.value()[0]
        if how.average:
            total.mul_(how.predivide / distributed.get_world_size())
        return flat.copy_(total)

    return work.get_future().then(finish)


_reduce.__annotations__.clear()  # torch compares a hook's annotations with its own types, and these are strings
