"""An optimizer of other tensors in the memory of its parameters, for a step that cannot be made on these.

It is another object, so that groups and states of the user's optimizer are as ever, whatever ends the step. Settings
and states that are written there are the optimizer's at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch import Tensor

from amp_patch.storage.coded_state import CodedState, Coder
from amp_patch.ways.partial_step import PartialStep


class _States(defaultdict[Tensor, Any]):
    """The states of an optimizer's parameters, by the stand-ins of these; each is the optimizer's own."""

    def __init__(self, optimizer: Any, coder: Coder, params: dict[Tensor, Tensor]) -> None:
        super().__init__(dict)
        self._states, self._coder, self._params = optimizer.state, coder, params
        for stand_in, param in params.items():
            if param in optimizer.state:  # a dict of torch's where somebody has asked for it before the first step
                self[stand_in] = optimizer.state[param]

    def __missing__(self, stand_in: Tensor) -> Any:
        self[stand_in] = {}
        return self[stand_in]

    def __setitem__(self, stand_in: Tensor, state: Any) -> None:
        if (param := self._params.get(stand_in)) is not None:  # else `make_state` has put it there
            state = state if isinstance(state, CodedState) else self._coder.state_of(self._coder, param, state)
            self._states[param] = state
        super().__setitem__(stand_in, state)


def with_stand_ins(optimizer: Any, coder: Coder, stand_in: Callable[[Tensor], Tensor]) -> PartialStep:
    """A step of `optimizer`, whose state `coder` keeps, on what `stand_in` gives in the place of each parameter."""
    params: dict[Tensor, Tensor] = {}

    def noted(param: Tensor) -> Tensor:
        params[found := stand_in(param)] = param
        return found

    chunks = [(group, group["params"]) for group in optimizer.param_groups]
    partial = PartialStep(optimizer, chunks, noted, at_once=True)
    partial.shell.state = _States(optimizer, coder, params)
    return partial
