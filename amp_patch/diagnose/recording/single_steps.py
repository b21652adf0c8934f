"""Single steps of a recording that are inspected, or measured for the bytes that autograd saves in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from amp_patch.diagnose.recording.activations import WeighedStep
from amp_patch.diagnose.recording.inspected_step import InspectedStep
from amp_patch.diagnose.recording.peak_memory import PeakMemory
from amp_patch.diagnose.recording.run import Event
from amp_patch.support.compiled import eager_only


class SingleSteps:
    """Scheduler of looks. A look inspects a step, or counts the bytes that autograd saves in it.

    At most one look runs at a time, from the end of a step to the end of the next.

    Args:
        inspect: whether to inspect the step after 1, 10, 100, ... steps.
        weigh_after: count the bytes of the step after this number of steps; 0 for none.
        put: receives the event of a look, or a "note" with the reason for its absence.
    """

    def __init__(self, inspect: bool, weigh_after: int, put: Callable[[Event], None]) -> None:
        self._inspects = inspect
        self._weigh_after = weigh_after
        self._put = put
        self._look: InspectedStep | WeighedStep | None = None
        # Paused while `_look` is an inspection: its tensors are not the training's.
        self._peak: PeakMemory | None = None

    def is_looking(self) -> bool:
        """Tell whether the running step is inspected or measured, so that its times are not valid."""
        return self._look is not None

    def forward_begins(self, args: Any, kwargs: Any) -> None:
        """If the bytes that autograd saves in the running step are counted, exclude the inputs of its forward.

        Otherwise do nothing.
        """
        if isinstance(self._look, WeighedStep):
            self._look.leave_out_inputs(args, kwargs)

    def wants_inspection(self, steps: int) -> bool:
        """Tell whether to inspect the step after this number of steps."""
        return self._inspects and str(steps).strip("0") == "1"

    @eager_only
    def inspect(self, model: nn.Module, optimizer: Any, steps: int, peak: PeakMemory) -> None:
        """Inspect the step that begins now, which is the one after `steps` steps.

        Until it ends, `peak` is paused: otherwise the peak memory would include the inspection's tensors. If the step
        cannot be inspected, pass a "note" with the reason to `put`.
        """
        peak.pause()
        try:
            self._look, self._peak = InspectedStep(model, optimizer, steps), peak
        except (ValueError, RuntimeError) as error:
            peak.resume()
            self._put({"event": "note", "text": str(error)})

    def weigh(self, at_rest: Callable[[], Iterable[Tensor]], steps: int) -> None:
        """Count the bytes that autograd saves in the step that begins now, if it is the one to count.

        It is if `steps`, the number of steps before it, is `weigh_after`. Otherwise do nothing.

        Args:
            at_rest: returns the tensors to leave out: those that live between steps.
        """
        if steps == self._weigh_after:
            self._look = WeighedStep(at_rest(), steps)

    @eager_only
    def end(self) -> None:
        """End the running look after its step, and pass its event to `put`. Without a running look, do nothing."""
        look, self._look = self._look, None
        if look is None:
            return
        try:
            self._put(look.leave())
        except (ValueError, RuntimeError) as error:
            self._put({"event": "note", "text": f"inspect: {error}"})
        self._resume_peak()

    def abandon(self) -> None:
        """End the look without an event, because the recording ends in the middle of a step."""
        look, self._look = self._look, None
        if look is not None:
            look.abandon()

    def _resume_peak(self) -> None:
        peak, self._peak = self._peak, None
        if peak is not None:
            peak.resume()
