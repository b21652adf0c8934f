"""State in codes of parameters that torch's `fully_shard` has sharded: each process keeps that of its own elements.

Whoever reads such a state finds DTensors, laid out as the parameter. The step is made on plain tensors: an optimizer
that steps each element by itself steps the elements that are here, and need not know of the others. So the kernels,
and portions, are those of any training.
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

# Of torch.optim, those whose step of a part of a parameter is not the part of its step, with the reason.
OVER_WHOLE_TENSORS = {
    "Adafactor": "it takes means over rows and columns of the gradient, and a norm of the whole",
    "Muon": "it multiplies the whole momentum by itself",
}


def reason_against(optimizer: Any) -> str | None:
    """Why no part of a parameter can be stepped by itself by this (innermost) optimizer; None where it can."""
    base = base_class(optimizer)
    if is_registered(base):
        return "it is a registered class, of which nothing tells what its step does to a part of a parameter"
    return OVER_WHOLE_TENSORS.get(base.__name__)


# ----------------------------------------------------------------------------------------------------------------------
# The state


class ShardState(CodedState):
    """The state of a sharded parameter. It holds this process's part of each tensor, as codes or in FP32."""

    __slots__ = ("param",)

    def __init__(self, coder: Coder, param: Tensor, state: dict[str, Any]) -> None:
        self.param = param
        super().__init__(coder, {name: self._part(value) for name, value in state.items()})

    def _part(self, value: Any) -> Any:
        """What is kept of a value that somebody puts here: of one that is sharded as the parameter is its part."""
        return local(value).detach() if isinstance(value, Tensor) and are_alike(value, self.param) else value

    def _whole(self, value: Any) -> Any:
        """What somebody reads: a DTensor around a tensor of the shape that the parameter has here."""
        if type(value) is not Tensor or value.shape != local(self.param).shape:
            return value
        kind: Any = type(self.param)
        spec: Any = self.param._spec  # type: ignore[attr-defined]  # noqa: SLF001
        return kind(value, spec, requires_grad=False)  # `from_local` would move what fully_shard offloads to the CPU

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        return value if self.coder.is_stepping else self._whole(value)

    def __setitem__(self, name: str, value: Any) -> None:
        value = self._part(value)
        kept = self.kept(name) if name in self else None
        if isinstance(value, Tensor) and type(kept) is Coded and kept.value is not None and value.is_set_to(kept.value):
            return  # after `state["exp_avg"] *= 0.5`
        super().__setitem__(name, value)

    def pop(self, name: str, *default: Any) -> Any:
        return self._whole(super().pop(name, *default))

    def in_fp32(self) -> dict[str, Any]:
        return {name: self._whole(value) for name, value in super().in_fp32().items()}


def state_of(coder: Coder, param: Tensor, state: dict[str, Any]) -> CodedState:
    """What keeps the state of `param`, which may be sharded, in codes."""
    return ShardState(coder, param, state) if is_dtensor(param) else CodedState(coder, state)


def are_alike(tensor: Any, param: Any) -> bool:
    """Whether both are sharded alike, with no sum outstanding: element by element they lie on one process."""
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
    """An optimizer of plain parameters in the memory of the shards here; settings and state are those of `optimizer`.

    None where nothing is sharded, and where a gradient is not laid out as its parameter, as those of tensor parallelism
    may be: which of both is the same on all processes.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    sharded = [param for param in params if is_dtensor(param) and has_gradient(param)]
    if not sharded or not all(are_alike(param.grad, param) for param in sharded):
        return None
    return with_stand_ins(optimizer, coder, part_of)


def part_of(param: Tensor) -> Tensor:
    """A plain parameter in the memory of the part that is here; `param` itself where it is whole."""
    if not is_dtensor(param):
        return param
    part = nn.Parameter(local(param).detach(), requires_grad=False)
    part.grad = None if param.grad is None else local(param.grad)
    return part
