"""Modules that went through torch's `fully_shard` (FSDP2): what they gather their parameters in, and hold back.

Nothing of torch.distributed is imported here: a process that shards nothing does not pay for it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from amp_patch.policy import LOW_PRECISION, SPLIT, STOCHASTIC, Policy
from amp_patch.support import distributed
from amp_patch.support.distributed import is_dtensor

# FSDP's state of a module is private: `_state` and `_param_groups` read it. In a torch without these attributes nothing
# is refused, and no gradient is known to be held back.


def is_fsdp(module: Any) -> bool:
    """Whether `module` went through torch's `fully_shard`."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def without_fsdp(base: type) -> dict[str, Any]:
    """How a class generated of `base` makes instances, `model[2:]` say: as fully_shard's own class does, without it.

    torch looks for the class of before at a fixed place of the method resolution order, where a generated one has
    another.
    """
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is None or not issubclass(base, kind):
        return {}
    return {"__new__": lambda cls, *args, **kwargs: base.__new__(base, *args, **kwargs)}


def is_used() -> bool:
    """Whether a module of this process may have gone through `fully_shard`, which makes a subclass for each class."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return kind is not None and bool(kind.__subclasses__())


def is_fsdp1(module: Any) -> bool:
    """Whether `module` is wrapped in the older FullyShardedDataParallel."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    return kind is not None and isinstance(module, kind)


def fsdp_modules(models: Iterable[nn.Module]) -> list[Any]:
    """The modules in `models` that went through `fully_shard`, each once."""
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    return list({id(m): m for model in models for m in model.modules() if is_fsdp(m)}.values())


def hold_gradients_back(modules: Iterable[Any]) -> bool:
    """Whether a backward pass now would leave gradients unreduced inside of these FSDP modules, out of reach.

    `set_requires_gradient_sync(False)` has them do so, for all micro-batches of an iteration but the last.
    """
    return any(
        not (getattr(group, "reduce_grads", True) and getattr(group, "all_reduce_grads", True))
        for module in modules
        for group in _param_groups(module)
    )


