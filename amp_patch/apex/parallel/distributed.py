"""`apex.parallel.distributed`: Apex's DistributedDataParallel, as a subclass of torch's, and its Reducer."""

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

# The argument of torch's DDP that turns the broadcast of buffers off, as in Apex. torch 2.13 has renamed it.
_BUFFERS = (
    "forward_sync_buffers" if "forward_sync_buffers" in inspect.signature(TorchDDP).parameters else "broadcast_buffers"
)


@torch.no_grad()
def flat_dist_call(tensors: Iterable[Tensor], call: Callable[..., Any], extra_args: Sequence[Any] = ()) -> None:
    """Run a collective of torch.distributed on all `tensors`, in place.

    `call(flat, *extra_args)` is called once for each dtype and device. If `call` is `distributed.all_reduce`, the sum
    is divided by the number of ranks.
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
    """An object whose `reduce()` averages gradients over the ranks.

    Args:
        module_or_grads_list: a module, or gradients in nested lists. The parameters of a module are broadcast from rank
            0 now, and `reduce` averages their gradients.
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
        """Average the gradients in place. The same parameters must have a gradient on every rank."""
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

    The constructor broadcasts the parameters from rank 0. Each backward averages the gradients over all ranks. Buffers
    are not broadcast. With amp, pass the model that `amp.initialize` returned. As in Apex, parameters may have no
    gradient, and each forward allows one backward that reduces.

    Args:
        module: a module on one device, with any backend of torch.distributed. If it has no trainable parameter, it is
            only broadcast.
        message_size: the number of elements of a bucket, the gradients that are reduced together.
        delay_allreduce, num_allreduce_streams, allreduce_communicators, allreduce_trigger_params,
        retain_allreduce_buffers, gradient_average_split_factor, prof: without effect, because torch chooses the times
            and streams of reductions. Combinations that Apex refused are refused.
        shared_param: refused, as in Apex.
        allreduce_always_fp32: reduce low-precision gradients in FP32.
        gradient_average: if False, gradients are summed over the ranks instead of averaged.
        gradient_predivide_factor: divide gradients by this factor before the sum, and by (number of ranks / factor)
            after it. If this and the two arguments above have their defaults, torch divides by the number of ranks
            before the sum. Apex divides after it, which differs only by over- and underflow in FP16.
        find_unused_parameters: if every parameter gets a gradient in every backward, False saves torch a walk through
            the graph. Apex has no such argument.

    Attributes:
        needs_refresh: True until the first forward after which backward reduces.
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
        """Switch the reduction of gradients off, from the next forward on: gradients add up on this rank."""
        self.require_backward_grad_sync = False

    def enable_allreduce(self) -> None:
        """Switch the reduction on from the next forward on, also for gradients that have added up on this rank."""
        self.require_backward_grad_sync = True


class _Sending(NamedTuple):
    """Apex's three arguments about the type and the division of reduced gradients, for the communication hook."""

    always_fp32: bool
    average: bool
    predivide: float


def _reduce(how: _Sending, bucket: distributed.GradBucket) -> Future[Tensor]:
    """Reduce one bucket of gradients: a communication hook of torch's DDP."""
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


_reduce.__annotations__.clear()  # torch compares annotations with types, and here they are strings
