"""Models that are not FP32 when `initialize` gets them: their types, what each tensor becomes, what cannot be taken.

Values of FP16 and BF16 are FP32's to the bit, so that a training that begins with them is the one of `model.float()`.
It takes less: where a weight has the type of the level already nothing is made of it but its master, and of a frozen
one nothing at all. `restore` gives the types of before. Parameters are known by identity, and held weakly.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from amp_patch.masters.masters import master_of
from amp_patch.model.buffers import Owned
from amp_patch.policy import LOW_PRECISION, STOCHASTIC, Policy
from amp_patch.support.distributed import is_dtensor
from amp_patch.support.quantized import is_quantized
from amp_patch.support.tensor_content import hook_swaps, release_in_swaps

# ----------------------------------------------------------------------------------------------------------------------
# The types in which they came

_params = WeakIdKeyDictionary()
_buffers: weakref.WeakKeyDictionary[nn.Module, dict[str, torch.dtype]] = weakref.WeakKeyDictionary()


def type_of(param: Tensor) -> torch.dtype | None:
    """The low-precision type in which `param` came; None where it came in another, or never."""
    found: torch.dtype | None = _params.get(param)
    return found


def note_type(param: Tensor, dtype: torch.dtype | None) -> None:
    """Take note that `param` came in `dtype`; None: in none that is to be given back."""
    if dtype is None:
        _params.pop(param, None)
        return
    hook_swaps()
    _params[param] = dtype


def note_buffer_type(module: nn.Module, name: str, dtype: torch.dtype) -> None:
    """Take note that a buffer came in `dtype`, unless it is known from before."""
    _buffers.setdefault(module, {}).setdefault(name, dtype)


def give_buffers_back(model: nn.Module) -> None:
    """Cast the FP32 buffers inside `model` to the types in which they came; a shared one stays shared."""
    done: dict[int, tuple[Tensor, Tensor]] = {}
    for module in model.modules():
        for name, dtype in _buffers.pop(module, {}).items():
            buffer = module._buffers.get(name)
            if buffer is not None and buffer.dtype is torch.float32:
                _, module._buffers[name] = done.setdefault(id(buffer), (buffer, buffer.to(dtype)))


def forget_types() -> None:
    """Forget the types of all parameters and buffers."""
    _params.clear()
    _buffers.clear()


@release_in_swaps
def _release(param: Tensor) -> Any:
    dtype = _params.pop(param, None)
    return None if dtype is None else lambda: note_type(param, dtype)


# ----------------------------------------------------------------------------------------------------------------------
# What is made of them


def arrive(models: Iterable[nn.Module], earlier: Collection[int]) -> None:
    """Take note of the types of the parameters of `models`, save those (ids) that earlier trainings have."""
    for model in models:
        for param in model.parameters():
            if id(param) not in earlier:
                low = param.dtype in LOW_PRECISION and not is_quantized(param)
                note_type(param, param.dtype if low else None)


def came_low(model: nn.Module) -> bool:
    """Whether a parameter of `model` came in low precision."""
    return any(type_of(param) is not None for param in model.parameters())


def has_widened(model: nn.Module) -> bool:
    """Whether an earlier training has given parameters of `model` that came in low precision other types or masters."""
    low = [(param, type_of(param)) for param in model.parameters()]
    return any(t is not None and (param.dtype is not t or master_of(param) is not None) for param, t in low)


def wanted_type(param: Tensor, stays: bool, policy: Policy, *, widened: bool) -> torch.dtype:
    """The type that `policy` wants a floating parameter in.

    Args:
        stays: whether its module stays FP32.
        widened: `has_widened(model)`. At O0 all of such a model is FP32: plain torch takes no mixed ones, and to round
            would lose what was trained.
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


