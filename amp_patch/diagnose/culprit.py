"""Search in the log of one step for the call that made the first number that is not finite."""

from __future__ import annotations

import math
from dataclasses import dataclass

CASTS = ("to", "half", "bfloat16", "float", "double", "type", "type_as", "ToCopy")  # names of functions that cast


@dataclass
class Call:
    """One call of a function of torch.

    Attributes:
        module: name of the module whose forward made the call; None outside of the model's forward.
        op: the function's name.
        given: keys of the tensors passed in. A key is the number of a tensor in the log; after a write in place, the
            tensor has a new key.
        made: keys of the tensors returned.
        harmless: whether non-finite numbers in the result are no fault: user code asked for them (a mask's -inf), or
            the memory is not initialized (`torch.empty`).
    """

    module: str | None
    op: str
    given: list[int]
    made: list[int]
    harmless: bool = False

    @property
    def casts(self) -> bool:
        """Whether the function casts, judged by its name."""
        return self.op in CASTS


@dataclass
class StepLog:
    """The calls of one step.

    Attributes:
        calls: the calls in order.
        values: the lowest and the highest value of each tensor, at the index of its key. Both are NaN if one value is.
        gradients: key of a tensor -> the lowest and the highest value of its gradient.
        outside: keys of the tensors that no call of the model made.
    """

    calls: list[Call]
    values: list[list[float]]
    gradients: dict[int, list[float]]
    outside: set[int]

    def backward_culprit(self) -> Call | None:
        """Return the call whose backward was the first to make non-finite numbers from finite ones; None without one.

        Backward runs through the calls from the last to the first. If the call found is a cast, and a call in the same
        module has used the result of the cast, that other call is returned.
        """
        users: dict[int, list[Call]] = {}
        # The last call that made a tensor is its maker: an autograd function is logged after the calls inside of it.
        made_by = {key: call for call in self.calls for key in call.made}
        for call in self.calls:
            if any(made_by[key] is call for key in call.made):
                for key in {*call.given} - {*call.made}:
                    users.setdefault(key, []).append(call)
        user_of: dict[int, Call] = {}
        for call in reversed(self.calls):
            came = self._gradients_of(call.made)
            if came and all(map(_finite, came)) and any(self._is_maker(call, key, users) for key in call.given):
                user = user_of.get(call.made[0]) if call.casts else None
                return user if user is not None and user.module == call.module else call
            user_of.update(dict.fromkeys(call.given, call))
        return None

    def _gradients_of(self, keys: list[int]) -> list[list[float]]:
        return [self.gradients[key] for key in keys if key in self.gradients]

    def _is_maker(self, call: Call, key: int, users: dict[int, list[Call]]) -> bool:
        """Return whether the backward of `call` made the gradient of `key`, one of its inputs, not finite.

        If several calls use the tensor, its gradient is a sum with one term from each call. If one of these calls
        received a non-finite gradient itself, that gradient explains the sum, and no call is the maker. Otherwise the
        first call is the maker: the later calls are additions of residual connections and the like, which pass
        gradients on.
        """
        if all(map(_finite, self._gradients_of([key]))):
            return False
        others = [other for other in users.get(key, []) if self._gradients_of(other.made)]
        if not all(_finite(pair) for other in others for pair in self._gradients_of(other.made)):
            return False
        return not others or others[0] is call

    def forward_culprit(self) -> Call | None:
        """Return the first call that made non-finite numbers from finite ones; None without one.

        If the call found is a cast, and a call in the same module has made the input of the cast, that other call is
        returned.
        """
        made_by: dict[int, Call] = {}
        for call in self.calls:
            bad = not (call.harmless or all(_finite(self.values[key]) for key in call.made))
            # If an input has no maker and is not from outside, an unlogged cast of O1 made it. It counts as finite, so
            # that the culprit is the call that needed the cast.
            if bad and all(
                _finite(self.values[key]) or not (key in made_by or key in self.outside) for key in call.given
            ):
                maker = made_by.get(call.given[0]) if call.casts else None
                return maker if maker is not None and maker.module == call.module else call
            made_by.update(dict.fromkeys(call.made, call))
        return None

    def touching(self, call: Call, direction: str) -> list[str | None]:
        """Return the names of the modules that the non-finite numbers of `call` pass through, that of `call` first.

        With the `direction` "forward" the other modules are those of the calls that use the result of `call`. With
        "backward" they are those of the calls that made its inputs, and so received its non-finite gradients. A cast
        among these calls passes the numbers on, so the search goes on with the calls beyond it.
        """
        touching = [call.module]
        if direction == "forward":
            reached = set(call.made)
            for other in self.calls[self.calls.index(call) + 1 :]:
                if not reached.isdisjoint(other.given):
                    touching.append(other.module)
                    reached.update(other.made if other.casts else ())
        else:
            reached = set(call.given)
            for other in reversed(self.calls[: self.calls.index(call)]):
                found = reached.intersection(other.made)
                reached.update(other.given if found and other.casts else ())
                if not all(_finite(self.gradients[key]) for key in found if key in self.gradients):
                    touching.append(other.module)
        return touching


def _finite(pair: list[float]) -> bool:
    return all(map(math.isfinite, pair))
