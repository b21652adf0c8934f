"""Lost updates of a recording, measured in sampled steps, outside of the steps' times."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from torch import Tensor

from amp_patch.diagnose.lost_updates import UpdateMeter
from amp_patch.diagnose.recording.outbox import UnreadEvent
from amp_patch.diagnose.recording.run import Event
from amp_patch.support.compiled import eager_only

_EVERY = 100


class SampledUpdates:
    """A meter of lost updates in the steps that follow 1, 2, 4, 8, ... steps, and each hundredth step."""

    def __init__(self) -> None:
        self._meter: UpdateMeter | None = None
        self._of: weakref.ref[Any] | None = None

    @eager_only
    def step_ended(self, optimizer: Any, steps: int) -> list[UnreadEvent]:
        """Return the "updates" events of the `steps`-th step, which has ended.

        The list is empty if the step was not sampled. Otherwise it has one event, in the training's low-precision type,
        or, if the training has none, one for BF16 and one for FP16. If the next step is to be sampled, the weights are
        sampled now. Does not sync.
        """
        meter, of = self._meter, None if self._of is None else self._of()
        self._meter = self._of = None
        events = []
        if meter is not None and of is optimizer:
            for dtype, counts in meter.counts_in(meter.dtypes).items():
                values: list[Tensor | float] = [count for both in counts.values() for count in both.unbind()]
                name = str(dtype).removeprefix("torch.")
                events += [UnreadEvent(values, partial(_event, steps - 1, name, [*counts]))] if counts else []
        if steps & (steps - 1) == 0 or steps % _EVERY == 0:
            self._meter, self._of = UpdateMeter(optimizer), weakref.ref(optimizer)
        return events


def _event(step: int, dtype: str, names: list[str], values: list[float]) -> Event:
    pairs = zip(values[::2], values[1::2], strict=True)
    counts = {name: [int(changed), int(lost)] for name, (changed, lost) in zip(names, pairs, strict=True)}
    return {"event": "updates", "step": step, "dtype": dtype, "counts": counts}