def check(model: nn.Module, policy: Policy, stays: Collection[int]) -> None:
    """Raise where `policy` can do nothing with a low-precision or quantized parameter of `model`.

    Where weights become FP16 the values of BF16 ones are looked at, which syncs.
    """
    if policy.changes_nothing:
        return
    for name, param in model.named_parameters():
        named = f"initialize: parameter {name!r} of {type(model).__name__}"
        if is_quantized(param):
            if param.requires_grad:
                raise ValueError(
                    f"{named} is quantized ({type(param).__name__}, {param.dtype}) and trained, which no opt level can "
                    "do; freeze it with requires_grad_(False) and train adapters (LoRA), or give the model unquantized"
                )
            continue
        if type_of(param) is None:
            continue
        if is_dtensor(param) and param.requires_grad and not _is_rounded_shard(param, id(param) in stays, policy):
            if policy.master_weights == STOCHASTIC and id(param) in stays:
                raise ValueError(
                    f"{named} is sharded and {param.dtype}, and its module stays FP32 (a batch norm, or keep_fp32): "
                    "call float() of that module before fully_shard; or pass keep_batchnorm_fp32=False"
                )
            raise ValueError(
                f"{named} is sharded and {param.dtype}; wanted trained shards in FP32, which serve as masters: call "
                "model.float() before fully_shard"
            )
        wanted = wanted_type(param, id(param) in stays, policy, widened=False)
        if wanted is torch.float16 and param.dtype is torch.bfloat16 and master_of(param) is None:
            _check_range(named, param, policy)


def _is_rounded_shard(param: Tensor, stays: bool, policy: Policy) -> bool:
    """Whether `policy` trains this low-precision shard as it is, and rounds it by chance."""
    return policy.master_weights == STOCHASTIC and param.dtype is policy.cast_model_type and not stays


@torch.no_grad()
def _check_range(named: str, param: Tensor, policy: Policy) -> None:
    low = param.detach().half()
    if low.is_meta or torch.isfinite(low).all():
        return
    lost = param.detach()[low.isinf() & torch.isfinite(param)]
    if lost.numel():
        worst = lost.float().abs().amax().item()
        raise ValueError(
            f"{named} is torch.bfloat16 and holds {worst:g}, which torch.float16 cannot hold (65504 at most), and "
            f"opt_level {policy.opt_level!r} casts it to that: choose opt_level='O5', or dtype=torch.bfloat16"
        )


def params_to_widen(models: Iterable[nn.Module], stays: Collection[int], policy: Policy) -> list[nn.Parameter]:
    """The low-precision parameters that are FP32 under `policy`, each once; a cast changes none of them."""
    once: dict[int, nn.Parameter] = {}
    for model in models:
        widened = has_widened(model)
        for param in model.parameters():
            if type_of(param) is None or param.dtype not in LOW_PRECISION:
                continue
            if wanted_type(param, id(param) in stays, policy, widened=widened) is torch.float32:
                once[id(param)] = param
    return list(once.values())


def buffers_to_widen(models: Iterable[nn.Module], kept: Iterable[nn.Module], policy: Policy) -> list[Owned]:
    """The low-precision buffers of models that came so and that `policy` wants otherwise: FP32 first."""
    stays = set() if policy.changes_nothing else {id(module) for root in kept for module in root.modules()}
    low = [model for model in models if came_low(model)]
    modules = {id(m): m for model in low for m in model.modules()}
    plain = policy.cast_model_type is None and not policy.patch_torch_functions
    widened = {id(m) for model in low if plain and has_widened(model) for m in model.modules()}
    found = []
    for key, module in modules.items():
        for name, buffer in module._buffers.items():
            if buffer is None or buffer.dtype not in LOW_PRECISION or is_quantized(buffer):
                continue
            if (
                key in stays
                or key in widened
                or policy.patch_torch_functions
                or policy.cast_model_type not in (None, buffer.dtype)
            ):
                found.append((module, name))
    return found


def widen_buffers(owned: Iterable[Owned]) -> None:
    """Make these buffers FP32, and note the types in which they came; a shared one stays shared."""
    done: dict[int, tuple[Tensor, Tensor]] = {}
    for module, name in owned:
        buffer = module._buffers[name]
        if buffer is not None:
            note_buffer_type(module, name, buffer.dtype)
            _, module._buffers[name] = done.setdefault(id(buffer), (buffer, buffer.float()))
