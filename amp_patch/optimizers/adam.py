"""FusedAdam: Apex's Adam and AdamW, on torch's fused kernel."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from amp_patch import multi_tensor
from amp_patch.multi_tensor.plain_steps import fused_adam
from amp_patch.optimizers.common import (
    FusedOptimizer,
    Group,
    Number,
    Tensors,
    computable,
    count,
    count_on_device,
    gradients,
    numbers_to_device,
)


def check_unscalable(grads: Tensors) -> None:
    """Raise if a gradient cannot be unscaled in place, because several of its elements are one place in memory."""
    for grad in grads:
        if 0 in grad.stride() and any(n > 1 and s == 0 for n, s in zip(grad.shape, grad.stride(), strict=True)):
            raise ValueError(
                f"FusedAdam: a gradient of shape {list(grad.shape)} overlaps itself (an expanded tensor, strides "
                f"{list(grad.stride())}) and cannot be unscaled in place: give the parameter a `.clone()` of it"
            )


class FusedAdam(FusedOptimizer):
    """Apex's FusedAdam: AdamW, or Adam with L2 regularization if not `adam_w_mode`.

    Args:
        params: parameters, or dicts of parameter groups.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW, but the default weight decay is 0.
        bias_correction: divide the running averages by `1 - beta ** step`.
        adam_w_mode: decouple the weight decay from the gradient (AdamW); otherwise add it to the gradient (Adam).
        amsgrad: refused.
        set_grad_none: `zero_grad()` sets gradients to None; otherwise to zeros.
        capturable: store the learning rate and the step count as tensors on the device, so that a CUDA graph can
            capture a step. torch.amp.GradScaler then leaves the skip and the unscaling, in place, to the step.
        master_weights: store FP32 copies of float16 and bfloat16 parameters in the state, as `master_param`, and step
            the copies. (`amp.initialize(opt_level="O2")` has masters for any optimizer.)

    State: `exp_avg`, `exp_avg_sq` (FP32). The count of steps is `group["step"]`, as in Apex.

    Differences from torch.optim.AdamW: the count of steps, and the rounding of the weight decay (`plain_steps.decay`).
    Differences from Apex: `1 - beta` is computed from the exact beta, not from beta rounded to FP32, and
    `master_weights` does not require `capturable`.
    """

    settings = ("lr", "bias_correction", "betas", "eps", "weight_decay")
    pickled_settings = (*FusedOptimizer.pickled_settings, "adam_w_mode", "capturable", "master_weights")

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
        self.capturable = capturable
        self.master_weights = master_weights
        super().__init__(params, locals(), set_grad_none)

    @property
    def counts_on_host(self) -> bool:  # type: ignore[override]
        """Whether the count of steps is a Python number, and not a tensor on the device."""
        return not self.capturable

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether `step` unscales and skips by `self.grad_scale` and `self.found_inf`; read by torch's GradScaler."""
        return self.capturable

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does."""
        super().add_param_group(param_group)
        if self.capturable:
            numbers_to_device(self.param_groups[-1])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, also a state of torch.optim.Adam or AdamW.

        Such a state has a count of steps for each parameter. The group gets the largest of its parameters' counts.
        """
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            steps = [self.state[p]["step"] for p in group["params"] if "step" in self.state.get(p, ())]
            if "step" not in group and steps:
                group["step"] = int(max(steps))
            if self.capturable:
                numbers_to_device(group)

    def step(
        self,
        closure: Any = None,
        grads: None = None,
        output_params: None = None,
        scale: None = None,
        grad_norms: None = None,
    ) -> Any:
        """Make one step; see the base class.

        The other arguments belong to Apex's first FusedAdam. Like Apex's second FusedAdam, this one refuses them.
        """
        given = {"grads": grads, "output_params": output_params, "scale": scale, "grad_norms": grad_norms}
        for name, value in given.items():
            if value is not None:
                raise RuntimeError(
                    f"FusedAdam.step: {name} was an argument of Apex's first FusedAdam; let amp.initialize and "
                    "amp.scale_loss keep the masters and the scale, and call step() with no arguments"
                )
        return super().step(closure)

    def _update(self, work: list[tuple[Group, list[list[Tensor]]]]) -> None:
        found_inf, grad_scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if grad_scale is not None:  # before the first `count`: an exception must not leave a step counted
            check_unscalable([grad for _, batches in work for params in batches for grad in gradients(params)])
        if found_inf is not None:
            # GradScaler adds up the flags of several devices, so an overflow may be 2.0. torch's fused kernel skips
            # only if the flag is exactly 1.0.
            found_inf = (found_inf != 0).float()
        for group, batches in work:
            step = count_on_device(group, found_inf) if self.capturable else count(group)
            for params in batches:
                device = params[0].device
                masters = self._masters(params) if self.master_weights else params
                lists = [masters, self.averages(params, "exp_avg"), self.averages(params, "exp_avg_sq")]
                lists, lr = [*lists, gradients(params)], group["lr"]
                numbers = {name: group[name] for name in self.settings}
                written = 3 if grad_scale is None else 4  # the step unscales gradients in place
                with computable(lists[:written], lists[written:]) as (outputs, inputs):
                    p, m, v, g = outputs + inputs
                    fused_adam(
                        *(p, g, m, v),
                        step=step,
                        **numbers | {"lr": lr.to(device) if isinstance(lr, Tensor) else lr},
                        decoupled=bool(self.adam_w_mode),
                        grad_scale=None if grad_scale is None else grad_scale.to(device),
                        found_inf=None if found_inf is None else found_inf.to(device),
                    )
                if self.master_weights:
                    multi_tensor.multi_tensor_scale(masters, params, 1.0)
