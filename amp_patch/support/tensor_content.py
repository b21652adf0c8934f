"""A tensor that stays the same object and gets another content: what hangs on it goes along.

Hooks on the accumulation node. That adds up the gradient of a leaf, and there Horovod and its like hang their hooks.
torch drops the node of a parameter whose type changes, and with it every hook that is on it: they would never be called
again, without a word. In `set_data` the hooks go over to the new node. Hooks on the parameter itself (`register_hook`,
`register_post_accumulate_grad_hook`) stay by themselves. Hooks that C++ has put on the node cannot be seen from here:
their owner, DistributedDataParallel, gets new ones in training/ddp.py.

Weak references. `torch.utils.swap_tensors` refuses a tensor that has some: holders of such references release them
meanwhile (`release_in_swaps`). torch calls it in `module.to(...)` and `load_state_dict`, for each parameter, where a
script has set `torch.__future__.set_swap_module_params_on_conversion(True)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from amp_patch.support.compiled import wraps
from amp_patch.support.patches import Installation, Patches

# ----------------------------------------------------------------------------------------------------------------------
# Hooks on the accumulation node

_KINDS = ("register_prehook", "register_hook")


class _Moved:
    """The hooks of a node that is gone, as one hook of the node that took its place.

    `hooks` is the dictionary that the users' handles remove them from: it is read at each call.
    """

    def __init__(self, hooks: Any) -> None:
        self.hooks = hooks


class _Before(_Moved):
    def __call__(self, grads: Any) -> Any:
        for hook in list(self.hooks.values()):
            result = hook(grads)
            grads = grads if result is None else result if isinstance(result, tuple) else (result,)
        return grads


class _After(_Moved):
    def __call__(self, inputs: Any, grads: Any) -> None:
        for hook in list(self.hooks.values()):
            hook(inputs, grads)


def set_data(param: Tensor, data: Tensor) -> None:
    """`param.data = data`, of any type; the hooks on the parameter's accumulation node are called as before."""
    loses_its_node = data.dtype is not param.dtype and param.requires_grad and not param.is_inference()
    found = _hooks(param) if loses_its_node else []
    param.data = data
    for register, hooks in found:
        node = _node(param)
        getattr(node, register)((_Before if register == "register_prehook" else _After)(hooks))
        hooks.amp_node = node  # autograd holds nodes weakly: `hooks`, which the old node holds, keeps `node`


def _node(param: Tensor) -> Any:
    with torch.inference_mode(False):
        return get_gradient_edge(param).node


def _hooks(param: Tensor) -> list[tuple[str, Any]]:
    """The dictionaries of hooks on the accumulation node of `param`, each with the method that made it."""
    node = _node(param)
    found = []
    for register in _KINDS:
        probe = getattr(node, register)(lambda *_: None)  # the handle refers to the node's one dictionary of a kind
        hooks = probe.hooks_dict_ref()
        probe.remove()
        values = list(hooks.values())
        if len(values) == 1 and isinstance(values[0], _Moved):
            hooks = values[0].hooks
        if values:
            found.append((register, hooks))
    return found


# ----------------------------------------------------------------------------------------------------------------------
# Weak references

Again = Callable[[], Any]
# Releases its weak references to a tensor; returns a function that makes them again, or None.
Holder = Callable[[Tensor], Again | None]

_holders: list[Holder] = []
_installation = Installation()


def release_in_swaps(holder: Holder) -> Holder:
    """Decorates a function that is called before each swap, for both tensors, once `hook_swaps` was."""
    _holders.append(holder)
    return holder


def hook_swaps() -> None:
    """Patch `torch.utils.swap_tensors` to call the holders; idempotent."""
    _installation.install(_replace)


def _replace(patches: Patches) -> None:
    swap = torch.utils.swap_tensors

    @wraps(swap)
    def swap_tensors(t1: Any, t2: Any) -> None:
        released = [again for tensor in (t1, t2) for holder in _holders if (again := holder(tensor)) is not None]
        try:
            swap(t1, t2)
        finally:
            for again in released:
                again()

    patches.set(torch.utils, "swap_tensors", swap_tensors)
