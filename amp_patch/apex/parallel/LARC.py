"""`apex.parallel.LARC`: layer-wise adaptive learning rates, as a wrapper of any optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from amp_patch import multi_tensor
from amp_patch.apex.fp16_utils.fp16util import delegated
from amp_patch.optimizers.common import loss_of
from amp_patch.support.devices import by_device

__all__ = ["LARC"]


class LARC(torch.optim.Optimizer):
    """Scale each parameter's gradient by the ratio of its norm to the gradient's, then let `optimizer` step.

    ::

        for each p with a gradient g, in a group with lr and weight_decay, if |p| and |g| are not 0:
            local = trust_coefficient * |p| / (|g| + weight_decay * |p| + eps)
            g = (g + weight_decay * p) * (min(local / lr, 1) if clip else local)
        optimizer.step() with weight_decay 0

    Source: You et al. 2017, arXiv:1708.03888. Gradients are changed in place; norms are FP32; no sync with the device.
    If a gradient is 0 and the parameter is not, the parameter does not change: it has no weight decay, as in Apex.

    LARC is a torch Optimizer, so schedulers accept it. `state`, `param_groups` and all attributes that it lacks are
    those of the wrapped optimizer. With amp it may be made before or after `initialize`: it changes unscaled FP32
    gradients, and does nothing in a skipped step.

    Args:
        optimizer: the optimizer to wrap, stored as the attribute `optim`.
        trust_coefficient, clip, eps: as above.
    """

    optim: Any
    wraps_an_optimizer = True  # read by amp, which then works on the optimizer inside
    # False even if the inner optimizer's is True: GradScaler would set `found_inf` on this object.
    _step_supports_amp_scaling = False

    def __init__(self, optimizer: Any, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8) -> None:
        # `Optimizer.__init__` is not called: groups, state and hooks are the inner optimizer's.
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.eps = eps
        self.clip = clip

    def __getattr__(self, name: str) -> Any:
        if name == "optim":  # absent while a copy is being made: without this, the recursion would not end
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __getstate__(self) -> dict[str, Any]:
        # Not all of `vars(self)`: a scheduler sets `step` on the instance, which cannot be pickled.
        return {name: vars(self)[name] for name in ("optim", "trust_coefficient", "eps", "clip")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def __repr__(self) -> str:
        return repr(self.optim)

    state: Any = delegated("optim", "state")
    param_groups: Any = delegated("optim", "param_groups")

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state dict. As in Apex, the arguments of LARC are not in it."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of LARC, or of the wrapped optimizer, into the wrapped optimizer."""
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Call `zero_grad` of the wrapped optimizer."""
        self.optim.zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer. LARC changes its gradients too."""
        self.optim.add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Change the gradients, then step the wrapped optimizer. A closure is called once, before that.

        Raises:
            RuntimeError: a gradient is sparse. Nothing was changed.
        """
        loss = loss_of(closure)
        decays = [(group, group["weight_decay"]) for group in self.param_groups if "weight_decay" in group]
        adapted = False

        def adapt(*args: Any) -> None:
            nonlocal adapted
            if not adapted:  # a `step` that calls `super().step()` runs its hooks twice
                adapted = True
                self._adapt()

        try:
            if isinstance(self.optim, torch.optim.Optimizer):
                # A pre-hook, registered last, runs after amp's own pre-hook. Gradients are unscaled then, or removed if
                # the step is skipped.
                handle = self.optim.register_step_pre_hook(adapt)
                try:
                    result = self.optim.step()
                finally:
                    handle.remove()
            else:
                adapt()
                result = self.optim.step()
        finally:
            for group, decay in decays:
                group["weight_decay"] = decay
        return result if closure is None else loss

    @torch.no_grad()
    def _adapt(self) -> None:
        """Multiply the gradients by their factors, weight decay included, and set the groups' weight decay to 0."""
        for index, group in enumerate(self.param_groups):
            if any(param.grad is not None and param.grad.is_sparse for param in group["params"]):
                raise RuntimeError(f"LARC.step: group {index} has a sparse gradient, whose parameter it cannot scale")
        for group in self.param_groups:
            decay = group.get("weight_decay", 0)
            if "weight_decay" in group:
                group["weight_decay"] = 0
            pairs = ((param.detach(), param.grad.detach()) for param in group["params"] if param.grad is not None)
            for params, grads in by_device(pairs).values():
                factors = self._factors(params, grads, group["lr"], decay)
                if decay:
                    torch._foreach_add_(grads, params, alpha=decay)
                torch._foreach_mul_(grads, factors)

    def _factors(self, params: list[Tensor], grads: list[Tensor], lr: Any, decay: float) -> list[Tensor]:
        _, param_norms = multi_tensor.multi_tensor_l2norm(params, per_tensor=True)
        _, grad_norms = multi_tensor.multi_tensor_l2norm(grads, per_tensor=True)
        factors = self.trust_coefficient * param_norms / (grad_norms + param_norms * decay + self.eps)
        if self.clip:
            factors = (factors / lr).clamp(max=1.0)
        # The caller multiplies `gradient + decay * parameter` by the factor. If the parameter's norm is 0, the factor
        # is 1: the gradient does not change. If the gradient's norm is 0, the factor is 0: there is no weight decay.
        factors = factors.masked_fill(param_norms == 0, 1.0).masked_fill(grad_norms == 0, 0.0)
        return list(factors.unbind())
