"""FusedAdagrad: Apex's Adagrad, on torch's foreach functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amp_patch.optimizers.common import FusedOptimizer, Group, Number, Tensors, computable, descend, gradients


def adagrad(
    params: Tensors,
    grads: Tensors,
    sums: Tensors,
    *,
    lr: Number,
    eps: float,
    weight_decay: float,
    decoupled: bool,
) -> None:
    """Make a step of Adagrad (Duchi, Hazan and Singer, JMLR 12, 2011) in place::

        g = g + weight_decay * p                  # unless `decoupled`
        h = h + g * g
        p = p - lr * (g / (sqrt(h) + eps))        # + lr * weight_decay * p inside, if `decoupled`

    All lists are on one device; params and sums are written. No sync. (torch 2.6 has no fused kernel of Adagrad for
    CUDA.)
    """
    with computable([params, sums], [grads]) as ((p, h), (g,)):
        if not p:
            return
        if weight_decay and not decoupled:
            g = list(torch._foreach_add(g, p, alpha=weight_decay))
        torch._foreach_addcmul_(h, g, g)
        denominators = torch._foreach_sqrt(h)
        torch._foreach_add_(denominators, eps)
        updates = list(torch._foreach_div(g, denominators))
        if weight_decay and decoupled:
            torch._foreach_add_(updates, p, alpha=weight_decay)
        descend(p, updates, lr)


class FusedAdagrad(FusedOptimizer):
    """Apex's FusedAdagrad: torch.optim.Adagrad's formula without learning-rate decay.

    Args:
        params: parameters, or dicts of parameter groups.
        lr, eps, weight_decay: as in torch.optim.Adagrad.
        set_grad_none: `zero_grad()` sets gradients to None; otherwise to zeros.
        adagrad_w_mode: decouple the weight decay from the gradient, as in AdamW; otherwise add it to the gradient.

    State: `sum` (FP32).
    """

    settings = ("lr", "eps", "weight_decay")
    pickled_settings = (*FusedOptimizer.pickled_settings, "adagrad_w_mode")

    def __init__(
        self,
        params: Any,
        lr: Number = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        self.adagrad_w_mode = 1 if adagrad_w_mode else 0
        super().__init__(params, locals(), set_grad_none)

    def _update(self, work: list[tuple[Group, list[list[Tensor]]]]) -> None:
        for group, batches in work:
            for params in batches:
                adagrad(
                    params,
                    gradients(params),
                    self.averages(params, "sum"),
                    **{name: group[name] for name in self.settings},
                    decoupled=bool(self.adagrad_w_mode),
                )
