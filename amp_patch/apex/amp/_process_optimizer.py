"""Apex's private attributes and methods on optimizers of `initialize`, for scripts that use them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from amp_patch import policy
from amp_patch.masters.masters import publish
from amp_patch.multi_tensor import inverse_of
from amp_patch.training import optimizer as optimizer_side
from amp_patch.training.loss_scaler import LossScaler
from amp_patch.training.stash import Pending, Stash
from amp_patch.training.unscale import unscale

__all__ = ["AmpOptimizerState"]

Pairs = list[tuple[Tensor, Tensor]]


@dataclass
class AmpOptimizerState(Stash):
    """`optimizer._amp_stash` with Apex's names. Lists are computed at each read, in the order of the groups.

    Attributes:
        lazy_init_called: whether masters exist. Apex made them at the first backward pass; here `initialize` makes
            them, so this is True.
        properties: the `frontend.Properties` of the training.
    """

    lazy_init_called: bool = True
    properties: Any = None

    @property
    def already_patched(self) -> bool:
        """Whether the next step will be skipped because of an overflow. Syncs with the device."""
        return self.enabled and any(bool(found_inf) for _, found_inf in self.found)

    @already_patched.setter
    def already_patched(self, value: bool) -> None:
        self.found.clear()
        if value and self.scalers:
            self.note_found(self.scalers[0], torch.ones_like(self.scalers[0].scale_tensor))

    @property
    def params_have_scaled_gradients(self) -> bool:
        """Whether a delayed exit has left the gradients scaled."""
        return self.pending is not None

    @params_have_scaled_gradients.setter
    def params_have_scaled_gradients(self, value: bool) -> None:
        if not value:
            self.pending = None
        elif self.pending is None:
            self.pending = Pending(self.scalers[0])
        self.route_grads()

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """The low-precision parameters by group. Without masters this and the next two properties are absent."""
        return [[param for param, _ in pairs] for pairs in self._mastered()]

    @property
    def fp32_from_fp16_groups(self) -> list[list[Tensor]]:
        """The masters of low-precision parameters, by group."""
        return [[master for _, master in pairs] for pairs in self._mastered()]

    @property
    def fp32_from_fp32_groups(self) -> list[list[Tensor]]:
        """The parameters that are their own masters, by group."""
        self._mastered()
        return [[master for param, master in pairs if param is master] for pairs in self._groups()]

    @property
    def all_fp16_params(self) -> list[Tensor]:
        """The low-precision parameters, with masters and without."""
        return [param for pairs in self._groups() for param, _ in pairs if param.dtype in policy.LOW_PRECISION]

    @property
    def all_fp32_params(self) -> list[Tensor]:
        """The FP32 parameters; absent if the level has masters."""
        if self.policy.master_weights:
            raise AttributeError("'AmpOptimizerState' object has no attribute 'all_fp32_params': it has masters")
        return [param for pairs in self._groups() for param, _ in pairs if param.dtype not in policy.LOW_PRECISION]

    @property
    def all_fp32_from_fp16_params(self) -> list[Tensor]:
        """The masters of the low-precision parameters; absent without masters."""
        return [master for group in self.fp32_from_fp16_groups for master in group]

    @property
    def all_fp32_from_fp32_params(self) -> list[Tensor]:
        """The parameters that are their own masters; absent without masters."""
        return [param for group in self.fp32_from_fp32_groups for param in group]

    def _groups(self) -> list[Pairs]:
        """Return the (parameter, master) pairs by group, for parameters that require grad.

        A parameter may be its own master.
        """
        optimizer = self.owner()
        groups = [] if optimizer is None else optimizer.param_groups
        return [[pair for pair in self.masters.pairs([group]) if pair[0].requires_grad] for group in groups]

    def _mastered(self) -> list[Pairs]:
        """Return the pairs of `_groups` with a separate master; AttributeError at a level without masters."""
        if not self.policy.master_weights:
            raise AttributeError("'AmpOptimizerState': there are no masters at this opt level, and no lists of them")
        return [[pair for pair in pairs if pair[0] is not pair[1]] for pairs in self._groups()]


class AmpOptimizer(optimizer_side.AmpOptimizer):
    """The optimizer's generated class, with Apex's private methods on amp_patch's masters."""

    _amp_stash: AmpOptimizerState
    param_groups: list[dict[str, Any]]

    def _amp_lazy_init(self) -> None:
        """Call `_lazy_init_maybe_master_weights` if a script has set `lazy_init_called` to False."""
        if not self._amp_stash.lazy_init_called:
            self._lazy_init_maybe_master_weights()
            self._amp_stash.lazy_init_called = True

    def _lazy_init_maybe_master_weights(self) -> None:
        """Cast the optimizer's state to the types of the tensors that it updates."""
        optimizer_side.state_follows_params(self)

    def _master_params_to_model_params(self) -> None:
        """Round every master into its parameter."""
        publish(self._amp_stash.masters.links)

    def _prepare_amp_backward(self) -> None:
        """Take all gradients off the model before a backward pass; `_post_amp_backward` adds them again."""
        self._amp_lazy_init()
        stash = self._amp_stash
        stash.masters.forget_aside(lambda _: True)
        for route in stash.masters.routes:
            route.to_masters, route.scaled = False, True
        held = stash.masters.of_groups(self.param_groups)
        stash.masters.set_aside(held)
        for param in held.params:
            param.grad = None

    def _post_amp_backward(self, loss_scaler: LossScaler) -> None:
        """Unscale the model's gradients into the masters', by the scale of `loss_scaler`, which records overflows."""
        self._amp_lazy_init()
        unscale([self], loss_scaler, inverse_of(loss_scaler.scale_tensor) if loss_scaler.scales else None)
        self._amp_stash.route_grads()
