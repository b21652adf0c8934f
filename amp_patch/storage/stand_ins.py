"""A step on stand-ins: plain tensors for the local shards of parameters, because strategies cannot step DTensors.

The step runs on a second optimizer object. The user's optimizer never holds the stand-ins, even after an exception. A
setting or state that is written into the second object is written into the user's optimizer at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch import Tensor

from amp_patch.storage.coded_state import CodedState, Coder
from amp_patch.ways.partial_step import PartialStep


class _States(defaultdict[Tensor, Any]):
    """The `state` of the second object: stand-in -> the same state dict that the optimizer has for its parameter."""

    def __init__(self, optimizer: Any, coder: Coder, params: dict[Tensor, Tensor]) -> None:
        super().__init__(dict)
        self._states, self._coder, self._params = optimizer.state, coder, params
        for stand_in, param in params.items():
            if param in optimizer.state:  # maybe a plain dict, made when user code read it before the first step
                self[stand_in] = optimizer.state[param]

    def __missing__(self, stand_in: Tensor) -> Any:
        self[stand_in] = {}
        return self[stand_in]

    def __setitem__(self, stand_in: Tensor, state: Any) -> None:
        if (param := self._params.get(stand_in)) is not None:  # else `make_state` steps on its own stand-ins
            state = state if isinstance(state, CodedState) else self._coder.state_of(self._coder, param, state)
            self._states[param] = state
        super().__setitem__(stand_in, state)


def with_stand_ins(optimizer: Any, coder: Coder, stand_in: Callable[[Tensor], Tensor]) -> PartialStep:
    """Return a step of `optimizer` on `stand_in(param)` instead of each parameter; `coder` stores the state."""
    params: dict[Tensor, Tensor] = {}

    def noted(param: Tensor) -> Tensor:
        params[found := stand_in(param)] = param
        return found

    chunks = [(group, group["params"]) for group in optimizer.param_groups]
    partial = PartialStep(optimizer, chunks, noted, at_once=True)
    partial.shell.state = _States(optimizer, coder, params)
    return partial
