"""A warning about an `eps` that is 0 in the type of the parameters, by which Adam then divides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from amp_patch.policy import LOW_PRECISION
from amp_patch.support.generated_class import base_class
from amp_patch.support.scripts_line import warn
from amp_patch.training.joints import Optimizer


def look(training: Any, models: list[nn.Module], targets: list[Any]) -> None:
    """Warn where a group's `eps` is 0 in the dtype of its low-precision parameters.

    Optimizers with the attribute `computes_in_fp32` are not checked.
    """
    for optimizer in targets:
        for index, eps, dtype in lost_eps(optimizer):
            warn(
                f"initialize: eps={eps:g} of {base_class(optimizer).__name__}'s group {index} is 0 in {dtype}, the "
                "type that its parameters have without masters: a first step can give NaN. Use eps=1e-4, or "
                "opt_level='O2'"
            )


def lost_eps(optimizer: Optimizer) -> Iterator[tuple[int, float, torch.dtype]]:
    """Yield (index of a group, eps, low-precision dtype) for each group whose `eps` is 0 in that dtype."""
    if getattr(optimizer, "computes_in_fp32", False):
        return
    for index, group in enumerate(optimizer.param_groups):
        eps = group.get("eps")
        for dtype in {p.dtype for p in group["params"] if p.dtype in LOW_PRECISION and p.requires_grad}:
            if isinstance(eps, float) and eps > 0 and torch.tensor(eps, dtype=dtype, device="cpu").item() == 0:
                yield index, eps, dtype
