"""Steps that a script makes by hand, `p -= lr * p.grad`: there is no optimizer then that a level could take over."""

from __future__ import annotations

from torch import Tensor, nn

from amp_patch.lab.unedited.reach import Reach
from amp_patch.lab.unedited.refusal import ScriptRefused

_LOOKED_AT = 4  # parameters: of one the gradient may be 0

_OPTIMIZER = """
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)  # before the loop
    optimizer.zero_grad()  # in place of model.zero_grad()
    optimizer.step()  # in place of the update by hand: p.data.add_(p.grad, alpha=-lr), p -= lr * p.grad"""
_MODULE = "\n    # tensors that belong to no module go into one, as nn.Parameter, and the module is called"


class HandmadeSteps:
    """Looks at backward passes of a script that has made no optimizer.

    Attributes:
        backwards: how many there were.
    """

    def __init__(self) -> None:
        self.backwards = 0
        self._seen = False
        self._before: list[tuple[Tensor, Tensor]] = []  # a leaf, and its value then

    def backward_begins(self, reach: Reach) -> None:
        """A loss that reaches these leaves has its backward now.

        Raises:
            ScriptRefused: the script has written into parameters of the last backward, as an optimizer would.
        """
        self.backwards += 1
        for leaf, value in self._before:
            if id(leaf) in reach.leaves and not leaf.detach().equal(value):
                self._seen = True
                if isinstance(leaf, nn.Parameter):  # any other may be an input, as of an attack on a model
                    raise self.refused(line=True)
        leaves = sorted(reach.leaves.values(), key=lambda leaf: (not isinstance(leaf, nn.Parameter), leaf.numel()))
        self._before = [(leaf, leaf.detach().clone()) for leaf in leaves[:_LOOKED_AT]]

    def refused(self, *, line: bool) -> ScriptRefused:
        """The refusal, which shows how to make an optimizer."""
        return ScriptRefused(
            f"it made no optimizer of torch.optim in this process{', and updates its weights by hand' * self._seen}",
            line=line,
            lines=_OPTIMIZER + _MODULE,
            then="With an optimizer it needs no other line. Let one make the steps",
        )
