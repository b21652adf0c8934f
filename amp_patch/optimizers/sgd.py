"""FusedSGD: SGD with momentum on torch's fused kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import required

from amp_patch.optimizers.common import FusedOptimizer, Group, Number, Tensors, computable, decay, gradients


def sgd(
    params: Tensors,
    grads: Tensors,
    momentum_buffers: Tensors,
    *,
    lr: Number,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    wd_after_momentum: bool,
    first_run: bool,
    found_inf: Tensor | None = None,
) -> None:
    """One step of SGD in place, with torch.optim.SGD's formulas::

        g = g + weight_decay * p
        b = momentum * b + (1 - dampening) * g      # b = g on a `first_run`
        p = p - lr * b                              # p = p - lr * (g + momentum * b) if `nesterov`

    With `wd_after_momentum` the weight decay is added to what the learning rate multiplies instead (Apex's). Without
    momentum g takes the place of b, and `momentum_buffers` may be empty. All lists on one device, written are params
    and buffers. Where `found_inf`, a float32 tensor of one element there, is 1, nothing changes. No sync.
    """
    buffers = momentum_buffers if momentum else ()
    with computable([params, *([buffers] if buffers else [])], [grads]) as ((p, *b), (g,)):
        if not p:
            return
        if weight_decay and wd_after_momentum:
            decay(p, lr * weight_decay, found_inf)
        torch._fused_sgd_(
            p,
            g,
            b[0] if b else [],
            weight_decay=0.0 if wd_after_momentum else weight_decay,
            momentum=momentum,
            lr=lr,
            dampening=dampening,
            nesterov=nesterov,
            maximize=False,
            is_first_step=first_run,
            found_inf=found_inf,
        )


class FusedSGD(FusedOptimizer):
    """Apex's FusedSGD: torch.optim.SGD's formulas.

    Args:
        params: parameters, or dicts of parameter groups.
        lr: learning rate; required, here or in each group.
        momentum, dampening, weight_decay, nesterov: as in torch.optim.SGD.
        wd_after_momentum: apply the weight decay to the update instead of to the gradient.
        materialize_master_grads: accepted for Apex's sake. Master gradients always exist, as with any optimizer.
        set_grad_none: what `zero_grad()` does to gradients.

    State: `momentum_buffer` (FP32), where there is momentum.
    """

    pickled_settings = (*FusedOptimizer.pickled_settings, "wd_after_momentum", "materialize_master_grads")
    skips_on_device = True  # tells `initialize` that `step` reads `self.found_inf`

    def __init__(
        self,
        params: Any,
        lr: Any = required,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError(
                f"FusedSGD: nesterov=True with momentum={momentum}, dampening={dampening}: Nesterov momentum wants a "
                "momentum above 0 and no dampening"
            )
        self.wd_after_momentum = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults, set_grad_none)

    def _update(self, work: list[tuple[Group, list[list[Tensor]]]]) -> None:
        found_inf = getattr(self, "found_inf", None)
        for group, batches in work:
            for params in batches:
                # A buffer's first value is the gradient itself, also of a parameter that joins later.
                fresh = [p for p in params if self.state[p].get("momentum_buffer") is None]
                new = set(map(id, fresh))
                for first_run, some in ((True, fresh), (False, [p for p in params if id(p) not in new])):
                    if not some:
                        continue
                    buffers = self.averages(some, "momentum_buffer") if group["momentum"] else []
                    sgd(
                        some,
                        gradients(some),
                        buffers,
                        lr=group["lr"],
                        momentum=group["momentum"],
                        dampening=group["dampening"],
                        weight_decay=group["weight_decay"],
                        nesterov=group["nesterov"],
                        wd_after_momentum=self.wd_after_momentum,
                        first_run=first_run,
                        found_inf=None if found_inf is None else found_inf.to(some[0].device),
                    )
