"""Masters that are nothing beside their BF16 weights: what is written into one is rounded into the weight by chance.

So an update smaller than half the distance to the next BF16 number is made in a part of the steps, as often as it is
large, where rounding to nearest would lose it in all of them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from amp_patch import multi_tensor
from amp_patch.masters.closed_master import ClosedMaster, Form
from amp_patch.masters.masters import note_stepped
from amp_patch.policy import STOCHASTIC, Policy
from amp_patch.support import device_sync
from amp_patch.supported import reason

# A draw, from the low bits: the steps of this master; what was written into it since the last step, for which kernels
# that make the step need no draw; its number in the training.
_EDITS, _NUMBER = 32, 40
_MOST_EDITS = (1 << _NUMBER - _EDITS) - 1
_STEPS = (1 << _EDITS) - 1
ROUNDING = "stochastic_rounding"  # the name in `state_dict` of what rounds the weights of a training
ORDER = "model"  # of the steps in a state dict: by the parameters' positions in the training's models


class Rounding(Form):
    """The chance by which one training's weights are rounded: a seed, and how often each was.

    The bits of a step depend on the seed, on the number of the master (the position of its parameter in the training's
    models), and on how many steps that master has had. So they are the same on each process of a DDP training, in
    portions and in one pass, in the parts that `fully_shard` makes, and after a checkpoint with `state_dict`; whatever
    type the parameters came in, in whichever order of groups, and whether some were thawed later.

    Attributes:
        seed: of 63 bits; 0 unless somebody has loaded another, for processes that seed torch differently must agree.
    """

    is_exact = False

    def __init__(self) -> None:
        self.seed = 0
        self._masters: dict[int, weakref.ref[ClosedMaster]] = {}  # by their number
        self._positions: dict[int, int] = {}  # of parameters, by their id; a copy has none
        self._later: dict[int, int] = {}  # steps that were loaded for masters that are not there yet, by their number

    def __getstate__(self) -> dict[str, Any]:
        return {"seed": self.seed, "_masters": {}, "_positions": {}, "_later": {**self._later, **self._steps()}}

    def number(self, params: Iterable[Tensor]) -> None:
        """Have the masters of these parameters numbered by their order here; others are numbered as they come."""
        self._positions = {id(param): position for position, param in enumerate(params)}

    def note_part(self, part: Tensor, whole: Tensor) -> None:
        if (position := self._positions.get(id(whole))) is not None:
            self._positions[id(part)] = position

    def _number_of(self, param: Tensor) -> int:
        number = self._positions.get(id(param))
        if number is None or ((ref := self._masters.get(number)) is not None and ref() is not None):
            number = max(*self._positions.values(), *self._masters, -1, -1) + 1
        return number

    def _alive(self) -> dict[int, ClosedMaster]:
        found = {number: ref() for number, ref in self._masters.items()}
        return {number: m for number, m in found.items() if m is not None and m.form is self}

    def _steps(self) -> dict[int, int]:
        return {number: _known(master) & _STEPS for number, master in self._alive().items()}

    def check_step(self) -> None:
        """Raise in the capture of a CUDA graph: each replay would round by the draws of now, and lose the same part."""
        if device_sync.is_capturing():
            raise RuntimeError(
                "a step with master_weights='stochastic' cannot be captured in a CUDA graph: "
                + reason(STOCHASTIC, "CUDA graphs")
            )

    def begin(self, param: Tensor, master: ClosedMaster, value: Tensor | None) -> None:
        if value is not None:  # to the nearest: that this is no update, which might get lost
            multi_tensor.multi_tensor_scale([value], [param], 1.0)
        if master.draw is None:  # a copy has that of the original
            number = self._number_of(param)
            master.draw = number << _NUMBER | self._later.pop(number, 0)
        self._masters[master.draw >> _NUMBER] = weakref.ref(master)
        master.edits = 0

    def read(self, masters: list[tuple[Tensor, ClosedMaster, Tensor]]) -> None:
        multi_tensor.multi_tensor_scale([weight for weight, _, _ in masters], [value for _, _, value in masters], 1.0)

    def write(self, masters: list[tuple[Tensor, ClosedMaster, Tensor]]) -> None:
        self.check_step()
        weights, of_these, values = map(list, zip(*masters, strict=True))
        draws, starts = [self._draw(master) for master in of_these], [master.start for master in of_these]
        multi_tensor.multi_tensor_stochastic_round(values, weights, self.seed, draws, starts)

    def _draw(self, master: ClosedMaster) -> int:
        """The draw for what was written into an open master, which moves on: the step, or an edit of somebody's."""
        draw = _known(master)
        if master.joined is None:
            note_stepped([master])
            return draw
        master.edits = master.edits % _MOST_EDITS + 1
        return draw | master.edits << _EDITS

    def state_dict(self) -> dict[str, Any]:
        """The seed, and the steps of each master, by its number."""
        steps = {**self._later, **self._steps()}
        in_order = [steps.get(number, 0) for number in range(max(steps, default=-1) + 1)]
        return {"seed": self.seed, "steps": in_order, "order": ORDER}

    def load_state_dict(self, state: Any) -> None:
        """Take what `state_dict` gave."""
        seed, steps = _checked(state)
        self.seed, self._later = seed, dict(enumerate(steps))
        for number, master in self._alive().items():
            master.draw, master.edits = number << _NUMBER | self._later.pop(number, 0), 0

    def check(self, state: Any) -> None:
        """Raise ValueError where `load_state_dict` could not take `state`."""
        _checked(state)


def beside_scale(policy: Policy) -> dict[str, Rounding]:
    """What a training of this policy saves beside its loss scale."""
    return {ROUNDING: Rounding()} if policy.master_weights == STOCHASTIC else {}


def _known(master: ClosedMaster) -> int:
    assert master.draw is not None
    return master.draw


def _checked(state: Any) -> tuple[int, list[int]]:
    try:
        seed, steps, order = state["seed"], list(state["steps"]), state.get("order")
        right = all(type(number) is int and number >= 0 for number in (seed, *steps)) and seed < 2**63
    except (AttributeError, KeyError, TypeError, IndexError):
        right = False
    if not right:
        raise ValueError(
            f"load_state_dict: stochastic_rounding is {state!r}; wanted {{'seed': a whole number from 0 to 2**63 - 1, "
            "'steps': a list of whole numbers, 'order': 'model'}}"
        )
    if any(steps) and order != ORDER:
        raise ValueError(
            f"load_state_dict: stochastic_rounding has order {order!r}; wanted {ORDER!r}: an older amp_patch, "
            "which numbered masters in another way, has written it; load it with 'steps': [], which counts from 0 again"
        )
    return seed, steps


sys.modules["amp_patch.masters.stochastic_master"] = sys.modules[__name__]  # as pickles of 0.4 name it
