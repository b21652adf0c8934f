"""Replacement of a tensor's content without the loss of its autograd hooks.

Horovod and similar libraries register hooks on a parameter's AccumulateGrad node. If the dtype of a parameter
changes, torch makes a new node, and drops the old one and its hooks without a message. `set_data` registers these hooks
on the new node, where their earlier handles do not remove them. Hooks on the parameter (`register_hook`,
`register_post_accumulate_grad_hook`) survive without help. Hooks that C++ registered on the node are not visible here:
around/ddp.py makes new ones for DistributedDataParallel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge


def set_data(param: Tensor, data: Tensor) -> None:
    """Assign `param.data = data`, of any dtype, and keep the hooks on the parameter's accumulation node."""
    loses_its_node = data.dtype is not param.dtype and param.requires_grad and not param.is_inference()
    found = _hooks(param) if loses_its_node else []
    param.data = data
    for register, hooks in found:
        node = _node(param)
        for hook in hooks.values():
            getattr(node, register)(hook)
        # Autograd references an AccumulateGrad node only weakly: without this reference `node` would be freed.
        hooks.amp_node = node


def _node(param: Tensor) -> Any:
    with torch.inference_mode(False):
        return get_gradient_edge(param).node


def _hooks(param: Tensor) -> list[tuple[str, Any]]:
    """Return (method, hooks) for each kind of hooks on the accumulation node of `param`, without empty kinds.

    `method` is the name of the node's method that registers such a hook, `hooks` the dictionary that it fills.
    """
    node = _node(param)
    found = []
    for register in ("register_prehook", "register_hook"):
        probe = getattr(node, register)(lambda *_: None)  # only a handle gives access to the node's dictionary of hooks
        probe.remove()
        if hooks := probe.hooks_dict_ref():
            found.append((register, hooks))
    return found
