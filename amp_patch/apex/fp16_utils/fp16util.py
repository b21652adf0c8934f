"""Functions that cast a model to half precision, and that copy between its parameters and the caller's masters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from amp_patch import multi_tensor
from amp_patch.support import flat_rnn
from amp_patch.support.devices import by_device

__all__ = [
    "BN_convert_float",
    "FP16Model",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]


class tofp16(nn.Module):
    """A module that casts its input to float16."""

    def forward(self, input: Tensor) -> Tensor:
        """Return `input` in float16: a copy, or itself if it is float16."""
        return input.half()


def BN_convert_float(module: nn.Module) -> nn.Module:
    """Cast the batch norms in `module` that have weights to float32, in place; return `module`."""
    for child in module.modules():
        if isinstance(child, _BatchNorm) and child.affine:
            child.float()
    return module


def network_to_half(network: nn.Module) -> nn.Sequential:
    """Cast `network` to float16 in place, except its batch norms; return it behind a module that casts the input.

    The parameters stay the same objects, but their names begin with "1." in the result.
    """
    return nn.Sequential(tofp16(), BN_convert_float(network.half()))


@torch.no_grad()
def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating parameters, gradients and buffers of `module`, without its children, in place."""
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if tensor.is_floating_point():
            grad, tensor.grad = tensor.grad, None  # torch refuses a gradient of another type than its tensor's
            tensor.data = tensor.data.to(dtype)
            tensor.grad = None if grad is None else grad.to(dtype)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast `network` in place, except the batch norms that have weights; return `network`."""
    for module in network.modules():
        if isinstance(module, _BatchNorm) and module.affine:
            continue
        convert_module(module, dtype)
        if isinstance(module, nn.RNNBase):
            flat_rnn.flatten_module(module)
    return network


class FP16Model(nn.Module):
    """A wrapper that casts `network`, except its batch norms, to float16 in place, and the inputs at each call."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, torch.half)

    def forward(self, *inputs: Tensor) -> Any:
        """Return the output of `network` for `inputs` cast to float16; the output is not cast back."""
        return self.network(*(tensor.half() for tensor in inputs))


def prep_param_lists(model: nn.Module, flat_master: bool = False) -> tuple[list[nn.Parameter], list[Tensor]]:
    """Return (model_params, master_params): the trainable parameters, and FP32 copies of them that require grad.

    `flat_master=True`, Apex's one tensor of all parameters, is refused here and in the next two functions.
    """
    _refuse_flat("prep_param_lists", flat_master)
    model_params = [param for param in model.parameters() if param.requires_grad]
    return model_params, [param.detach().clone().float().requires_grad_() for param in model_params]


@torch.no_grad()
def model_grads_to_master_grads(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy the gradients of the model into FP32 gradients of the masters. Scaled gradients stay scaled.

    If a master has a gradient, it is written in place. If a parameter has no gradient, its master's becomes None.
    """
    _refuse_flat("model_grads_to_master_grads", flat_master)
    for param, master in zip(model_params, master_params, strict=True):
        if param.grad is None:
            master.grad = None
        elif master.grad is None:
            master.grad = torch.empty_like(master)
    grads = [(p.grad, m.grad) for p, m in zip(model_params, master_params, strict=True)]
    _copy((grad, copy) for grad, copy in grads if grad is not None and copy is not None)


@torch.no_grad()
def master_params_to_model_params(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Round the masters into the model's parameters, in place."""
    _refuse_flat("master_params_to_model_params", flat_master)
    _copy(zip(master_params, model_params, strict=True))


def _refuse_flat(name: str, flat_master: bool) -> None:
    if flat_master:
        raise ValueError(
            f"{name}: flat_master=True is not supported; use flat_master=False, a master for each parameter"
        )


def to_python_float(t: Any) -> float:
    """Return the value of a tensor of one element, or the first of a sequence. Syncs with the tensor's device."""
    return t.item() if hasattr(t, "item") else t[0]


def clip_grad_norm(parameters: Any, max_norm: float, norm_type: float = 2.0, **kwargs: Any) -> Tensor:
    """Call `torch.nn.utils.clip_grad_norm_`. At O2 amp_patch has patched it to clip the masters of `parameters`."""
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, **kwargs)


def _copy(pairs: Iterable[tuple[Any, Tensor]]) -> None:
    """Copy the source of each pair (source, target) to its target, in the target's type. One pass for each device."""
    for targets, sources in by_device((target, source) for source, target in pairs).values():
        multi_tensor.multi_tensor_scale(sources, targets, 1.0)


def delegated(inner: str, name: str) -> Any:
    """Return a property that is the attribute `name` of the object `self.inner`, for reads and writes."""
    return property(
        lambda self: getattr(getattr(self, inner), name),
        lambda self, value: setattr(getattr(self, inner), name, value),
    )
