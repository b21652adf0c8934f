"""The hooks of Lightning's `Precision` plugin, shared by the plugins for `lightning` and `pytorch_lightning`.

This file imports neither package.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.casts import regions
from amp_patch.casts import state as casts_state
from amp_patch.environment import without_rungs
from amp_patch.frontend import initialize, master_params
from amp_patch.masters.masters import links_of, publish_written
from amp_patch.model import keep_fp32
from amp_patch.model.forward import policy_of
from amp_patch.model.incoming import came_low
from amp_patch.policy import Options
from amp_patch.training.arguments import Level
from amp_patch.training.innermost import innermost
from amp_patch.training.optimizer import AmpOptimizer
from amp_patch.training.scale_loss import scale_loss
from amp_patch.training.stash import stash_of
from amp_patch.training.step import WHOLE
from amp_patch.training.training import leave


class OptLevel:
    """Lightning's `Precision` hooks at an opt level, for automatic and manual optimization, on one device or under DDP.

    During `fit`, `validate`, `test` and `predict`, the LightningModule is a model of `amp.initialize`. So are the
    children that `training_step` may call directly. At the end of each the module is plain again, in FP32 with the
    masters' values. If it came in FP16 or BF16, the values are rounded to that type. The casts of O1 apply in
    Lightning's steps only, not in the rest of the process.

    Each backward leaves unscaled gradients for all optimizers, except those that `toggle_optimizer` has switched off.
    Clipping acts on the masters. `on_after_backward` and later hooks see unscaled gradients; at O2 and O5 they see the
    gradients of the optimizers' parameters. A checkpoint contains FP32 weights and the loss scale.

    Args:
        opt_level, options: as in `amp.initialize`. All losses share one scale.

    Source: Lightning's own MixedPrecision. As there, the closure runs before the step if losses are scaled.
    """

    def __init__(self, opt_level: Level = "O1", **options: Any) -> None:
        without_rungs(opt_level, Options())  # raises here, and not in `fit`, if the level is invalid
        self.options = {"opt_level": opt_level, **options}
        self.optimizers: list[Any] = []
        self.scalers: list[Any] = []
        self.models: list[nn.Module] = []

    def convert_module(self, module: Any) -> nn.Module:
        """Cast the module, and make its masters. Lightning calls this before DDP wraps it and before it has optimizers.

        So `initialize` gets a temporary SGD over all parameters, to make masters for.
        """
        module.to(module.trainer.strategy.root_device)
        called = [m for child in module.children() for m in keep_fp32.with_forward(child)]
        self.models = [module, *(m for m in called if any(True for _ in m.parameters()))]
        params = list(module.parameters())
        self._initialize([torch.optim.SGD(params, lr=0.0)] if params else [])
        return module

    def connect(self, model: Any, optimizers: list[Any], lr_schedulers: list[Any]) -> tuple[Any, list[Any], list[Any]]:
        """Call `initialize` with the module's real optimizers, which then hold the masters; return the arguments."""
        self.optimizers = [innermost(optimizer) for optimizer in optimizers]
        if self.optimizers:
            for optimizer in self.optimizers:
                if isinstance(optimizer, torch.optim.Optimizer):
                    # Registered before `initialize`, so that it runs before amp's own hook, which checks the gradients.
                    optimizer.register_step_pre_hook(_closure_first)
            self._initialize(self.optimizers)
            stash = stash_of(self.optimizers[0])
            self.scalers = [] if stash is None else stash.scalers
        return model, optimizers, lr_schedulers

    def _initialize(self, optimizers: list[Any]) -> None:
        """Call `amp.initialize` without making O1's casts the default of the process."""
        default = casts_state.default()
        initialize(self.models, optimizers, **self.options)
        casts_state.set_default(default)

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the context of the level's casts; Lightning runs the steps in it."""
        policy = policy_of(self.models[0]) if self.models else None
        return nullcontext() if policy is None else regions.region(policy)

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Run backward of the loss `tensor` through `scale_loss`, for the optimizers that are not switched off."""
        on = [o for o in self.optimizers if any(p.requires_grad for p in master_params(o))] or self.optimizers
        with scale_loss(tensor, on) as scaled:
            model.backward(scaled, *args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scales for Lightning's checkpoint; syncs with the device."""
        return {f"loss_scaler{index}": scaler.state_dict() for index, scaler in enumerate(self.scalers)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the loss scales of a `state_dict`."""
        for index, scaler in enumerate(self.scalers):
            scaler.load_state_dict(state_dict[f"loss_scaler{index}"])

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """If the module came in low precision, load the weights of a checkpoint again, now into its masters.

        Lightning has loaded the checkpoint before `convert_module` made masters. The module's low-precision weights
        have rounded the values then.
        """
        module: Any = self.models[0] if self.models else None
        if module is not None and came_low(module):
            module.trainer.strategy.load_model_state_dict(checkpoint, strict=module.strict_loading)

    def teardown(self) -> None:
        """Make the module plain again. Lightning has moved it to the CPU by now, so move the masters there first.

        A moved master counts as written. It must not: its weight may have edits (a callback's averages) to take over.
        """
        links = links_of({p for module in self.models for p in module.parameters()})
        publish_written(links)
        for param, link in links:
            link.master.data = link.master.data.to(param.device)
        links.versions.save()
        leave(self.models, self.optimizers)
        self.models = []


def _closure_first(optimizer: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """Run Lightning's closure, which makes the gradients, before the step: amp checks gradients when the step begins.

    A step in one pass or in portions takes no closure either. This is a step pre-hook of torch. If gradients are not
    checked, all masters have memory of their own, and only the optimizer's own code can make the step, it does nothing.

    Returns:
        (args, kwargs) of the step without the closure, which has run; None if the hook did nothing.
    """
    stash = stash_of(optimizer)
    if stash is None or kwargs.get("closure") is None:
        return None
    by_amp = isinstance(optimizer, AmpOptimizer) and optimizer.strategy is not WHOLE
    if not (by_amp or stash.checks_gradients or stash.policy.closes_masters):
        return None
    kwargs["closure"]()
    return args, {**kwargs, "closure": None}
