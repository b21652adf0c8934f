"""The masters of one optimizer: put into its groups in the place of low-precision parameters, and taken out again."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from amp_patch.masters.gradients import Groups
from amp_patch.masters.masters import Linked, connect, master_of
from amp_patch.policy import LOW_PRECISION
from amp_patch.support.patches import Attempts


class Masters:
    """The parameters of one optimizer as pairs (param, master), and what moves between the two.

    The optimizer's groups hold the masters, in the user's order. All that is kept here is the way back from a master to
    the model's parameter. The groups are arguments, so that nothing here has to be kept in step with them.
    """

    def __init__(self) -> None:
        self._params: dict[int, Linked] = {}  # id(master) -> the parameter and its link to this master

    def __getstate__(self) -> list[tuple[Tensor, Tensor]]:
        return [(param, link.master) for param, link in self._params.values()]

    def __setstate__(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        self._params = {id(master): (param, connect(param, master)) for param, master in pairs}

    def pairs(self, groups: Groups) -> list[tuple[Tensor, Tensor]]:
        """(param, master) for every parameter in `groups`; the same tensor twice where it is its own master."""
        params = self._params
        return [
            (params[id(master)][0] if id(master) in params else master, master)
            for group in groups
            for master in group["params"]
        ]

    def linked(self) -> list[Linked]:
        """The parameters that have a master, with their links."""
        return list(self._params.values())

    def attach(self, optimizer: Any, group: dict[str, Any], about_to_be_cast: Collection[int] = ()) -> None:
        """Put masters into one of the optimizer's groups, in place.

        A parameter whose id is in `about_to_be_cast` gives its FP32 storage to its master: the caller gives the
        parameter a low-precision one next. A parameter that is float16 or bfloat16 already gets the master that it
        has, or an FP32 copy. The optimizer's state and an existing gradient move to the master.
        """
        params = group["params"]
        for index, param in enumerate(params):
            if id(param) not in about_to_be_cast and param.dtype not in LOW_PRECISION:
                continue
            master = master_of(param)  # another optimizer's, maybe
            if master is None:
                # `.data`, since a detached tensor would share the parameter's version counter too
                master = nn.Parameter(param.data.float(), requires_grad=param.requires_grad)
            self._params[id(master)] = (param, connect(param, master))
            _replace(optimizer, params, index, master)
            if param.grad is not None:
                master.grad, param.grad = param.grad.to(master.dtype), None

    def detach(self, optimizer: Any) -> None:
        """Undo `attach`: put the parameters into the groups again, and move the state to them.

        A parameter that is FP32 again gets its master's gradient too.
        """
        attempt = Attempts()
        for group in optimizer.param_groups:
            attempt(self._detach_group, optimizer, group)
        self._params.clear()
        attempt.finish()

    def _detach_group(self, optimizer: Any, group: dict[str, Any]) -> None:
        params = group["params"]
        for index, master in enumerate(params):
            param = self._param_of(master)
            if param is not master:
                _replace(optimizer, params, index, param)
                if param.dtype is master.dtype:
                    param.grad = master.grad

    def follow(self, wrapper: Any) -> None:
        """Move what `wrapper`, around an optimizer with these masters, keeps for the parameters to the masters."""
        for param, link in self._params.values():
            _rekey(wrapper, param, link.master)

    def unfollow(self, wrapper: Any) -> None:
        """Undo `follow`."""
        for param, link in self._params.values():
            _rekey(wrapper, link.master, param)

    def _param_of(self, master: Tensor) -> Tensor:
        known = self._params.get(id(master))
        return master if known is None else known[0]


def _replace(optimizer: Any, params: list[Tensor], index: int, new: Tensor) -> None:
    old, params[index] = params[index], new
    _rekey(optimizer, old, new)


def _rekey(optimizer: Any, old: Tensor, new: Tensor) -> None:
    state = getattr(optimizer, "state", None)
    if state is not None and old in state:
        state[new] = state.pop(old)
