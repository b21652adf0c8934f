"""Splitting of a graph's arguments into micro-batches, and joining of the results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from amp_patch.support import tree


def micro_batches(args: Any, kwargs: Any, steps: int) -> Iterator[tuple[Any, Any]]:
    """Yield (args, kwargs) of each of `steps` micro-batches: tensors are split along their first dimension."""
    if steps == 1:
        yield args, kwargs
        return

    def part(index: int) -> Any:
        def take(tensor: Tensor) -> Tensor:
            if tensor.dim() == 0:
                return tensor
            if tensor.shape[0] % steps:
                raise ValueError(
                    f"Graph: a tensor of shape {list(tensor.shape)} does not split into {steps} micro-batches "
                    "(set_gradient_accumulation_steps)"
                )
            return tensor.chunk(steps)[index] if tensor.shape[0] else tensor

        return tree.map_tensors(take, (args, kwargs))

    yield from [part(index) for index in range(steps)]


def joined(results: list[Any]) -> Any:
    """Return the results of the micro-batches as one result.

    Tensors are concatenated, tensors of shape [] are stacked. All else is taken from the first micro-batch.
    """
    leaves = [tree.tensors(result) for result in results]
    columns = iter(zip(*leaves, strict=True))

    def join(_: Tensor) -> Tensor:
        column = next(columns)
        return torch.cat(column) if column[0].dim() else torch.stack(column)

    return tree.map_tensors(join, results[0])
