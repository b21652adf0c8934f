"""Masters that are stored only as their BF16 weights: a value written into one is rounded stochastically to BF16.

An update smaller than half the distance to the next BF16 number changes the weight with a probability proportional to
its size. Rounding to nearest would lose it in every step.
"""

from __future__ import annotations

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

# A draw is an integer that selects the random bits of one write into a master. From its lowest bits on, it has the
# number of the master's steps (32 bits); the number of edits by user code since the last step (8 bits), 0 for the step
# itself; and the master's number in the training.
_EDITS, _NUMBER = 32, 40
_MOST_EDITS = (1 << _NUMBER - _EDITS) - 1
_STEPS = (1 << _EDITS) - 1
ROUNDING = "stochastic_rounding"  # the key of the Rounding in the `state_dict` of a training


class Rounding(Form):
    """The random bits for rounding the weights of one training: a seed, and a count of steps for each master.

    The bits of a step depend only on the seed, the number of the master (the position of its parameter in the
    training's models), and the number of its steps. They are the same on each process of a DDP training, in portions
    and in one pass, and after a checkpoint with `state_dict`. They do not depend on the original dtype of the
    parameters, the order of the groups, or on parameters that are unfrozen later. (In a copied training such parameters
    get the next numbers.)

    Attributes:
        seed: 63 bits, 0 unless `load_state_dict` has set it. It is not drawn from torch's generator, because processes
            may seed that differently.
    """

    is_exact = False

    def __init__(self) -> None:
        self.seed = 0
        self._masters: dict[int, weakref.ref[ClosedMaster]] = {}  # by the number of the master
        # By the id of the parameter, which a weak reference would keep from being swapped.
        self._positions: dict[int, int] = {}
        self._next = 0  # the number of the next master without a position
        self._later: dict[int, int] = {}  # number of a master to be made -> its loaded count of steps

    def __getstate__(self) -> dict[str, Any]:
        fresh = {"_masters": {}, "_positions": {}, "_later": {**self._later, **self._steps()}}
        return {**vars(self), **fresh}

    def number(self, params: Iterable[Tensor]) -> None:
        """Number the masters of `params` from 0, in this order. Masters of other parameters get the next numbers."""
        self._positions = {id(param): position for position, param in enumerate(params)}
        self._next = len(self._positions)

    def _alive(self) -> dict[int, ClosedMaster]:
        found = {number: ref() for number, ref in self._masters.items()}
        return {number: m for number, m in found.items() if m is not None and m.form is self}

    def _steps(self) -> dict[int, int]:
        return {number: _known(master) & _STEPS for number, master in self._alive().items()}

    def check_step(self) -> None:
        """Raise in the capture of a CUDA graph: each replay would use the same random bits, and round the same way."""
        if device_sync.is_capturing():
            raise RuntimeError(
                "a step with master_weights='stochastic' cannot be captured in a CUDA graph: "
                + reason(STOCHASTIC, "CUDA graphs")
            )

    def begin(self, param: Tensor, master: ClosedMaster, value: Tensor | None) -> None:
        if value is not None:  # to nearest: only for small updates must the rounding be stochastic
            multi_tensor.multi_tensor_scale([value], [param], 1.0)
        if master.draw is None:  # a copied master keeps the original's draw
            number = self._positions.get(id(param), self._next)
            if (ref := self._masters.get(number)) is not None and ref() is not None:
                number = self._next
            master.draw = number << _NUMBER | self._later.pop(number, 0)
        number = master.draw >> _NUMBER
        self._masters[number], self._next = weakref.ref(master), max(self._next, number + 1)
        master.edits = 0

    def read(self, masters: list[tuple[Tensor, ClosedMaster, Tensor]]) -> None:
        multi_tensor.multi_tensor_scale([weight for weight, _, _ in masters], [value for _, _, value in masters], 1.0)

    def write(self, masters: list[tuple[Tensor, ClosedMaster, Tensor]]) -> None:
        self.check_step()
        weights, of_these, values = map(list, zip(*masters, strict=True))
        draws = [self._draw(master) for master in of_these]
        multi_tensor.multi_tensor_stochastic_round(values, weights, self.seed, draws)

    def _draw(self, master: ClosedMaster) -> int:
        """Return the draw for this write, and advance the count of steps if a step wrote, else the count of edits."""
        draw = _known(master)
        if master.joined is None:
            note_stepped([master])
            return draw
        master.edits = master.edits % _MOST_EDITS + 1
        return draw | master.edits << _EDITS

    def state_dict(self) -> dict[str, Any]:
        """Return the seed, and the counts of steps ordered by the number of the master."""
        steps = {**self._later, **self._steps()}
        in_order = [steps.get(number, 0) for number in range(max(steps, default=-1) + 1)]
        return {"seed": self.seed, "steps": in_order}

    def load_state_dict(self, state: Any) -> None:
        """Restore the seed and the counts of steps from a `state_dict`."""
        seed, steps = _checked(state)
        self.seed, self._later = seed, dict(enumerate(steps))
        for number, master in self._alive().items():
            master.draw, master.edits = number << _NUMBER | self._later.pop(number, 0), 0

    def check(self, state: Any) -> None:
        """Raise ValueError if `load_state_dict` would refuse `state`."""
        _checked(state)


def beside_scale(policy: Policy) -> dict[str, Rounding]:
    """Return {ROUNDING: a new `Rounding`}, saved with the loss scale, if the policy rounds stochastically; else {}."""
    return {ROUNDING: Rounding()} if policy.master_weights == STOCHASTIC else {}


def _known(master: ClosedMaster) -> int:
    assert master.draw is not None
    return master.draw


def _checked(state: Any) -> tuple[int, list[int]]:
    try:
        seed, steps = state["seed"], list(state["steps"])
        right = all(type(number) is int and number >= 0 for number in (seed, *steps)) and seed < 2**63
    except (AttributeError, KeyError, TypeError, IndexError):
        right = False
    if not right:
        raise ValueError(
            f"load_state_dict: stochastic_rounding is {state!r}; wanted {{'seed': a whole number from 0 to 2**63 - 1, "
            "'steps': a list of whole numbers}}"
        )
    return seed, steps
