"""The search for averages of the weights (EMA), and copies of trained modules, inside of models."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import nn


def averages_in(models: list[nn.Module], trained: Container[int]) -> dict[nn.Module, str]:
    """Return {module: name} of the outermost modules in `models` that look like averages or copies of trained modules.

    A module looks like an average or a copy if none of its parameters is in `trained` (ids), and its parameters have
    the names and shapes of another module, which has more than half of its model's trained parameters.
    """
    found: dict[nn.Module, str] = {}
    for model in models:
        sizes = {module: sum(p.numel() for p in module.parameters() if id(p) in trained) for module in model.modules()}
        alike = {_shapes(module) for module, size in sizes.items() if 2 * size > sizes[model]}
        inside: set[nn.Module] = set()
        for name, module in model.named_modules():
            if module not in inside and not sizes[module] and (shapes := _shapes(module)) and shapes in alike:
                found[module] = name
                inside.update(module.modules())
    return found


def _shapes(module: nn.Module) -> tuple[tuple[str, torch.Size], ...]:
    return tuple((name, param.shape) for name, param in module.named_parameters())
