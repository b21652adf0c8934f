"""`FP16_Optimizer`: a wrapper that gives an optimizer FP32 masters and loss scaling, without `amp.initialize`."""

from __future__ import annotations

import logging
from typing import Any, NoReturn

import torch
from torch import Tensor

from amp_patch import multi_tensor
from amp_patch.apex.fp16_utils.fp16util import clip_grad_norm, delegated
from amp_patch.apex.fp16_utils.loss_scaler import DynamicLossScaler, LossScaler
from amp_patch.masters import of_optimizer
from amp_patch.masters.masters import publish, settle
from amp_patch.policy import LOW_PRECISION
from amp_patch.support.devices import by_device

logger = logging.getLogger("amp_patch")

# The defaults of a dynamic scale in `FP16_Optimizer`, as in Apex. `DynamicLossScaler` itself has others.
_DYNAMIC: dict[str, Any] = {"init_scale": 2.0**16, "scale_window": 2000}


class FP16_Optimizer:
    """Wraps an optimizer whose parameters are float16 or bfloat16, float32, or a mixture.

    ::

        optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), dynamic_loss_scale=True)
        optimizer.zero_grad()
        optimizer.backward(loss)  # in place of loss.backward()
        optimizer.step()

    `backward` leaves scaled gradients on the low-precision parameters, and unscaled FP32 gradients on their masters.
    The wrapped optimizer updates the masters, and `step` rounds them into the parameters. With a dynamic scale, the
    step after an overflow is skipped; with a static scale nothing is checked. FP32 parameters are their own masters.

    Args:
        init_optimizer: any optimizer, or wrapper of one (LARC). Its groups hold the masters from now on.
        static_loss_scale: the scale, unless `dynamic_loss_scale`.
        dynamic_loss_scale: use a `DynamicLossScaler`, here with an initial scale of 2**16 and a window of 2000.
        dynamic_loss_args: other arguments for the `DynamicLossScaler`.
        verbose: log skipped steps (logger "amp_patch").

    Attributes:
        optimizer: the wrapped optimizer.
        overflow: whether the last gradients overflowed.
        loss_scale, state, param_groups: may be set.
        fp16_groups: the low-precision parameters, by group of the optimizer.
        fp32_from_fp16_groups: their masters, by group.
        fp32_from_fp32_groups: the FP32 parameters, by group.
    """

    def __init__(
        self,
        init_optimizer: Any,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        for index, group in enumerate(init_optimizer.param_groups):
            for param in group["params"]:
                if param.dtype not in (torch.float32, *LOW_PRECISION):
                    raise TypeError(
                        f"FP16_Optimizer: group {index} has a parameter of {param.dtype}; wanted float16, bfloat16 or "
                        "float32"
                    )
        self.dynamic_loss_scale = bool(dynamic_loss_scale)
        self.loss_scaler = (
            DynamicLossScaler(**{**_DYNAMIC, **(dynamic_loss_args or {})})
            if dynamic_loss_scale
            else LossScaler(static_loss_scale)
        )
        self.verbose = verbose
        self.optimizer = init_optimizer
        self.overflow = False
        self.clip_grad_norm = clip_grad_norm
        self._masters = of_optimizer.Masters()
        self._own_unscaled = False  # whether the gradients of parameters without master were unscaled in place
        self._scale_of_grads = self.loss_scale  # the scale that the low-precision gradients were multiplied by
        for group in init_optimizer.param_groups:
            self._masters.attach(init_optimizer, group)
        groups = [self._masters.pairs([group]) for group in init_optimizer.param_groups]
        self.fp16_groups = [[p for p, m in pairs if p is not m] for pairs in groups]
        self.fp32_from_fp16_groups = [[m for p, m in pairs if p is not m] for pairs in groups]
        self.fp32_from_fp32_groups = [[m for p, m in pairs if p is m] for pairs in groups]
        if init_optimizer.state:
            init_optimizer.load_state_dict(init_optimizer.state_dict())  # torch casts the state to its parameters' type

    all_fp16_params = property(lambda self: _flat(self.fp16_groups))
    all_fp32_from_fp16_params = property(lambda self: _flat(self.fp32_from_fp16_groups))
    all_fp32_from_fp32_params = property(lambda self: _flat(self.fp32_from_fp32_groups))

    @property
    def loss_scale(self) -> float:
        return self.loss_scaler.loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler.cur_scale = LossScaler(value).cur_scale

    state: Any = delegated("optimizer", "state")
    param_groups: Any = delegated("optimizer", "param_groups")

    def __getstate__(self) -> NoReturn:
        raise RuntimeError("FP16_Optimizer cannot be pickled or copied: save its state_dict()")

    def __setstate__(self, state: Any) -> NoReturn:
        raise RuntimeError("FP16_Optimizer cannot be unpickled: load a state_dict()")

    def zero_grad(self, set_grads_to_None: bool = False, *, set_to_none: bool = False) -> None:
        """Zero the gradients of masters and of the model's parameters in place, or make them None."""
        for tensor in (*self._held(), *self.all_fp16_params):
            if set_grads_to_None or set_to_none:
                tensor.grad = None
            elif tensor.grad is not None:
                tensor.grad = tensor.grad.detach().zero_()

    def backward(self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """Run backward of `loss` in FP32 times the scale; gradients add to existing ones.

        If `update_master_grads` is False (several losses), call the method `update_master_grads` before `step`.
        """
        # This backward adds to gradients of an earlier backward, so multiply them to the present scale first.
        moved = self.loss_scale / self._scale_of_grads
        if moved != 1.0:
            _multiply(self.all_fp16_params, moved)
        if self._own_unscaled or moved != 1.0:
            _multiply(self.all_fp32_from_fp32_params, self.loss_scale if self._own_unscaled else moved)
        self._own_unscaled, self._scale_of_grads = False, self.loss_scale
        (loss.float() * self.loss_scale).backward(retain_graph=retain_graph)
        if update_master_grads:
            self.update_master_grads()

    @torch.no_grad()
    def update_master_grads(self) -> None:
        """Unscale the model's gradients into FP32 gradients of the masters.

        A master whose parameter has no gradient gets None. A dynamic scale is updated here, with one sync, and
        `self.overflow` becomes True if a gradient is not finite. There is one pass for the low-precision and one for
        the FP32 parameters of a device.
        """
        inverse = 1.0 / self._scale_of_grads
        found: dict[torch.device, Tensor] = {}
        pairs = []
        for param, master in zip(self.all_fp16_params, self.all_fp32_from_fp16_params, strict=True):
            if param.grad is None:
                master.grad = None
                continue
            if master.grad is None:
                master.grad = torch.empty_like(master)
            pairs.append((param.grad, master.grad))
        for device, (sources, targets) in by_device(pairs).items():
            found[device] = torch.zeros((), dtype=torch.float32, device=device)
            multi_tensor.multi_tensor_scale(sources, targets, inverse, found[device])
        if not self._own_unscaled:
            _multiply(self.all_fp32_from_fp32_params, inverse, found)
            self._own_unscaled = True
        if self.dynamic_loss_scale:
            self.overflow = any(found_inf.item() for found_inf in found.values())
            self.loss_scaler.update_scale(self.overflow)

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the FP32 gradients in place; return their total norm before the clipping, or -1 after an overflow."""
        return -1 if self.overflow else self.clip_grad_norm(self._held(), max_norm, norm_type)

    def step(self, closure: None = None) -> Any:
        """Update the masters, then the model's parameters. After an overflow change nothing. A closure is refused."""
        if closure is not None:
            raise RuntimeError(
                "FP16_Optimizer.step: a closure computes new gradients inside step(), after the check for overflow; "
                "call the closure's body first, then step() without it"
            )
        if self.overflow:
            if self.verbose:
                logger.warning("Gradient overflow: skipped the step; loss scale is now %g", self.loss_scale)
            return None
        links = self._masters.links
        settle(links)  # the user may have written into the model, or loaded a checkpoint
        result = self.optimizer.step()
        publish(links)
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, the wrapped optimizer's state and the masters, in plain types that `torch.load` accepts."""
        return {
            "loss_scaler": dict(vars(self.loss_scaler)),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": True,  # a key that Apex's class reads
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": [[master.detach() for master in group] for group in self.fp32_from_fp16_groups],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` of this class or of Apex's. The masters are rounded into the model's parameters too."""
        scaler = state_dict["loss_scaler"]
        values = dict(scaler) if isinstance(scaler, dict) else dict(vars(scaler))
        if "_loss_scale" in values:  # Apex pickled amp's scaler
            values["cur_scale"] = values["_loss_scale"]
        saved_groups = state_dict["fp32_from_fp16"]
        shapes = [[tuple(m.shape) for m in group] for group in self.fp32_from_fp16_groups]
        saved_shapes = [[tuple(m.shape) for m in group] for group in saved_groups]
        if shapes != saved_shapes:
            raise ValueError(
                f"FP16_Optimizer.load_state_dict: masters have shapes {saved_shapes} in the state, {shapes} here; "
                "make the model and the optimizer as they were when it was saved"
            )
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        self.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
        self.loss_scaler = DynamicLossScaler(**_DYNAMIC) if self.dynamic_loss_scale else LossScaler()
        vars(self.loss_scaler).update({k: v for k, v in values.items() if k in vars(self.loss_scaler)})
        self.overflow = state_dict["overflow"]
        for group, saved_group in zip(self.fp32_from_fp16_groups, saved_groups, strict=True):
            for master, saved in zip(group, saved_group, strict=True):
                master.copy_(saved)
        publish(self._masters.links)

    def _held(self) -> list[Tensor]:
        """Return the tensors that the wrapped optimizer updates."""
        return [param for group in self.optimizer.param_groups for param in group["params"]]


def _flat(groups: list[list[Tensor]]) -> list[Tensor]:
    return [param for group in groups for param in group]


@torch.no_grad()
def _multiply(params: list[Tensor], factor: float, found: dict[torch.device, Tensor] | None = None) -> None:
    """Multiply the gradients of `params` in place; raise the flags in `found`, {device: flag}, if one is not finite."""
    grads = ((param.grad.detach(),) for param in params if param.grad is not None)
    for device, (tensors,) in by_device(grads).items():
        fresh = torch.zeros((), dtype=torch.float32, device=device)
        found_inf = None if found is None else found.setdefault(device, fresh)
        multi_tensor.multi_tensor_unscale(tensors, factor, found_inf)
