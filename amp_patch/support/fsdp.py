"""Queries about modules that torch's `fully_shard` (FSDP2) has sharded: their parameters and unreduced gradients.

This file does not import torch.distributed, so that processes without sharding do not pay for the import.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

# `fsdp_state` and `param_groups` read private attributes of FSDP. If a version of torch lacks them, `param_groups`
# returns no groups, so that nothing is refused and `hold_gradients_back` returns False.


def is_fsdp(module: Any) -> bool:
    """Tell whether torch's `fully_shard` has sharded `module`."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def without_fsdp(base: type) -> dict[str, Any]:
    """Return a `__new__` for the class generated from `base`; an empty dict if `base` is not a class of fully_shard.

    `model[2:]` calls `type(model)(...)`, for which FSDP's `__new__` makes an instance of the user's class. It reads the
    user's class at a fixed index of `cls.__mro__`. In a generated class another class is at that index, so the
    `__new__` returned here passes `base` to FSDP's.
    """
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is None or not issubclass(base, kind):
        return {}
    return {"__new__": lambda cls, *args, **kwargs: base.__new__(base, *args, **kwargs)}


def is_fsdp1(module: Any) -> bool:
    """Tell whether `module` is a FullyShardedDataParallel (FSDP1)."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    return kind is not None and isinstance(module, kind)


def fsdp_modules(models: Iterable[nn.Module]) -> list[Any]:
    """Return the modules in `models` that `fully_shard` has sharded, each once."""
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    return list({id(m): m for model in models for m in model.modules() if is_fsdp(m)}.values())


def hold_gradients_back(modules: Iterable[Any]) -> bool:
    """Tell whether the next backward pass leaves unreduced gradients inside FSDP, which are not in `.grad`.

    User code requests this by `set_requires_gradient_sync(False)`, for every micro-batch but the last.
    """
    return any(
        not (getattr(group, "reduce_grads", True) and getattr(group, "all_reduce_grads", True))
        for module in modules
        for group in param_groups(module)
    )


def gathered(modules: Iterable[Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (gathered parameter, sharded parameter) for each parameter that these FSDP modules have ever gathered.

    The gathered parameter is the leaf of autograd's graph. FSDP reduces its gradient into `.grad` of the sharded one.
    """
    for module in modules:
        for group in param_groups(module):
            for param in getattr(group, "fsdp_params", ()):
                if (whole := getattr(param, "_unsharded_param", None)) is not None:
                    yield whole, param.sharded_param


def param_groups(module: Any) -> list[Any]:
    state = fsdp_state(module)
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    group = getattr(state, "_fsdp_param_group", None)  # torch 2.6 to 2.10: one group a module
    return [] if group is None else [group]


def fsdp_state(module: Any) -> Any:
    state = getattr(module, "_get_fsdp_state", None)
    return None if state is None else state()
