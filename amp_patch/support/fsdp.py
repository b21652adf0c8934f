"""What torch's `fully_shard` (FSDP2) has done to modules.

Nothing of torch.distributed is imported here: a process that shards nothing does not pay for it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

# FSDP's state of a module is private: `fsdp_state` and `param_groups` read it. In a torch without these attributes
# nothing is refused, and no gradient is known to be held back.


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
        for group in param_groups(module)
    )


def gathered(modules: Iterable[Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The whole parameters that these FSDP modules gather theirs in for a forward, with these.

    A whole one is the leaf of the graph. FSDP reduces its gradient into the `.grad` of the parameter.
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
