"""FusedAdam: Apex's Adam and AdamW, on torch's fused kernel."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from amp_patch.multi_tensor.plain_steps import fused_adam
from amp_patch.optimizers.common import (
    FusedOptimizer,
    Group,
    Number,
    computable,
    count,
    gradients,
)


class FusedAdam(FusedOptimizer):
    """Apex's FusedAdam: AdamW, or Adam with L2 regularization if not `adam_w_mode`.

    Args:
        params: parameters, or dicts of parameter groups.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW, but the default weight decay is 0.
        bias_correction: divide the running averages by `1 - beta ** step`.
        adam_w_mode: decouple the weight decay from the gradient (AdamW); otherwise add it to the gradient (Adam).
        amsgrad, capturable, master_weights: refused.
        set_grad_none: `zero_grad()` sets gradients to None; otherwise to zeros.

    State: `exp_avg`, `exp_avg_sq` (FP32). The count of steps is `group["step"]`, as in Apex.

    Differences from torch.optim.AdamW: the count of steps, and the rounding of the weight decay (`plain_steps.decay`).
    Difference from Apex: `1 - beta` is computed from the exact beta, not from beta rounded to FP32.
    """

    settings = ("lr", "bias_correction", "betas", "eps", "weight_decay")
    pickled_settings = (*FusedOptimizer.pickled_settings, "adam_w_mode")
    counts_on_host = True

    def __init__(
        self,
        params: Any,
        lr: Number = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        self.adam_w_mode = 1 if adam_w_mode else 0
        if capturable:
            raise ValueError(
                "FusedAdam: capturable=True is not supported, since the count of steps is on the host; use "
                "torch.optim.AdamW(..., fused=True, capturable=True)"
            )
        if master_weights:
            raise ValueError(
                "FusedAdam: master_weights=True is not supported; amp.initialize(model, optimizer, opt_level='O2'), or "
                "'O5', makes FP32 masters for any optimizer"
            )
        super().__init__(params, locals(), set_grad_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, also a state of torch.optim.Adam or AdamW.

        Such a state has a count of steps for each parameter. The group gets the largest of its parameters' counts.
        """
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            steps = [self.state[p]["step"] for p in group["params"] if "step" in self.state.get(p, ())]
            if "step" in group or steps:  # a capturable FusedAdam of Apex has saved a tensor
                group["step"] = int(group["step"] if "step" in group else max(steps))

    def step(self, closure: Any = None, **old: Any) -> Any:
        """Make one step; see the base class.

        `old` are arguments of Apex's first FusedAdam (`grads`, `scale` and others). Like Apex's second, this one
        accepts None for them and refuses other values.
        """
        for name, value in old.items():
            if value is not None:
                raise RuntimeError(
                    f"FusedAdam.step: {name} is refused (Apex's first FusedAdam had such arguments); let "
                    "amp.initialize and amp.scale_loss keep the masters and the scale, and call step() without it"
                )
        return super().step(closure)

    def _update(self, work: list[tuple[Group, list[list[Tensor]]]]) -> None:
        for group, batches in work:
            step = count(group)
            for params in batches:
                averages = self.averages(params, "exp_avg"), self.averages(params, "exp_avg_sq")
                numbers = {name: group[name] for name in self.settings}
                if isinstance(lr := group["lr"], Tensor):
                    numbers["lr"] = lr.to(params[0].device)
                with computable([params, *averages], [gradients(params)]) as ((p, m, v), (g,)):
                    fused_adam(p, g, m, v, step=step, **numbers, decoupled=bool(self.adam_w_mode))
