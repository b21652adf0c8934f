"""FusedLAMB: Apex's LAMB, which scales Adam's update of each parameter by norm of parameter / norm of update."""

from __future__ import annotations

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
    gradients,
)
from amp_patch.support.devices import by_device


def lamb(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    *,
    step: int,
    lr: Number,
    betas: tuple[float, float],
    weight_decay: float,
    bias_correction: bool,
    use_nvlamb: bool,
    **update: Any,
) -> None:
    """Make a step of LAMB (You et al., arXiv:1904.00962) in place: `lamb_update`, then `lamb_apply`.

    All lists are on one device; params, exp_avgs and exp_avg_sqs are written. `update` are further arguments of
    `lamb_update`. `lr` may be a tensor of one element. No sync.
    """
    with computable([params, exp_avgs, exp_avg_sqs], [grads]) as ((p, m, v), (g,)):
        if not p:
            return
        updates = lamb_update(
            *(p, g, m, v),
            corrections=bias_corrections(betas, step, bias_correction),
            betas=betas,
            weight_decay=weight_decay,
            **update,
        )
        if isinstance(lr, Tensor):
            lr = lr.to(p[0]).reshape(())
        norms = None
        if use_nvlamb or weight_decay:
            norms = (multi_tensor.multi_tensor_l2norm(p, True)[1], multi_tensor.multi_tensor_l2norm(updates, True)[1])
        lamb_apply(p, updates, lr=lr, norms=norms)


def lamb_update(
    p: list[Tensor],
    g: list[Tensor],
    m: list[Tensor],
    v: list[Tensor],
    *,
    corrections: tuple[float, float],
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    grad_averaging: bool,
    grad_norm: Tensor,
    max_grad_norm: float | None,
) -> list[Tensor]:
    """Return LAMB's update `u` of each parameter, as new tensors; write m and v in place::

        g = g / max(1, grad_norm / max_grad_norm)           # grad_norm: of all gradients together, one element
        m = beta1 * m + (1 - beta1) * g                     # + g without `grad_averaging`
        v = beta2 * v + (1 - beta2) * g * g
        u = (m / correction1) / (sqrt(v / correction2) + eps) + weight_decay * p

    If not `decoupled`, `weight_decay * p` is added to the clipped g instead. The lists are in the form of `computable`.
    """
    if max_grad_norm is not None:
        norm = grad_norm.reshape(()).to(p[0])
        g = list(torch._foreach_div(g, torch.where(norm > max_grad_norm, norm / max_grad_norm, 1.0)))
    if not decoupled and weight_decay:
        g = list(torch._foreach_add(g, p, alpha=weight_decay))
    torch._foreach_mul_(m, betas[0])
    torch._foreach_add_(m, g, alpha=1 - betas[0] if grad_averaging else 1.0)
    torch._foreach_mul_(v, betas[1])
    torch._foreach_addcmul_(v, g, g, value=1 - betas[1])
    denominators = list(torch._foreach_div(v, corrections[1]))
    torch._foreach_sqrt_(denominators)
    torch._foreach_add_(denominators, eps)
    updates = list(torch._foreach_div(m, corrections[0]))
    torch._foreach_div_(updates, denominators)
    if decoupled and weight_decay:
        torch._foreach_add_(updates, p, alpha=weight_decay)
    return updates


def lamb_apply(p: list[Tensor], updates: list[Tensor], *, lr: Number, norms: tuple[Tensor, Tensor] | None) -> None:
    """Compute `p -= lr * ratio * update` in place; the updates are overwritten.

    The trust ratio of a parameter is |p| / |update|, or 1 if one of the two is 0. `norms` are (norms of the parameters,
    norms of the updates), each of shape [len(p)]. If `norms` is None, all ratios are 1. As in Apex, this is so for
    groups without weight decay, unless `use_nvlamb`.
    """
    if norms is None:
        torch._foreach_mul_(updates, lr)
    else:
        of_params, of_updates = norms
        rates = torch.where((of_params != 0) & (of_updates != 0), lr * (of_params / of_updates), lr)
        torch._foreach_mul_(updates, list(rates.to(p[0].dtype).unbind()))
    torch._foreach_sub_(p, updates)


def global_norm(grads: Tensors) -> Tensor:
    """Return the 2-norm of all tensors together, of any devices: shape [], on the first tensor's device. No sync."""
    norms = [multi_tensor.multi_tensor_l2norm(tensors) for (tensors,) in by_device((grad,) for grad in grads).values()]
    if len(norms) == 1:
        return norms[0]
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0]) for norm in norms]))


class FusedLAMB(FusedOptimizer):
    """Apex's FusedLAMB.

    Args:
        params: parameters, or dicts of parameter groups.
        lr, betas, eps, weight_decay: as in Adam, with Apex's defaults.
        bias_correction: divide the running averages by `1 - beta ** step`.
        amsgrad: refused.
        adam_w_mode: decouple the weight decay from the gradient; otherwise add it to the gradient.
        grad_averaging: multiply the gradient by `1 - beta1` in its running average.
        set_grad_none: `zero_grad()` sets gradients to None; otherwise to zeros.
        max_grad_norm: clip the gradients of all groups together to this norm; None: no clipping.
        use_nvlamb: apply the trust ratio also to groups without weight decay.

    State: `exp_avg`, `exp_avg_sq` (FP32; in Apex they have the parameters' type). The count of steps is
    `group["step"]`. Gradients are not changed; Apex overwrites them.
    """

    settings = ("lr", "bias_correction", "betas", "eps", "weight_decay", "grad_averaging", "max_grad_norm")
    pickled_settings = (*FusedOptimizer.pickled_settings, "adam_w_mode", "use_nvlamb")
    norms_of_tensors = True
    counts_on_host = True

    def __init__(
        self,
        params: Any,
        lr: Number = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(
                f"FusedLAMB: max_grad_norm={max_grad_norm} would make every gradient 0, a number above 0 is wanted, or "
                "None for no clipping"
            )
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.use_nvlamb = use_nvlamb
        super().__init__(params, locals(), set_grad_none)

    def _update(self, work: list[tuple[Group, list[list[Tensor]]]]) -> None:
        norm = global_norm([grad for _, batches in work for params in batches for grad in gradients(params)])
        for group, batches in work:
            step = count(group)
            for params in batches:
                here = norm.to(params[0].device)
                self._lamb(group, params, params, gradients(params), step=step, lr=group["lr"], grad_norm=here)

    def _lamb(self, group: Group, params: Tensors, masters: Tensors, grads: Tensors, **given: Any) -> None:
        """Call `lamb` for `masters` with the group's settings and the running averages in the state of `params`."""
        lamb(
            masters,
            grads,
            self.averages(params, "exp_avg"),
            self.averages(params, "exp_avg_sq"),
            **{name: group[name] for name in ("betas", "eps", "weight_decay", "bias_correction", "grad_averaging")},
            decoupled=bool(self.adam_w_mode),
            max_grad_norm=self.defaults["max_grad_norm"],  # one for all groups, as in Apex
            use_nvlamb=self.use_nvlamb,
            **given,
        )
