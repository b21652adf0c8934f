"""Refusal of weights and buffers that become infinite, by the cast of `initialize` or by a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.model.masks import is_mask
from amp_patch.model.of_model import followed_policy
from amp_patch.model.tensors import load_masters
from amp_patch.policy import LOW_PRECISION, Policy
from amp_patch.support.devices import by_device
from amp_patch.support.distributed import local
from amp_patch.support.generated_class import base_class
from amp_patch.support.quantized import is_quantized

_Named = tuple[str, str, Tensor]  # the path of a module, and the name and the value of a tensor of it


def check_models(models: Iterable[nn.Module], kept: Iterable[nn.Module], policy: Policy) -> None:
    """Raise if `policy` casts a parameter or buffer of `models`, outside of `kept`, that its type cannot hold.

    Each tensor is read once, with one sync for each device. Additive masks, which become -inf, are accepted.
    """
    if policy.cast_model_type is None:
        return
    stay = {module for root in kept for module in root.modules()}
    for model in models:
        named = [
            (path, name, tensor)
            for path, module in model.named_modules()
            if module not in stay
            for name, tensor in (
                *module._parameters.items(),
                *({} if policy.keep_buffers_fp32 else module._buffers).items(),
            )
            if tensor is not None
        ]
        _refuse_infinite("initialize", model, named, policy.cast_model_type, policy)


def load_in_range(model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Call `load_masters`; first raise if `state_dict` has a value that its FP16 tensor cannot hold."""
    policy = followed_policy(model)
    if policy is not None and (low := policy.cast_model_type) is torch.float16:
        targets = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        values = ((name, state_dict.get(prefix + name)) for name, target in targets if target.dtype is low)
        named = [(*name.rpartition(".")[::2], value) for name, value in values if isinstance(value, Tensor)]
        _refuse_infinite("load_state_dict", model, named, low, policy)
    load_masters(model, state_dict, prefix)


def _refuse_infinite(caller: str, model: nn.Module, named: list[_Named], low: torch.dtype, policy: Policy) -> None:
    found = [(path, name, tensor, local(tensor.detach())) for path, name, tensor in named if _may_lose(tensor, low)]
    found = [each for each in found if each[3].numel()]
    largest: dict[Tensor, float] = {}
    for (values,) in by_device((value,) for *_, value in found).values():
        norms = torch.stack([norm.float() for norm in torch._foreach_norm(values, float("inf"))]).tolist()
        largest.update(zip(values, norms, strict=True))
    for path, name, tensor, value in found:
        if largest[value] <= torch.finfo(low).max or (not tensor.requires_grad and is_mask(value, low)):
            continue
        lost = value[value.isfinite() & value.to(low).isinf()]
        if not lost.numel():
            continue
        buffer = name in model.get_submodule(path)._buffers
        ways = ['pass keep_fp32="buffers"'] if buffer else [f"name its module in keep_fp32, {path!r}"] if path else []
        wide = "'O4'" if low is torch.bfloat16 else "'O5', or dtype=torch.bfloat16"
        raise ValueError(
            f"{caller}: {'buffer' if buffer else 'parameter'} {f'{path}.{name}'.lstrip('.')!r} of "
            f"{base_class(model).__name__} is {tensor.dtype} and holds {lost[lost.abs().argmax()].item():g}, which "
            f"{low} cannot hold ({torch.finfo(low).max:g} at most), and opt_level {policy.opt_level!r} casts it to "
            "that: " + ", or ".join([*ways, f"choose opt_level={wide}"])
        )


def _may_lose(tensor: Tensor, low: torch.dtype) -> bool:
    known = tensor.dtype in (torch.float32, torch.float64, *LOW_PRECISION) and tensor.dtype is not low
    return known and not tensor.is_meta and not is_quantized(tensor) and tensor.layout is torch.strided
