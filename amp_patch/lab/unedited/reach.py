"""What a backward pass will reach: the leaves of the autograd graph behind a loss."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor

# The node of a reentrant checkpoint runs another backward inside of its own: its parameters are no inputs of the node.
_OPAQUE = "CheckpointFunctionBackward"


class Reach(NamedTuple):
    """The tensors whose `.grad` a backward pass adds to.

    Attributes:
        leaves: by id.
        whole: False where a reentrant checkpoint hides some of them.
    """

    leaves: dict[int, Tensor]
    whole: bool


def reach_of(loss: Tensor, inputs: Any = None) -> Reach:
    """What `loss.backward(inputs=inputs)` adds gradients to. Walks the graph once, on the host."""
    if inputs is not None:
        given = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        return Reach({id(tensor): tensor for tensor in given if isinstance(tensor, Tensor)}, True)
    if loss.grad_fn is None:
        return Reach({id(loss): loss} if loss.requires_grad else {}, True)
    leaves: dict[int, Tensor] = {}
    whole = True
    # `seen` holds the nodes: Python may make the wrapper of a node anew at each look, under the id of a freed one.
    seen: dict[Any, None] = {loss.grad_fn: None}
    left = [loss.grad_fn]
    while left:
        node = left.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves[id(leaf)] = leaf
            continue
        whole = whole and node.name() != _OPAQUE
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen[following] = None
                left.append(following)
    return Reach(leaves, whole)


def merged(reaches: Iterable[Reach]) -> Reach:
    """What several backward passes add gradients to."""
    leaves: dict[int, Tensor] = {}
    whole = True
    for reach in reaches:
        leaves.update(reach.leaves)
        whole = whole and reach.whole
    return Reach(leaves, whole)
