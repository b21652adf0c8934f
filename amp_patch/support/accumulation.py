"""Autograd's accumulation nodes: what adds up the gradient of a leaf, and where Horovod and its like hang their hooks.

torch drops the node of a parameter whose type changes, and with it every hook that is on it: they would never be called
again, without a word. Here the hooks go over to the new node. Hooks on the parameter itself (`register_hook`,
`register_post_accumulate_grad_hook`) stay by themselves. Hooks that C++ has put on the node cannot be seen from here:
their owner, DistributedDataParallel, gets new ones in training/ddp.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

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
