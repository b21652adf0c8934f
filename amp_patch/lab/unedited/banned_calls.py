"""Functions without a safe low-precision form (binary_cross_entropy) in unedited scripts: run in FP32, and told of."""

from __future__ import annotations

import sys
from collections.abc import Callable

from amp_patch.casts.rules import banned_subscribers
from amp_patch.lab.unedited.refusal import where
from amp_patch.support.patches import Patches


class BannedCalls:
    """Says once of each such function that it runs in FP32, on stderr.

    Args:
        applies: whether the script is one without lines of ours, which would have allowed it.

    Attributes:
        notes: what was said, a sentence each without its end.
    """

    def __init__(self, applies: Callable[[], bool]) -> None:
        self._applies = applies
        self.notes: list[str] = []
        self._seen: set[str] = set()

    def install(self, patches: Patches) -> None:
        """Listen until `patches` are removed."""
        patches.apply(lambda: banned_subscribers.append(self._runs), lambda: banned_subscribers.remove(self._runs))

    def _runs(self, name: str) -> None:
        if name not in self._seen and self._applies():
            self._seen.add(name)
            self.notes.append(
                f"{name} runs in FP32{where()}, since logarithms of low-precision probabilities overflow; with lines "
                "of ours in the script it is refused unless initialize(..., allow_banned=True) says so"
            )
            print(f"amp_patch: {self.notes[-1]}", file=sys.stderr)
