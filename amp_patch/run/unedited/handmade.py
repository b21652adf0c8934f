"""Detection of scripts that update their weights without an optimizer (`p -= lr * p.grad`): no level can train them."""

from __future__ import annotations

from torch import Tensor, nn

from amp_patch.run.unedited.refusal import ScriptRefused
from amp_patch.support.reach import Reach

_LOOKED_AT = 4  # leaves that are compared; a single one might not change, if its gradient is 0

_OPTIMIZER = """
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)  # before the loop
    optimizer.zero_grad()  # replaces model.zero_grad()
    optimizer.step()  # replaces the update: p.data.add_(p.grad, alpha=-lr), p -= lr * p.grad"""
_MODULE = "\n    # if tensors belong to no module: make them nn.Parameters of one, and call it"


class HandmadeSteps:
    """Watches the backward passes of a script that has constructed no optimizer.

    Attributes:
        backwards: the number of backward passes so far.
    """

    def __init__(self) -> None:
        self.backwards = 0
        self._seen = False
        self._before: list[tuple[Tensor, Tensor]] = []  # leaf, its value at the last backward

    def backward_begins(self, reach: Reach) -> None:
        """Receive the leaves of a backward pass that begins now, and compare them with the last backward's.

        Raises:
            ScriptRefused: the script has changed an nn.Parameter since the last backward, as an optimizer would.
        """
        self.backwards += 1
        for leaf, value in self._before:
            if id(leaf) in reach.leaves and not leaf.detach().equal(value):
                self._seen = True
                if isinstance(leaf, nn.Parameter):  # another leaf may be an input, for example of an adversarial attack
                    raise self.refused(line=True)
        leaves = sorted(reach.leaves.values(), key=lambda leaf: (not isinstance(leaf, nn.Parameter), leaf.numel()))
        self._before = [(leaf, leaf.detach().clone()) for leaf in leaves[:_LOOKED_AT]]

    def refused(self, *, line: bool) -> ScriptRefused:
        """Return the error, whose message shows how to construct an optimizer; with `line`, also the running line."""
        return ScriptRefused(
            f"it made no optimizer of torch.optim in this process{', and updates its weights by hand' * self._seen}",
            line=line,
            lines=_OPTIMIZER + _MODULE,
            then="With an optimizer it needs no other line. Let one make the steps",
        )
