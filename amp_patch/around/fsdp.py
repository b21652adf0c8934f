"""Support for torch's `fully_shard` (FSDP2): `fsdp_policy`, and checks of sharded models at `initialize`.

The checks compare the dtype in which FSDP gathers each weight with the level's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from amp_patch.environment import overridden, without_rungs
from amp_patch.model.keep_fp32 import KeepFP32, kept_modules
from amp_patch.policy import LOW_PRECISION, Flag, Options, Policy, resolve
from amp_patch.support import compiled
from amp_patch.support.distributed import is_dtensor
from amp_patch.support.fsdp import fsdp_modules, fsdp_state, is_fsdp, param_groups
from amp_patch.supported import reason
from amp_patch.training.arguments import Level
from amp_patch.training.innermost import as_list
from amp_patch.training.stash import Stash

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


def check_shards(models: list[nn.Module], policy: Policy, kept: list[nn.Module], *_: Any) -> None:
    """Raise ValueError if FSDP gathers a parameter of `models` in another dtype than `policy` wants for it.

    Also raise if `policy` stores masters or activations in a form that is not for shards, or has no masters in a cast
    model (O3), or has low-bit products.

    Args:
        kept: the modules that stay FP32.
    """
    stays = {module for root in kept for module in root.modules()}
    own = dict(policy for module in fsdp_modules(models) for policy in _own_policies(module))
    for model in models:
        for name, module, fsdp in _governed(model, "", None):
            for key, param in module._parameters.items():
                if param is not None and is_dtensor(param):
                    gathers = own.get(param) or getattr(fsdp_state(fsdp), "_mp_policy", None)
                    _check_shard(f"{name}.{key}".lstrip("."), param, policy, module in stays, fsdp, gathers)


def _check_shard(name: str, param: Any, policy: Policy, stays: bool, fsdp: Any, gathers: Any) -> None:
    low, level = policy.cast_model_type, policy.opt_level
    if policy.closes_masters:
        raise ValueError(_not_for_shards(f"initialize: parameter {name!r}", policy))
    if policy.saved_activations is not None and fsdp is not None:
        raise ValueError(
            f"initialize: parameter {name!r} is sharded, and saved_activations={policy.saved_activations!r} is not for "
            f"shards: {reason('act8', 'FSDP2')}"
        )
    if low is not None and not policy.master_weights:
        raise ValueError(f"initialize: parameter {name!r} is sharded; {no_masters(policy)}")
    if policy.product_format is not None:
        raise ValueError(
            f"initialize: parameter {name!r} is sharded, and opt_level {level!r} is not for shards: "
            f"{reason('formats', 'FSDP2')}"
        )
    if fsdp is None:
        if low is not None and not stays:
            raise ValueError(
                f"initialize: parameter {name!r} is a DTensor that no fully_shard gathers, and opt_level {level!r} "
                f"casts weights to {low}: shard its module with fully_shard(..., mp_policy=amp.fsdp_policy({level!r})),"
                " or choose opt_level='O1'"
            )
        return
    found = getattr(gathers, "param_dtype", None) or (low if param.dtype is low else torch.float32)
    wanted = torch.float32 if low is None or stays else low
    if gathers is None or found is wanted:
        return
    if stays and low is not None:
        raise ValueError(
            f"initialize: parameter {name!r} stays FP32 at opt_level {level!r} (a batch norm's, or keep_fp32), and "
            f"fully_shard gathers it in {found}; shard its module on its own, before the one around it: "
            f"fully_shard(module, mp_policy=amp.fsdp_policy('O0')); or, from torch 2.15, shard with amp.fsdp_policy("
            f"{level!r}, models=model, keep_fp32=...); or pass keep_batchnorm_fp32=False"
        )
    other = "" if found not in LOW_PRECISION or low is not None else ", or choose opt_level='O2' with its dtype"
    raise ValueError(
        f"initialize: fully_shard gathers parameter {name!r} in {found}, and opt_level {level!r} wants {wanted}; shard "
        f"with fully_shard(..., mp_policy=amp.fsdp_policy({level!r}, dtype={policy.dtype})){other}"
    )


def check_group(optimizer: Any, stash: Stash, params: list[Tensor]) -> None:
    """Raise ValueError if an added low-precision shard would need a master in a form that is not for shards."""
    for index, param in enumerate(params):
        if stash.policy.closes_masters and is_dtensor(param) and param.dtype in LOW_PRECISION:
            raise ValueError(_not_for_shards(f"add_param_group: parameter {index}", stash.policy))


def _not_for_shards(named: str, policy: Policy) -> str:
    form = str(policy.master_weights)
    return f"{named} is sharded, and master_weights={form!r} is not for shards: {reason(form, 'FSDP2')}"


def no_masters(policy: Policy) -> str:
    """Return the error text for sharded parameters at a level that casts weights and makes no masters (O3)."""
    return (
        f"opt_level {policy.opt_level!r} without master weights would keep no FP32 weights, but fully_shard's shards "
        "are FP32 and serve as masters at no further cost: choose opt_level='O2'"
    )


def _governed(module: nn.Module, name: str, fsdp: Any) -> Iterator[tuple[str, nn.Module, Any]]:
    """Yield (name, inner module, FSDP module) for `module` and each module in it.

    The FSDP module is the one that gathers the parameters of the inner module; None if no FSDP module does.
    """
    fsdp = module if is_fsdp(module) else fsdp
    yield name, module, fsdp
    for key, child in module.named_children():
        yield from _governed(child, f"{name}.{key}".lstrip("."), fsdp)


def stay_fp32(kept: Iterable[nn.Module]) -> Callable[[nn.Parameter], torch.dtype | None]:
    """Return a function for `MixedPrecisionPolicy(param_dtype_override_fn=)`: FSDP gathers parameters of `kept` uncast.

    The function receives a parameter, and returns its dtype, or None if the parameter is not in `kept`: the policy's
    dtype then holds. fully_shard calls it once per parameter, before it replaces the parameter by its shard. The
    function references the parameters weakly.
    """
    params = [weakref.ref(param) for module in kept for param in module.parameters()]

    def override(param: nn.Parameter) -> torch.dtype | None:
        return param.dtype if any(ref() is param for ref in params) else None

    return override


def _own_policies(module: Any) -> Iterator[tuple[Tensor | None, Any]]:
    """Yield (shard, the shard's mixed-precision policy) for each parameter of `module` with its own policy.

    From torch 2.15 on, a parameter's policy may differ from the module's.
    """
    for group in param_groups(module):
        for param in getattr(group, "fsdp_params", ()):
            if (policy := getattr(param, "mp_policy", None)) is not None:
                yield getattr(param, "sharded_param", None), policy


def fsdp_policy(
    opt_level: Level = "O1",
    *,
    dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    models: nn.Module | Sequence[nn.Module] | None = None,
    keep_fp32: KeepFP32 | Iterable[KeepFP32] = (),
    keep_batchnorm_fp32: Flag | None = None,
) -> MixedPrecisionPolicy:
    """Return torch's `MixedPrecisionPolicy` for an opt level, for `fully_shard(module, mp_policy=...)`::

        fully_shard(model, mp_policy=amp.fsdp_policy(level))
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = amp.initialize(model, optimizer, opt_level=level)

    At O2 and O5 the modules compute in the level's type, and their shards stay FP32: the shards are the masters. At O0,
    O1 and O4 the modules compute in FP32.

    A module that stays FP32 inside a cast model (a batch norm, `keep_fp32`) must be gathered in FP32. From torch 2.15
    on, `amp.fsdp_policy(level, models=model, keep_fp32=...)` ensures this for any grouping of modules. In an older
    torch a policy applies to all parameters of a `fully_shard` call. There, shard the module on its own, before the
    modules around it, with `amp.fsdp_policy("O0")`.

    Args:
        opt_level, dtype: as in `initialize`, with the environment's overrides, except that "O0" is not overridden.
        reduce_dtype: the type of the sum of gradients over the processes. None: FP32.
        models: the module, or a list of modules, that `fully_shard` will be called on with this policy. Their
            parameters that stay FP32 are recorded. Without effect before torch 2.15.
        keep_fp32, keep_batchnorm_fp32: as in `initialize`; only with `models`.

    Raises:
        ValueError: O3, which keeps no FP32 weights; an invalid level or dtype; `keep_fp32` without `models`.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    options = Options(dtype=dtype, keep_batchnorm_fp32=keep_batchnorm_fp32)
    opt_level, options = without_rungs(opt_level, options)
    if opt_level != "O0":  # an explicit O0 is for modules that stay FP32 at any level
        opt_level, options = overridden(opt_level, options)
    policy = resolve(opt_level, options)
    low = policy.cast_model_type
    if low is not None and not policy.master_weights:
        raise ValueError(f"fsdp_policy: {no_masters(policy)}")
    if models is None and keep_fp32:
        raise ValueError(
            f"fsdp_policy: keep_fp32 is {keep_fp32!r} and models is None; name the modules' model too: "
            "amp.fsdp_policy(level, models=model, keep_fp32=...)"
        )
    model_list = [compiled.uncompiled(model) for model in as_list(models)]
    kept = kept_modules(model_list, policy, keep_fp32, "fsdp_policy")
    overrides: dict[str, Any] = {}
    if kept and low is not None and "param_dtype_override_fn" in {field.name for field in fields(MixedPrecisionPolicy)}:
        overrides["param_dtype_override_fn"] = stay_fp32(kept)
    if low is not None and reduce_dtype is None:
        reduce_dtype = torch.float32
    return MixedPrecisionPolicy(param_dtype=low, reduce_dtype=reduce_dtype, **overrides)
