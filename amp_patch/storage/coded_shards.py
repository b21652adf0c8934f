"""8-bit optimizer state of parameters sharded by `fully_shard`: each process stores the state of its local shards.

A read of this state returns a DTensor with the parameter's placements. The step runs on plain tensors, the local
shards. An elementwise optimizer needs no other elements, so the step uses the same kernels, and the same portions, as
without sharding.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from amp_patch.masters.masters import has_gradient
from amp_patch.storage.coded_state import Coded, CodedState, Coder
from amp_patch.storage.stand_ins import with_stand_ins
from amp_patch.support.distributed import is_dtensor, local
from amp_patch.support.generated_class import base_class
from amp_patch.ways.partial_step import PartialStep
from amp_patch.ways.per_parameter import is_registered

# Optimizers of torch.optim that are not elementwise, with the reason: stepping a shard of a parameter alone would give
# other numbers than stepping the parameter.
OVER_WHOLE_TENSORS = {
    "Adafactor": "it takes means over rows and columns of the gradient, and a norm of the whole",
    "Muon": "it multiplies the whole momentum by itself",
}


def reason_against(optimizer: Any) -> str | None:
    """Return why this (innermost) optimizer cannot step a shard of a parameter alone; None if it can."""
    base = base_class(optimizer)
    if is_registered(base):
        return "it is a registered class, of which nothing tells what its step does to a part of a parameter"
    return OVER_WHOLE_TENSORS.get(base.__name__)


# ----------------------------------------------------------------------------------------------------------------------
# The state


class ShardState(CodedState):
    """The state of a sharded parameter: the local shard of each state tensor, as codes or in FP32."""

    __slots__ = ("param",)

    def __init__(self, coder: Coder, param: Tensor, state: dict[str, Any]) -> None:
        self.param = param
        super().__init__(coder, {name: self._part(value) for name, value in state.items()})

    def _part(self, value: Any) -> Any:
        """Return the value to store: the local shard of a DTensor sharded like the parameter, any other as it is."""
        return local(value).detach() if isinstance(value, Tensor) and are_alike(value, self.param) else value

    def _whole(self, value: Any) -> Any:
        """Return `value` as user code reads it: as a DTensor if it has the local shard's shape, else `value` itself."""
        if type(value) is not Tensor or value.shape != local(self.param).shape:
            return value
        kind: Any = type(self.param)
        spec: Any = self.param._spec  # type: ignore[attr-defined]  # noqa: SLF001
        return kind(value, spec, requires_grad=False)  # `from_local` would move shards that are offloaded to the CPU

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        return value if self.coder.is_stepping else self._whole(value)

    def __setitem__(self, name: str, value: Any) -> None:
        value = self._part(value)
        kept = self.kept(name) if name in self else None
        if isinstance(value, Tensor) and type(kept) is Coded and kept.value is not None and value.is_set_to(kept.value):
            return  # assigned by `state["exp_avg"] *= 0.5`, which has multiplied `kept.value` in place
        super().__setitem__(name, value)

    def pop(self, name: str, *default: Any) -> Any:
        return self._whole(super().pop(name, *default))

    def in_fp32(self) -> dict[str, Any]:
        return {name: self._whole(value) for name, value in super().in_fp32().items()}


def state_of(coder: Coder, param: Tensor, state: dict[str, Any]) -> CodedState:
    """Return a CodedState for `param` (a ShardState if it is sharded), with the tensors and numbers of `state`."""
    return ShardState(coder, param, state) if is_dtensor(param) else CodedState(coder, state)


def are_alike(tensor: Any, param: Any) -> bool:
    """Tell whether the local shards of `tensor` and `param` match by index.

    Both are then DTensors of one shape, mesh and placements, none of which is partial.
    """
    return (
        is_dtensor(tensor)
        and is_dtensor(param)
        and tensor.shape == param.shape
        and tensor.placements == param.placements
        and tensor.device_mesh == param.device_mesh
        and not any(placement.is_partial() for placement in param.placements)
    )


# ----------------------------------------------------------------------------------------------------------------------
# The step


def of_parts(optimizer: Any, coder: Coder) -> PartialStep | None:
    """Return a step on plain parameters that share the memory of the local shards, with the settings and state of
    `optimizer`.

    Return None if no parameter with a gradient is sharded, or if a gradient has other placements than its parameter, as
    tensor parallelism may leave it. All processes get a step, or all get None.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    sharded = [param for param in params if is_dtensor(param) and has_gradient(param)]
    if not sharded or not all(are_alike(param.grad, param) for param in sharded):
        return None
    return with_stand_ins(optimizer, coder, part_of)


def part_of(param: Tensor) -> Tensor:
    """Return a plain parameter that shares the memory of the local shard; if `param` is not sharded, `param` itself."""
    if not is_dtensor(param):
        return param
    part = nn.Parameter(local(param).detach(), requires_grad=False)
    part.grad = None if param.grad is None else local(param.grad)
    return part
