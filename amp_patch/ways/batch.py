"""`Batch`: the parameters of one kernel call, with the tensors and settings that the kernel reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, ClassVar

import torch
from torch import Tensor

from amp_patch.masters.record import Record
from amp_patch.multi_tensor.checks import Number
from amp_patch.optimizers.adam import FusedAdam

Group = dict[str, Any]
SENT_TOGETHER = 16  # masters on the host: weights of so many parameters go to the device while the next are stepped


class NotKnown(Exception):
    """The error for a setting or state that the kernels do not support: the optimizer's own code makes the step."""


@dataclass(eq=False)
class Batch:
    """Parameters of one group that one kernel call steps. Their gradients have one dtype; all or none are scaled.

    Attributes:
        group: the optimizer's param group, with the settings.
        factors: the numbers that the kernel multiplies the gradients by.
        masters: the tensors of the group: FP32 masters, or parameters without a separate master.
        grads: the gradients: in low precision and still scaled, or FP32.
        weights: the model's weights, which receive the rounded results; empty if no parameter has a separate master.
        records: the records of the weights.
        first_run: whether the momentum buffers do not exist yet.
        stepped: the tensors that the kernel writes for the masters (`kernel_tensors`).
        seed, draws: the arguments of stochastic rounding, if `stepped` are BF16 weights.
    """

    group: Group
    factors: Sequence[Number]
    masters: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    first_run: bool = False
    stepped: list[Tensor] = field(default_factory=list)
    seed: int = 0
    draws: Sequence[int] = ()

    extra: ClassVar[Any] = {}  # further arguments of the kernels
    getter = itemgetter  # getter(name)(state of a master) -> the tensor that the kernel takes

    def made(self, optimizer: Any, name: str) -> list[Tensor]:
        """Add an uninitialized state tensor `name` for each master; return the new tensors."""
        made = [torch.empty_like(master, requires_grad=False) for master in self.masters]
        for master, tensor in zip(self.masters, made, strict=True):
            optimizer.state[master][name] = tensor
        return made

    def averages(self, optimizer: FusedAdam, name: str) -> list[Tensor]:
        """Return the state tensor `name` of each master in a FusedAdam; a missing one is created as zeros."""
        return optimizer.averages(self.masters, name)
