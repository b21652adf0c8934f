"""Banned functions (binary_cross_entropy) in unedited scripts: they run in FP32, with a message.

The logarithms of low-precision probabilities overflow. A script that calls `initialize` gets an error for such a call,
unless it passes `allow_banned=True`.
"""

from __future__ import annotations

from collections.abc import Callable

from amp_patch.casts.rules import banned_subscribers
from amp_patch.run.unedited.refusal import where
from amp_patch.support.patches import Patches


def report_banned_calls(patches: Patches, say: Callable[[str], None]) -> None:
    """Call `say` once for each banned function that runs in FP32, until `patches` are removed."""
    seen: set[str] = set()

    def runs(name: str) -> None:
        if name not in seen:
            seen.add(name)
            say(
                f"{name} runs in FP32{where()}, and so does torch.sigmoid, since logarithms of low-precision "
                "probabilities overflow; a script that calls initialize gets the same with allow_banned=True, and "
                "without it an error for low-precision probabilities"
            )

    patches.apply(lambda: banned_subscribers.append(runs), lambda: banned_subscribers.remove(runs))
