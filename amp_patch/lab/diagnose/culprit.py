"""Which call made the first number that is not finite, found in the log of one step."""

from __future__ import annotations

import math
from dataclasses import dataclass

CASTS = ("to", "half", "bfloat16", "float", "double", "type", "type_as", "ToCopy")  # names of functions that cast


@dataclass
class Call:
    """One call of a function of torch's.

    Attributes:
        module: name of the module whose forward made it; None outside of the model's forward.
        op: the function's name.
        given, made: keys of the tensors that went in, and of those that came out.
        harmless: what is not finite in its result was asked for (a mask's -inf), or is memory that nobody has written
            yet (`torch.empty`).
    """

    module: str | None
    op: str
    given: list[int]
    made: list[int]
    harmless: bool = False

    @property
    def casts(self) -> bool:
        """Whether the function casts, by its name."""
        return self.op in CASTS


@dataclass
class StepLog:
    """The calls of one step.

    Attributes:
        calls: in order.
        values: by key of a tensor its lowest and its highest value; NaN both if it holds one.
        gradients: key of a tensor -> the same of its gradient.
        outside: keys of the tensors that no call of the model made.
    """

    calls: list[Call]
    values: list[list[float]]
    gradients: dict[int, list[float]]
    outside: set[int]

    def backward_culprit(self) -> Call | None:
        """The call whose backward was the first to make numbers that are not finite out of finite ones.

        Backward runs through the calls from the last to the first. If the call is a cast, the culprit is the call that
        used what the cast made, where both are in one module.
        """
        users: dict[int, list[Call]] = {}
        # The last call that made a tensor is its maker: an autograd function is logged behind the calls inside of it.
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
        """Whether the backward of `call` made the gradient of `key`, one of its inputs, not finite.

        Where several calls use the tensor, its gradient is the sum of what each of them gave. If the gradients that
        came to one of them were not finite before, that one explains the sum, and none of them is a maker. Else the
        maker is the first of them: the later ones are such as a residual connection's addition, which makes nothing.
        """
        if all(map(_finite, self._gradients_of([key]))):
            return False
        others = [other for other in users.get(key, []) if self._gradients_of(other.made)]
        if not all(_finite(pair) for other in others for pair in self._gradients_of(other.made)):
            return False
        return not others or others[0] is call

    def forward_culprit(self) -> Call | None:
        """The first call that made numbers that are not finite out of finite ones.

        If the call is a cast, the culprit is the call that made the number which overflows in it, where both are in
        one module.
        """
        made_by: dict[int, Call] = {}
        for call in self.calls:
            bad = not (call.harmless or all(_finite(self.values[key]) for key in call.made))
            # An input without a maker that is not from outside comes from a cast of O1's, which is not logged. Such an
            # input counts as finite: the culprit is the call that needed the cast.
            if bad and all(
                _finite(self.values[key]) or not (key in made_by or key in self.outside) for key in call.given
            ):
                maker = made_by.get(call.given[0]) if call.casts else None
                return maker if maker is not None and maker.module == call.module else call
            made_by.update(dict.fromkeys(call.made, call))
        return None

    def touching(self, call: Call, direction: str) -> list[str | None]:
        """The module of `call`, and the modules that its number touches; casts between them are passed through.

        Forward: those that use what it made. Backward: those that made the inputs to which its gradients went.
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
