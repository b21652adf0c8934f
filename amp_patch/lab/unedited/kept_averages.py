"""Averages of the weights (EMA) inside the module that a script calls, as in timm's train.py: they stay FP32."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, nn

from amp_patch.model.averages import averages_in
from amp_patch.policy import Policy


class KeptAverages:
    """The rule that keeps averages of the weights in FP32.

    Args:
        policy: the policy of the script's trainings.
        say: called once for each average, with a message.
    """

    def __init__(self, policy: Policy, say: Callable[[str], None]) -> None:
        self._policy, self._say, self._said = policy, say, set[str]()

    def rule(self, models: list[nn.Module], trained: Iterable[Tensor]) -> Callable[[str, nn.Module], bool]:
        """Return the function for `initialize(keep_fp32=...)`, which decides for each module whether it stays FP32.

        It returns True for a module that averages `trained` weights. At a level that casts no model it returns False
        for all. A message names each average.
        """
        if self._policy.cast_model_type is None:
            return lambda *_: False
        kept = averages_in(models, {id(param) for param in trained})
        for name in kept.values():
            if name not in self._said:
                self._said.add(name)
                self._say(f"{name!r} stays FP32: it is built like a trained module, and no optimizer holds its weights")
        return lambda _, module: module in kept
