"""`MasterStates`, an optimizer's `state`: the state of a master is also found by the model's parameter.

The groups hold masters, and so the keys of `optimizer.state` are masters. User code has the model's parameters.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from functools import partial
from typing import Any

from torch import Tensor

from amp_patch.masters.masters import master_of


class MasterStates(defaultdict[Any, Any]):
    """The dictionary of `optimizer.state`, keyed by masters: a parameter of the model stands for its master.

    Iteration yields masters. A read by a master calls no Python code: `__missing__` resolves parameters.
    """

    get_by_master = dict.get  # a read by a master that calls no Python code

    def _key(self, key: Any) -> Any:
        master = None if super().__contains__(key) else master_of(key)
        return key if master is None else master

    def __missing__(self, key: Any) -> Any:
        return super().__missing__(key) if (own := self._key(key)) is key else self[own]

    def __contains__(self, key: object) -> bool:
        return super().__contains__(self._key(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(self._key(key), value)

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(self._key(key))

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(self._key(key), default)

    def pop(self, key: Any, *default: Any) -> Any:
        return super().pop(self._key(key), *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        return super().setdefault(self._key(key), default)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]  # dict's does not call `__setitem__`
        self.update(other)
        return self


def find_by_params(optimizer: Any, *, shared: bool = False) -> None:
    """Let `optimizer.state`, if it is an ordinary dictionary, find the state of a master by the model's parameter.

    Args:
        shared: whether the dictionary stays if another object holds it (`wrapper.state = optimizer.state`): both must
            see the same entries. They find them by masters alone.
    """
    own = vars(optimizer)
    if type(own.get("state")) not in (dict, defaultdict) or (shared and sys.getrefcount(own["state"]) > 2):
        return
    state, own["state"] = own["state"], MasterStates(getattr(own["state"], "default_factory", None))
    own["state"].update(state)


def find_by_masters(optimizer: Any) -> None:
    """Undo `find_by_params`, unless another object holds the `MasterStates`."""
    own = vars(optimizer)
    if type(own.get("state")) is MasterStates and sys.getrefcount(own["state"]) == 2:
        own["state"] = defaultdict(own["state"].default_factory, own["state"])


def rekey(optimizer: Any, old: Tensor, new: Tensor) -> None:
    """Move the state of `old` to `new`: from a parameter to its master, or back; `optimizer` may have no state."""
    state = getattr(optimizer, "state", None)
    if state is not None and old in state:
        value = state.pop(old)
        # `state[new]` would store the value of a parameter at its master
        (partial(dict.__setitem__, state) if type(state) is MasterStates else state.__setitem__)(new, value)
