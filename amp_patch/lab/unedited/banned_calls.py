"""Functions without a safe low-precision form (binary_cross_entropy) in unedited scripts: run in FP32, and told of."""

from __future__ import annotations

from collections.abc import Callable

from amp_patch.casts.rules import banned_subscribers
from amp_patch.lab.unedited.refusal import where
from amp_patch.support.patches import Patches


class BannedCalls:
    """Says once of each such function that it runs in FP32.

    Args:
        say: is told.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._seen: set[str] = set()

    def install(self, patches: Patches) -> None:
        """Listen until `patches` are removed."""
        patches.apply(lambda: banned_subscribers.append(self._runs), lambda: banned_subscribers.remove(self._runs))

    def _runs(self, name: str) -> None:
        if name not in self._seen:
            self._seen.add(name)
            self._say(
                f"{name} runs in FP32{where()}, and so does torch.sigmoid, since logarithms of low-precision "
                "probabilities overflow; with lines of ours in the script initialize(..., allow_banned=True) does the "
                "same, and without it low-precision probabilities are refused"
            )
