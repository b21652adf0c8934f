"""One `amp.inspect` that is entered between two steps of a user's loop, and left after the next step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn
from torch import overrides as modes

from amp_patch.diagnose.histogram import Histogram
from amp_patch.diagnose.inspect import inspect
from amp_patch.diagnose.inspection import Inspection
from amp_patch.diagnose.recording.run import Event


class InspectedStep:
    """An inspection from construction until `leave`.

    Raises:
        RuntimeError: another TorchFunctionMode is entered here. Its `with` block may end before the next step does,
            and would then remove the inspection's mode by mistake.
        ValueError: from `inspect`.
    """

    def __init__(self, model: nn.Module, optimizer: Any, step: int) -> None:
        # The mode of torch.set_default_device stays entered for a whole program, below all others.
        if foreign := [mode for mode in _mode_stack() if type(mode).__module__ != "torch.utils._device"]:
            raise RuntimeError(
                f"inspect: step {step} ends inside of a TorchFunctionMode ({type(foreign[-1]).__name__}), so the next "
                "one is not inspected"
            )
        self._step = step
        self._block = inspect(model, optimizer, line=False)
        self._seen = self._block.__enter__()
        self._mode = _mode_stack()[-1]

    def leave(self) -> Event:
        """End the inspection, and return the "look" event. Torch function modes entered since then stay entered."""
        self.abandon()
        if self._seen.not_finite is not None:  # `inspect` counts steps from the beginning of its block
            self._seen.not_finite = replace(self._seen.not_finite, step=self._step)
        return _look_event(self._seen, self._step)

    def abandon(self) -> None:
        """End the inspection without an event."""
        above = []
        while (stack := _mode_stack()) and stack[-1] is not self._mode:
            above.append(modes._pop_mode())
        if not stack:  # the script has popped the inspection's mode, which the block's exit pops
            modes._push_mode(self._mode)
        try:
            self._block.__exit__(None, None, None)
        finally:
            for mode in reversed(above):
                modes._push_mode(mode)


def _look_event(seen: Inspection, step: int) -> Event:
    """Return the result of `inspect` as the "look" event of a recording. Reads histograms: syncs with the device."""
    scales = (seen.scale, 1.0, seen.best_scale())
    return {
        "event": "look",
        "step": step,
        "scale": seen.scale,
        "best_scale": scales[2],
        "counts": {
            name: Histogram.merged(getattr(seen, name).values()).to_dict()
            for name in ("weights", "activations", "gradients", "activation_gradients")
        },
        "flushed": {name: [each.flushed(scale) for scale in scales] for name, each in seen.gradients.items()},
        "overflowed": {name: [each.overflowed(scale) for scale in scales] for name, each in seen.gradients.items()},
        "errors": dict(seen.errors),
        "not_finite": None if seen.not_finite is None else str(seen.not_finite),
        "keep_fp32": seen.keep_fp32(),
    }


def _mode_stack() -> list[Any]:
    return modes._get_current_function_mode_stack()
