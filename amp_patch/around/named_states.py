"""`get_state_dict` and `set_state_dict` of `torch.distributed.checkpoint.state_dict` for optimizers that hold masters.

They look up the names of an optimizer's parameters in the model, which has none for masters. So they are given a view
of the optimizer, whose groups hold the model's parameters.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from amp_patch.masters.grad_field import with_gradient
from amp_patch.support.imports import when_imported
from amp_patch.support.patches import Installation, Patches
from amp_patch.training.stash import Stash, enabled_stash

_INIT = "_init_optim_state"
_FUNCTIONS = ("_get_optim_state_dict", "_load_optim_state_dict")
_installation = Installation()


def enter(optimizer: Any, stash: Stash) -> None:
    """Patch torch's module, now or at its import, if the optimizer may hold masters; idempotent."""
    if stash.policy.master_weights:
        _installation.install(_install)


def _install(patches: Patches) -> None:
    active = [True]
    patches.on_remove(active.clear)

    def serve(module: ModuleType) -> None:
        for name in _FUNCTIONS if active else ():
            patches.set(module, name, _serving(module, getattr(module, name)))

    when_imported("torch.distributed.checkpoint.state_dict", serve)


def _serving(module: Any, own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def call(model: Any, optimizers: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
        return own(model, tuple(_view(module, optimizer) for optimizer in optimizers), *args, **kwargs)

    return call


def _view(module: Any, optimizer: Any) -> Any:
    """Return an object with the attributes of `optimizer` that torch's functions use; itself if it has no masters.

    If the optimizer has neither state nor gradients, torch's function makes the state by a step with a learning rate
    of 0.
    """
    stash = enabled_stash(optimizer)
    if stash is None or not stash.masters.of_groups(optimizer.param_groups).low:
        return optimizer
    if not with_gradient(stash.masters.links.params):  # torch's function would clear them
        getattr(module, _INIT)(optimizer)
    known, kind = stash.masters.of_groups(optimizer.param_groups), type(optimizer)
    params = dict(zip(known.masters, known.params, strict=True))
    states: dict[Any, Any] = {params.get(master, master): state for master, state in optimizer.state.items()}
    return SimpleNamespace(
        param_groups=[
            {**group, "params": [params[master] for master in group["params"]]} for group in optimizer.param_groups
        ],
        state=defaultdict(dict, states or {None: {}}),  # of a view with an empty one, torch would make the state
        state_dict=functools.partial(kind.state_dict, optimizer),
        load_state_dict=functools.partial(kind.load_state_dict, optimizer),
    )
