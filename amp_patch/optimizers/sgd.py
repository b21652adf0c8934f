"""FusedSGD: Apex's SGD with momentum, on torch's fused kernel."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import required

from amp_patch.multi_tensor.plain_steps import fused_sgd
from amp_patch.optimizers.common import FusedOptimizer, Group, computable, gradients


class FusedSGD(FusedOptimizer):
    """Apex's FusedSGD: torch.optim.SGD's formulas.

    Args:
        params: parameters, or dicts of parameter groups.
        lr: learning rate; required, here or in each group.
        momentum, dampening, weight_decay, nesterov: as in torch.optim.SGD.
        wd_after_momentum: add the weight decay to the update, after the momentum, instead of to the gradient.
        materialize_master_grads: accepted as in Apex, without effect: the masters always have gradients.
        set_grad_none: `zero_grad()` sets gradients to None; otherwise to zeros.

    State: `momentum_buffer` (FP32), if momentum is not 0.
    """

    settings = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
    pickled_settings = (*FusedOptimizer.pickled_settings, "wd_after_momentum", "materialize_master_grads")
    skips_on_device = True  # read by `initialize`: `step` skips if `self.found_inf` is not 0

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
        super().__init__(params, locals(), set_grad_none)

    def _update(self, work: list[tuple[Group, list[list[Tensor]]]]) -> None:
        found_inf = getattr(self, "found_inf", None)
        for group, batches in work:
            for params in batches:
                # The first value of a momentum buffer is the gradient. Parameters of one group may have their first
                # step at different times, so they are stepped in two lists.
                fresh = [p for p in params if self.state[p].get("momentum_buffer") is None]
                new = set(map(id, fresh))
                for first_run, some in ((True, fresh), (False, [p for p in params if id(p) not in new])):
                    if not some:
                        continue
                    buffers = [self.averages(some, "momentum_buffer")] if group["momentum"] else []
                    with computable([some, *buffers], [gradients(some)]) as ((p, *b), (g,)):
                        fused_sgd(
                            *(p, g, b[0] if b else []),
                            **{name: group[name] for name in self.settings},
                            wd_after_momentum=self.wd_after_momentum,
                            first_run=first_run,
                            found_inf=None if found_inf is None else found_inf.to(some[0].device),
                        )
