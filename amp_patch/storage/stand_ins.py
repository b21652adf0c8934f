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
from amp_patch.support.generated_class import base_class


class _Group(dict[str, Any]):
    """A group with other parameters: a setting that is written here is written into the group."""

    def __init__(self, group: dict[str, Any], params: list[Tensor]) -> None:
        super().__init__({**group, "params": params})
        self._group = group

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        if name != "params":
            self._group[name] = value

    def update(self, *args: Any, **kwargs: Any) -> None:
        for name, value in dict(*args, **kwargs).items():
            self[name] = value


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


def with_stand_ins(optimizer: Any, coder: Coder, stand_in: Callable[[Tensor], Tensor]) -> Any:
    """An optimizer of the class, with the settings and the state of `optimizer`, whose state `coder` keeps.

    Args:
        stand_in: gives what is stepped in the place of a parameter: itself, or another in its memory.
    """
    params: dict[Tensor, Tensor] = {}

    def noted(param: Tensor) -> Tensor:
        params[found := stand_in(param)] = param
        return found

    shell: Any = object.__new__(base_class(optimizer))
    vars(shell).update(vars(optimizer))
    shell.param_groups = [_Group(group, list(map(noted, group["params"]))) for group in optimizer.param_groups]
    shell.state = _States(optimizer, coder, params)
    return shell


def give_back_attributes(optimizer: Any, shell: Any) -> None:
    """Give `optimizer` the attributes that a step has set on what `with_stand_ins` made of it."""
    vars(optimizer).update(
        {name: value for name, value in vars(shell).items() if name not in ("param_groups", "state")}
    )
