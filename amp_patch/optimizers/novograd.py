"""FusedNovoGrad: Apex's NovoGrad, momentum on gradients that are divided by a running norm of each parameter."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from amp_patch import multi_tensor
from amp_patch.optimizers.common import (
    FusedOptimizer,
    Group,
    Number,
    Tensors,
    bias_corrections,
    computable,
    count,
    descend,
    gradients,
    wide,
)

NORMS = (0, 2)  # values of `norm_type`, as in Apex: 0 for the largest absolute value, 2 for the 2-norm


def novograd(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    norms: Tensor,
    *,
    step: int,
    lr: Number,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    bias_correction: bool,
    grad_averaging: bool,
    reg_inside_moment: bool,
) -> None:
    """Make a step of NovoGrad (Ginsburg et al., arXiv:1905.11286) in place, with `norms` from `blend_norms`::

        d = norm / sqrt(1 - beta2 ** step) + eps
        m = beta1 * m + (1 - beta1) * g                       # + g without `grad_averaging`
        p = p - lr * (m / (1 - beta1 ** step) / d + weight_decay * p)

    `reg_inside_moment` gives the paper's form: `g / d + weight_decay * p` is added to m instead of g, and the update is
    `p = p - lr * m / (1 - beta1 ** step)`. Without `bias_correction`, both `1 - beta ** step` are replaced by 1. All
    lists are on one device; params and exp_avgs are written. `norms` has the shape [len(params)]. No sync.
    """
    with computable([params, exp_avgs], [grads]) as ((p, m), (g,)):
        if not p:
            return
        correction1, correction2 = bias_corrections(betas, step, bias_correction)
        denominators = list((norms.to(p[0]) / math.sqrt(correction2) + eps).unbind())
        if reg_inside_moment:
            g = list(torch._foreach_div(g, denominators))
            if weight_decay:
                torch._foreach_add_(g, p, alpha=weight_decay)
        torch._foreach_mul_(m, betas[0])
        torch._foreach_add_(m, g, alpha=1 - betas[0] if grad_averaging else 1.0)
        updates = list(torch._foreach_div(m, correction1))
        if not reg_inside_moment:
            torch._foreach_div_(updates, denominators)
            if weight_decay:
                torch._foreach_add_(updates, p, alpha=weight_decay)
        descend(p, updates, lr)


def norms_of(tensors: Tensors, norm_type: int) -> Tensor:
    """Return the norm of each tensor: shape [len(tensors)], FP32 (FP64 for float64). All are on one device."""
    if norm_type == 2:
        return multi_tensor.multi_tensor_l2norm(tensors, per_tensor=True)[1]
    # The largest value of an empty tensor is an error in torch, so a zero replaces the tensor.
    some = [t if t.numel() else t.new_zeros(1) for t in tensors]
    return torch.stack([norm.to(wide(norm.dtype)) for norm in torch._foreach_norm(some, math.inf)])


def blend_norms(old: Tensor, new: Tensor, a: float, b: float, norm_type: int) -> Tensor:
    """Return `sqrt(a * old**2 + b * new**2)`, or for norm_type 0 `a * old + b * new`."""
    return a * old + b * new if norm_type == 0 else (a * old.square() + b * new.square()).sqrt()


class FusedNovoGrad(FusedOptimizer):
    """Apex's FusedNovoGrad.

    Args:
        params: parameters, or dicts of parameter groups.
        lr, betas, eps, weight_decay: as in Adam; the second beta is for the running norm.
        bias_correction: divide the running averages by `1 - beta ** step`.
        amsgrad: refused.
        reg_inside_moment: divide by the norm and add the weight decay before the momentum, not after it.
        grad_averaging: multiply the gradient by `1 - beta1` in its running average.
        norm_type: 2 for the 2-norm, 0 for the largest absolute value.
        init_zero: start the running norm at 0; otherwise at the norm of the first gradient.
        set_grad_none: `zero_grad()` sets gradients to None; otherwise to zeros.

    State: `exp_avg` (FP32; in Apex it has the parameters' type). The count of steps is `group["step"]`. The norms are
    `group["exp_avg_sq"]`, a list of two tensors. In Apex these have the norms of the float16 and of the float32
    parameters. Here the first is empty, and the second has one norm for each parameter of the group, so that parameters
    may change their type or have no gradient. A state of Apex's is accepted if it has this form.
    """

    computed_with = ("lr", "betas", "eps", "weight_decay", "bias_correction", "grad_averaging")
    settings = (*computed_with, "norm_type", "init_zero")
    pickled_settings = (*FusedOptimizer.pickled_settings, "moment_mode")
    norms_of_tensors = True
    counts_on_host = True

    def __init__(
        self,
        params: Any,
        lr: Number = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        self.moment_mode = 0 if reg_inside_moment else 1
        super().__init__(params, locals(), set_grad_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does; refuse a `norm_type` other than 0 and 2."""
        norm_type = param_group.get("norm_type", self.defaults["norm_type"])
        if norm_type not in NORMS:
            raise RuntimeError(
                f"FusedNovoGrad: norm_type={norm_type!r}, wanted 2 for the 2-norm or 0 for the largest absolute value"
            )
        super().add_param_group(param_group)

    def _update(self, work: list[tuple[Group, list[list[Tensor]]]]) -> None:
        for group, _ in work:
            self._norms(group)  # for all groups before the first write, because it may raise
        for group, batches in work:
            step = count(group)
            slots = {id(p): slot for p, slot in zip(group["params"], self._norms(group).unbind(), strict=True)}
            beta2, norm_type = group["betas"][1], group["norm_type"]
            for params in batches:
                grads, mine = gradients(params), [slots[id(p)] for p in params]
                now = norms_of(grads, norm_type)
                before = torch.stack(mine).to(now)
                if not group["init_zero"]:
                    # For a parameter without state the running norm starts at this step's norm.
                    first = [not self.state[p] for p in params]
                    if any(first):
                        pairs = zip(first, now.unbind(), before.unbind(), strict=True)
                        before = torch.stack([new if fresh else old for fresh, new, old in pairs])
                norms = blend_norms(before, now, beta2, 1 - beta2, norm_type)
                torch._foreach_copy_(mine, list(norms.unbind()))
                novograd(
                    params,
                    grads,
                    self.averages(params, "exp_avg"),
                    norms,
                    step=step,
                    **{name: group[name] for name in self.computed_with},
                    reg_inside_moment=self.moment_mode == 0,
                )

    def _norms(self, group: Group) -> Tensor:
        """Return the group's norms, one element for each parameter; make them if there are none."""
        params = group["params"]
        device = params[0].device if params else None
        if "exp_avg_sq" not in group:
            dtype = torch.float64 if any(p.dtype is torch.float64 for p in params) else torch.float32
            norms = torch.zeros(len(params), dtype=dtype, device=device)
            group["exp_avg_sq"] = [norms.new_empty(0), norms]
        low, full = group["exp_avg_sq"]
        if low.numel() or full.numel() != len(params):
            raise RuntimeError(
                f"FusedNovoGrad.step: group['exp_avg_sq'] has {low.numel()} norms of low-precision and {full.numel()} "
                f"of other parameters, and the group {len(params)} parameters; wanted no norm of the first kind and "
                "one of the second for each parameter, as this FusedNovoGrad saves them, and Apex's saves them for "
                "FP32 parameters that have all stepped (O0 to O2)"
            )
        if full.device != (device or full.device):
            full = full.to(device)
            group["exp_avg_sq"] = [low, full]
        return full
