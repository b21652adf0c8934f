"""Averages of the weights that are children of the module that a script calls, as timm's train.py has them: FP32."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, nn

from amp_patch.model.averages import averages_in
from amp_patch.policy import Policy


class KeptAverages:
    """Which modules stay FP32 for the sake of averages.

    Args:
        policy: of the script's trainings.
        say: tells the script's user.
    """

    def __init__(self, policy: Policy, say: Callable[[str], None]) -> None:
        self._policy, self._say, self._said = policy, say, set[str]()

    def rule(self, models: list[nn.Module], trained: Iterable[Tensor]) -> Callable[[str, nn.Module], bool]:
        """The rule for `initialize(keep_fp32=...)`: the averages inside `models` of what is `trained`."""
        if self._policy.cast_model_type is None:
            return lambda *_: False
        kept = averages_in(models, {id(param) for param in trained})
        for name in kept.values():
            if name not in self._said:
                self._said.add(name)
                self._say(f"{name!r} stays FP32: it is built as what is trained, and no optimizer holds its weights")
        return lambda _, module: module in kept
