"""`loss.backward()` inside a graph's `build`: the loss is recorded, and its backward runs after `build`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class NotedLosses(TorchFunctionMode):
    """A mode in which `loss.backward()` only records the loss, because a backward would break the compiled graph.

    Attributes:
        losses: the losses whose `backward()` was called, in order.
        arguments: the names of arguments of `backward()` that a graph does not support.
    """

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.arguments: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.backward:
            return self._note(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def _note(
        self,
        loss: Tensor,
        gradient: Any = None,
        retain_graph: Any = None,  # ignored: there is one backward for all losses
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        self.losses.append(loss)
        if gradient is not None:
            self.arguments.append("gradient")
        if create_graph:
            self.arguments.append("create_graph")
        if inputs is not None:
            self.arguments.append("inputs")