def gathered(modules: Iterable[Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The whole parameters that these FSDP modules gather theirs in for a forward, with these.

    A whole one is the leaf of the graph. FSDP reduces its gradient into the `.grad` of the parameter.
    """
    for module in modules:
        for group in _param_groups(module):
            for param in getattr(group, "fsdp_params", ()):
                if (whole := getattr(param, "_unsharded_param", None)) is not None:
                    yield whole, param.sharded_param


def check_shards(models: list[nn.Module], policy: Policy, kept: list[nn.Module]) -> None:
    """Raise unless each sharded parameter of the models is gathered in the type that `policy` gives it.

    `kept`: the modules that stay FP32.
    """
    stays = {id(module) for root in kept for module in root.modules()}
    own = dict(policy for module in fsdp_modules(models) for policy in _own_policies(module))
    for model in models:
        for name, module, fsdp in _governed(model, "", None):
            for key, param in module._parameters.items():
                if param is not None and is_dtensor(param):
                    gathers = own.get(id(param)) or getattr(_state(fsdp), "_mp_policy", None)
                    _check_shard(f"{name}.{key}".lstrip("."), param, policy, id(module) in stays, fsdp, gathers)


def _check_shard(name: str, param: Any, policy: Policy, stays: bool, fsdp: Any, gathers: Any) -> None:
    low, level = policy.cast_model_type, policy.opt_level
    if policy.master_weights == SPLIT:
        raise ValueError(
            f"initialize: parameter {name!r} is sharded, and master_weights='split' is not for shards: these are FP32, "
            "the masters themselves; leave master_weights at None"
        )
    if policy.master_weights == STOCHASTIC and param.requires_grad and not stays:
        _check_rounded(f"initialize: parameter {name!r}", param)
    if low is not None and not policy.master_weights:
        raise ValueError(f"initialize: parameter {name!r} is sharded; {no_masters(policy)}")
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
            f"fully_shard gathers it in {found}; shard its module for itself, before the one around it: "
            f"fully_shard(module, mp_policy=amp.fsdp_policy('O0')); or, from torch 2.15, shard with amp.fsdp_policy("
            f"{level!r}, models=model, keep_fp32=...); or pass keep_batchnorm_fp32=False"
        )
    other = "" if found not in LOW_PRECISION or low is not None else ", or choose opt_level='O2' with its dtype"
    raise ValueError(
        f"initialize: fully_shard gathers parameter {name!r} in {found}, and opt_level {level!r} wants {wanted}; shard "
        f"with fully_shard(..., mp_policy=amp.fsdp_policy({level!r}, dtype={policy.dtype})){other}"
    )


def _check_rounded(named: str, param: Any) -> None:
    if param.dtype is torch.float32:
        raise ValueError(
            f"{named} is sharded in torch.float32, and master_weights='stochastic' wants shards in BF16, which each "
            "step rounds: call model.bfloat16() before fully_shard; or leave master_weights at None, which has the "
            "FP32 shards for masters"
        )
    check_place(named, param)


def check_place(named: str, param: Any) -> None:
    """Raise where elements of this shard, which an error calls `named`, cannot be rounded by their place."""
    if distributed.place_in_whole(param) is None:
        raise ValueError(
            f"{named} is sharded as {param.placements}, and master_weights='stochastic' rounds by the place of an "
            "element in the whole parameter, which it knows where one dimension of the mesh shards dimension 0 alone; "
            "shard it so, or leave master_weights at None and have FP32 shards for masters"
        )


def no_masters(policy: Policy) -> str:
    """Why `policy`, which casts weights and makes no masters, is refused for sharded parameters."""
    return (
        f"opt_level {policy.opt_level!r} without master weights would keep no FP32 weights, but fully_shard's shards "
        "are FP32 and serve as masters at no further cost: choose opt_level='O2'"
    )


def _governed(module: nn.Module, name: str, fsdp: Any) -> Iterator[tuple[str, nn.Module, Any]]:
    """Each module inside `module`, with its name and the FSDP module whose policy its parameters follow, if any."""
    fsdp = module if is_fsdp(module) else fsdp
    yield name, module, fsdp
    for key, child in module.named_children():
        yield from _governed(child, f"{name}.{key}".lstrip("."), fsdp)


def stay_fp32(kept: Iterable[nn.Module]) -> Callable[[nn.Parameter], torch.dtype | None]:
    """`MixedPrecisionPolicy(param_dtype_override_fn=)`, by which the parameters of `kept` are gathered as they are.

    fully_shard asks it once for each parameter, before it puts the shard in the parameter's place. Held weakly.
    """
    params = {id(p): weakref.ref(p) for module in kept for p in module.parameters()}

    def override(param: nn.Parameter) -> torch.dtype | None:
        known = params.get(id(param))
        return param.dtype if known is not None and known() is param else None

    return override


def _own_policies(module: Any) -> Iterator[tuple[int, Any]]:
    """The ids of the shards of `module`, and the policy of each: from torch 2.15 it may be other than the module's."""
    for group in _param_groups(module):
        for param in getattr(group, "fsdp_params", ()):
            if (policy := getattr(param, "mp_policy", None)) is not None:
                yield id(getattr(param, "sharded_param", None)), policy


def _param_groups(module: Any) -> list[Any]:
    state = _state(module)
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    group = getattr(state, "_fsdp_param_group", None)  # torch 2.6 to 2.10: one group a module
    return [] if group is None else [group]


def _state(module: Any) -> Any:
    state = getattr(module, "_get_fsdp_state", None)
    return None if state is None else state()


def refuse_sharded_since(model: nn.Module | None, caller: str) -> None:
    """Raise if `fully_shard` took one of a training's models after `initialize` did, which got its optimizer then."""
    if model is None or not is_used():
        return
    state = vars(model).get("_amp")
    if state is not None and is_fsdp(model) and not state.sharded:
        raise RuntimeError(
            f"{caller}: fully_shard was called on this {type(model).__name__} after initialize() and put other "
            "parameters in place of those that the optimizer and its masters hold; call fully_shard first, with "
            "mp_policy=amp.fsdp_policy(opt_level), then make the optimizer, then call initialize()"
        )
