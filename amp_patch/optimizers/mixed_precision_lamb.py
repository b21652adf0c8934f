"""FusedMixedPrecisionLamb: Apex's LAMB with FP32 masters of its own, for a GradScaler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from amp_patch import multi_tensor
from amp_patch.optimizers.common import Group, Number, count, gradients, loss_of, wide
from amp_patch.optimizers.lamb import FusedLAMB, global_norm


class FusedMixedPrecisionLamb(FusedLAMB):
    """Apex's FusedMixedPrecisionLamb: LAMB for a model that is FP16 or BF16 itself, with torch's or amp's GradScaler.

    Args:
        params: parameters, or dicts of parameter groups.
        step: the initial count of steps.
        reduced_precision_dtype: float16 or bfloat16. Each parameter of this type has an FP32 copy. A step updates the
            copy, and rounds it into the parameter. The copy is made at the first step, after DDP or a checkpoint may
            have written the parameter, and is stored in the state as `master_param`. None: no copies.
        lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode, grad_averaging, max_grad_norm,
            use_nvlamb: see FusedLAMB.

    If a GradScaler or `amp.initialize` reports an overflow, nothing changes; reading the flag syncs with the device.
    Scaled gradients are read, not written. The count of steps is on the host (in Apex, as the learning rate, on the
    device): a step cannot be captured in a CUDA graph.

    State: `exp_avg`, `exp_avg_sq` (FP32) and `master_param`, so that a training resumed from a checkpoint has the same
    bits. A checkpoint of Apex, which has no copies, can be loaded too.

    Attributes:
        param_groups_full_precision: for each group {"params": FP32 copies, with None for parameters without a copy};
            computed at each read.
    """

    pickled_settings = (*FusedLAMB.pickled_settings, "reduced_precision_dtype", "first_step")
    _step_supports_amp_scaling = True  # GradScaler leaves the check and the unscaling to `step`
    skips_on_device = False  # read by `initialize`, which then reads the flag itself

    def __init__(
        self,
        params: Any,
        lr: Number = 1e-3,
        step: int | Tensor = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
    ) -> None:
        given = locals()
        if reduced_precision_dtype not in (None, torch.float16, torch.bfloat16):
            raise ValueError(
                f"FusedMixedPrecisionLamb: reduced_precision_dtype={reduced_precision_dtype!r}, torch.float16, "
                "torch.bfloat16 or None is wanted"
            )
        self.reduced_precision_dtype = reduced_precision_dtype
        self.first_step = int(step)
        own = ("self", "step", "reduced_precision_dtype", "__class__")
        super().__init__(**{name: value for name, value in given.items() if name not in own})

    @property
    def param_groups_full_precision(self) -> list[dict[str, list[Tensor | None]]]:
        """For each group {"params": FP32 copies}; None for an FP32 parameter, and for all parameters before a step."""
        of = [[self.state.get(p, {}).get("master_param") for p in group["params"]] for group in self.param_groups]
        return [{"params": masters} for masters in of]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does, with the initial count of steps."""
        super().add_param_group({"step": self.first_step, **param_group})

    # `grad_scaler` is not in the signature, because torch's GradScaler warns if `step` has an argument of that name.
    def step(self, closure: Callable[[], Any] | None = None, **given: Any) -> Any:
        """Make one step; syncs with the device if there is a scaler.

        Args:
            closure: called first; evaluates the loss and its gradients.
            grad_scaler: (keyword) call `grad_scaler.step(self)`, which unscales, and skips an overflow. The caller must
                call its `update()` afterwards.

        Returns:
            The closure's result.

        Raises:
            TypeError: any other argument was given. Nothing was changed.
            The errors of `FusedLAMB.step`.
        """
        grad_scaler = given.pop("grad_scaler", None)
        if given:
            raise TypeError(f"FusedMixedPrecisionLamb.step: got {', '.join(given)}; wanted closure and grad_scaler")
        if grad_scaler is None:
            return super().step(closure)
        loss = loss_of(closure)
        grad_scaler.step(self)
        return loss

    def _update(self, work: list[tuple[Group, list[list[Tensor]]]]) -> None:
        found_inf, grad_scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found_inf is not None and found_inf.item():
            return
        grads = [[_unscaled(gradients(params), grad_scale) for params in batches] for _, batches in work]
        norm = global_norm([grad for batches in grads for batch in batches for grad in batch])
        for (group, batches), batch_grads in zip(work, grads, strict=True):
            step = count(group)
            for params, of_params in zip(batches, batch_grads, strict=True):
                masters = self._masters(params)
                here = norm.to(params[0].device)
                self._lamb(group, params, masters, of_params, step=step, lr=group["lr"], grad_norm=here)
                copies = [(m, p) for m, p in zip(masters, params, strict=True) if m is not p]
                if copies:
                    multi_tensor.multi_tensor_scale([m for m, _ in copies], [p for _, p in copies], 1.0)

    def _masters(self, params: list[Tensor]) -> list[Tensor]:
        """Return the tensors that a step updates: FP32 copies, made at the first step, or the parameters themselves."""
        for param in params:
            if param.dtype is self.reduced_precision_dtype:
                self.state[param].setdefault("master_param", param.detach().float())
        return [self.state[param].get("master_param", param) for param in params]


def _unscaled(grads: list[Tensor], grad_scale: Tensor | None) -> list[Tensor]:
    """Return new FP32 (FP64) tensors with the gradients of one device divided by the scale; without one `grads`."""
    if grad_scale is None:
        return grads
    new = [torch.empty_like(grad, dtype=wide(grad.dtype)) for grad in grads]
    multi_tensor.multi_tensor_scale(grads, new, multi_tensor.inverse_of(grad_scale.to(grads[0].device)))
    return new
