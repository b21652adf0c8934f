"""Banned functions (binary_cross_entropy) in unedited scripts: they run in FP32, with a message.

The logarithms of low-precision probabilities overflow. A script that calls `initialize` gets an error for such a call,
unless it passes `allow_banned=True`.
"""

from __future__ import annotations

from collections.abc import Callable

from amp_patch.casts.rules import banned_subscribers
from amp_patch.lab.unedited.refusal import where
from amp_patch.support.patches import Patches


class BannedCalls:
    """Reports once for each banned function that it runs in FP32.

    Args:
        say: called with the message.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._seen: set[str] = set()

    def install(self, patches: Patches) -> None:
        """Subscribe to calls of banned functions, until `patches` are removed."""
        patches.apply(lambda: banned_subscribers.append(self._runs), lambda: banned_subscribers.remove(self._runs))

    def _runs(self, name: str) -> None:
        if name not in self._seen:
            self._seen.add(name)
            self._say(
                f"{name} runs in FP32{where()}, and so does torch.sigmoid, since logarithms of low-precision "
                "probabilities overflow; a script that calls initialize gets the same with allow_banned=True, and "
                "without it an error for low-precision probabilities"
            )
