"""Parameters that one call of a kernel steps, with what it reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from amp_patch.masters.masters import kernel_tensors
from amp_patch.multi_tensor.checks import Number
from amp_patch.optimizers.adam import FusedAdam

Group = dict[str, Any]


class NotKnown(Exception):
    """A setting or a state that the kernels do not take."""


class BatchState(Enum):
    """How far the step of a batch has come."""

    NEW = auto()
    STEPPED = auto()  # by a kernel, into the weights
    REFUSED = auto()  # by the kernels
    LEFT = auto()  # to the optimizer's own step


@dataclass
class Batch:
    """Parameters of one group whose gradients are of one kind: one call of a kernel.

    Attributes:
        group: the optimizer's, for its settings.
        factors: what the gradients are multiplied by.
        masters: what is stepped; a parameter that is its own master, too.
        grads: of low precision, still scaled, or FP32.
        weights: the model's, which take the rounded results; empty where each master is its own.
        first_run: whether there is no momentum yet.
        stepped: what the kernel writes in the place of the masters.
        seed, draws, starts: by which it rounds the masters that are weights.
        version: of the first of these, before the step.
    """

    group: Group
    factors: Sequence[Number]
    masters: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    first_run: bool = False
    stepped: list[Tensor] = field(default_factory=list)
    seed: int = 0
    draws: Sequence[int] = ()
    starts: Sequence[int] = ()
    version: int = -1
    state: BatchState = BatchState.NEW

    getter = itemgetter  # of a state's name: gives of the states of the masters what the kernel takes

    def ready(self) -> Batch:
        """The batch, with what its kernel will write."""
        self.stepped, self.seed, self.draws, self.starts = kernel_tensors(self.masters)
        self.version = self.stepped[0]._version
        return self

    def made(self, optimizer: Any, name: str) -> list[Tensor]:
        """State of that name, new and not written yet, of each of the masters."""
        made = [torch.empty_like(master, requires_grad=False) for master in self.masters]
        for master, tensor in zip(self.masters, made, strict=True):
            optimizer.state[master][name] = tensor
        return made

    def averages(self, optimizer: FusedAdam, name: str) -> list[Tensor]:
        """State of that name of an optimizer of ours, zeros where there was none."""
        return optimizer.averages(self.masters, name)

    @property
    def settings(self) -> dict[str, Any]:
        """What each kernel is given."""
        low = None if self.draws else self.weights or None
        chance = {"seed": self.seed, "draws": self.draws, "starts": self.starts}
        return {"low": low, "factors": self.factors, **chance}

    @property
    def is_stepped(self) -> bool:
        """Whether a kernel has made the step, which counts as a write to each master, as an adopted edit does.

        The version tells where an exception came before `state` did.
        """
        if self.state is not BatchState.NEW:
            return self.state is BatchState.STEPPED
        return self.stepped[0]._version != self.version
