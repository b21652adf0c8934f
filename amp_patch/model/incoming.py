"""Models that have FP16 or BF16 tensors before `initialize`: their original types, and their types under a policy.

FP32 holds all values of FP16 and BF16, so a training of such a model has the same bits as one of `model.float()`. It
needs less memory: a weight that has the level's type already gets only a master, and a frozen one gets nothing.
`restore` returns tensors to their original types. The tables compare parameters by identity, and reference them weakly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from amp_patch.masters.masters import master_of
from amp_patch.model import buffers
from amp_patch.model.buffers import Owned
from amp_patch.policy import LOW_PRECISION, Policy
from amp_patch.support.distributed import is_dtensor
from amp_patch.support.quantized import is_quantized

# ----------------------------------------------------------------------------------------------------------------------
# Original types, from before the first `initialize`

_params = WeakIdKeyDictionary()
_buffers: weakref.WeakKeyDictionary[nn.Module, dict[str, torch.dtype]] = weakref.WeakKeyDictionary()


def type_of(param: Tensor) -> torch.dtype | None:
    """Return the type that `param` had before `initialize` if that was low precision, else None."""
    found: torch.dtype | None = _params.get(param)
    return found


def note_type(param: Tensor, dtype: torch.dtype | None) -> None:
    """Record the original type of `param`; None removes the record."""
    if dtype is None:
        _params.pop(param, None)
    else:
        _params[param] = dtype


def copied(model: nn.Module, _: Any) -> tuple[Callable[[Any, Any], None], Any] | None:
    """Return the original types of the parameters of `model`, for a copy or pickle (`joints.copied`)."""
    known = [(param, dtype) for param in model.parameters() if (dtype := type_of(param)) is not None]
    return (_arrive, known) if known else None


def _arrive(_: Any, known: list[tuple[Tensor, torch.dtype]]) -> None:
    for param, dtype in known:
        note_type(param, dtype)


def give_buffers_back(model: nn.Module) -> None:
    """Cast the FP32 buffers inside `model` to their original types; a shared buffer stays shared."""
    types = {(m, name): dtype for m in model.modules() for name, dtype in _buffers.pop(m, {}).items()}
    there = ((m, name, m._buffers.get(name)) for m, name in types)
    wide = [(m, name) for m, name, buffer in there if buffer is not None and buffer.dtype is torch.float32]
    buffers.replace(wide, lambda module, name, buffer: buffer.to(types[module, name]))


def forget_types() -> None:
    """Forget the original types of all parameters and buffers, at `amp.restore()`."""
    _params.clear()
    _buffers.clear()


# ----------------------------------------------------------------------------------------------------------------------
# Types under a policy


def arrive(models: Iterable[nn.Module], earlier: AbstractSet[Tensor]) -> None:
    """Record the original types of the parameters of `models`, except those of `earlier` trainings."""
    for model in models:
        for param in model.parameters():
            if param not in earlier:
                low = param.dtype in LOW_PRECISION and not is_quantized(param)
                note_type(param, param.dtype if low else None)


def came_low(model: nn.Module) -> bool:
    """Tell whether any parameter of `model` was low precision before its first `initialize`."""
    return any(type_of(param) is not None for param in model.parameters())


def has_widened(model: nn.Module) -> bool:
    """Tell whether an earlier training has changed the type of originally low-precision parameters, or made masters."""
    low = [(param, type_of(param)) for param in model.parameters()]
    return any(t is not None and (param.dtype is not t or master_of(param) is not None) for param, t in low)


def wanted_type(param: Tensor, stays: bool, policy: Policy, *, widened: bool) -> torch.dtype:
    """Return the type that a floating parameter has in a training under `policy`.

    In a cast model this is the model's type, or FP32 if the parameter stays FP32. In any other model it is FP32, with
    two exceptions for parameters that were low precision before `initialize`. At O1 and O4 such a parameter keeps its
    type if it is frozen and does not stay FP32; at O0 it keeps its type unless `widened`. A low-precision shard keeps
    its type at every level.

    Args:
        stays: whether the parameter's module stays FP32.
        widened: `has_widened(model)`. At O0 such a model is FP32 as a whole, because plain torch does not mix types,
            and because rounding the parameters back would lose trained values.
    """
    cast = policy.cast_model_type
    if type_of(param) is None:
        return torch.float32 if cast is None or stays else cast
    if is_dtensor(param):
        return param.dtype
    if stays and not policy.changes_nothing:
        return torch.float32
    if cast is not None:
        return cast
    if policy.patch_torch_functions:
        return torch.float32 if param.requires_grad or master_of(param) is not None else param.dtype
    return torch.float32 if widened else param.dtype


def check(model: nn.Module, policy: Policy, stays: AbstractSet[Tensor]) -> None:
    """Raise if a low-precision or quantized parameter of `model` rules a training under `policy` out."""
    if policy.changes_nothing:
        return
    for name, param in model.named_parameters():
        named = f"initialize: parameter {name!r} of {type(model).__name__}"
        if is_quantized(param):
            if param.requires_grad:
                raise ValueError(
                    f"{named} is quantized ({type(param).__name__}, {param.dtype}) and trained, which no opt level "
                    "supports; freeze it with requires_grad_(False) and train adapters (LoRA), or pass it unquantized"
                )
            continue
        if type_of(param) is None:
            continue
        if is_dtensor(param) and param.requires_grad:
            raise ValueError(
                f"{named} is sharded and {param.dtype}; wanted trained shards in FP32, which serve as masters: call "
                "model.float() before fully_shard"
            )


def params_to_widen(models: Iterable[nn.Module], kept: Iterable[nn.Module], policy: Policy) -> list[nn.Parameter]:
    """Return the low-precision parameters that are FP32 under `policy`, each once, before any cast."""
    stays = {param for module in kept for param in module.parameters()}
    once: dict[nn.Parameter, None] = {}
    for model in models:
        widened = has_widened(model)
        low = (p for p in model.parameters() if type_of(p) is not None and p.dtype in LOW_PRECISION)
        once |= {p: None for p in low if wanted_type(p, p in stays, policy, widened=widened) is torch.float32}
    return list(once)


def buffers_to_widen(models: Iterable[nn.Module], kept: Iterable[nn.Module], policy: Policy) -> list[Owned]:
    """Return the low-precision buffers that `policy` wants in another type. The caller casts them to FP32 first."""
    low = [model for model in models if came_low(model)]
    plain = policy.cast_model_type is None and not policy.patch_torch_functions
    wide = {m for model in low if plain and has_widened(model) for m in model.modules()}
    if not policy.changes_nothing:
        wide |= {module for root in kept for module in root.modules()}
    every = policy.patch_torch_functions or policy.keep_buffers_fp32
    return [
        (module, name)
        for module in dict.fromkeys(m for model in low for m in model.modules())
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.dtype in LOW_PRECISION and not is_quantized(buffer)
        if every or module in wide or policy.cast_model_type not in (None, buffer.dtype)
    ]


def widen_buffers(owned: Iterable[Owned]) -> None:
    """Cast the buffers `owned` to FP32, and record their original types; a shared buffer stays shared."""
    for module, name, buffer in buffers.replace(owned, lambda module, name, buffer: buffer.float()):
        _buffers.setdefault(module, {}).setdefault(name, buffer.dtype)
