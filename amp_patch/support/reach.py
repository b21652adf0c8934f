"""The leaves of the autograd graph that a backward pass from a loss will reach."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor

# The node of a reentrant checkpoint runs a nested backward pass. The parameters in there are not inputs of the node.
_OPAQUE = "CheckpointFunctionBackward"


class Reach(NamedTuple):
    """The tensors whose `.grad` a backward pass adds to.

    Attributes:
        leaves: id of a tensor -> that tensor.
        whole: False if `leaves` may be incomplete, because a reentrant checkpoint hides some.
    """

    leaves: dict[int, Tensor]
    whole: bool


def reach_of(loss: Tensor, inputs: Any = None) -> Reach:
    """Return the tensors to whose `.grad` `loss.backward(inputs=inputs)` adds. Walks the graph once, on the host."""
    if inputs is not None:
        given = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        return Reach({id(tensor): tensor for tensor in given if isinstance(tensor, Tensor)}, True)
    if loss.grad_fn is None:
        return Reach({id(loss): loss} if loss.requires_grad else {}, True)
    leaves: dict[int, Tensor] = {}
    whole = True
    # `seen` references the nodes. By ids alone, a new Python wrapper could have the id of one that was freed.
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
    """Return the union of the tensors that several backward passes reach."""
    leaves: dict[int, Tensor] = {}
    whole = True
    for reach in reaches:
        leaves.update(reach.leaves)
        whole = whole and reach.whole
    return Reach(leaves, whole)
