"""Gradients that the backward of a `scale_loss` leaves on masters themselves, as for a penalty over master_params."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from amp_patch.masters.grad_field import GRAD, drop_gradients, set_own_grad, with_gradient
from amp_patch.masters.gradients import Aside, FoundInf, gather
from amp_patch.masters.held_gradients import HalfGradients
from amp_patch.masters.masters import add_gradients
from amp_patch.masters.record import Record
from amp_patch.multi_tensor.checks import Number


class DirectGradients:
    """The gradients that one backward pass leaves on the masters of one optimizer.

    Like all gradients of that backward, they are scaled. If they are checked, the earlier gradients of the masters are
    set aside in `Record.earlier` until `finish` or `drop`: otherwise backward would add scaled gradients to them. Reads
    of `grad` still return the earlier ones, until backward reaches the master. If user code clears them, they are not
    restored.

    Args:
        waiting: the optimizer's deferred gradients; None if it defers none.
        records: the records of the masters, each once.
        inverse: as in `gather`.
        note: called with the overflow flags, as `gather` returns them.
    """

    def __init__(
        self,
        waiting: HalfGradients | None,
        records: list[Record],
        inverse: Number | None,
        note: Callable[[FoundInf], None],
    ) -> None:
        self._waiting, self._records, self._inverse, self._note = waiting, records, inverse, note
        self._masters = [record.master for record in records]
        found = with_gradient(self._masters)
        self._has_earlier = bool(found or waiting)
        if inverse is None:  # nothing is unscaled or checked: backward may add to the earlier gradients
            self._has_earlier = False
            if found:
                self._masters = [master for index, master in enumerate(self._masters) if index not in set(found)]
            return
        held = [self._masters[index] for index in found]
        if waiting:
            add_gradients(held)
            waiting.in_body = True
        for index in found:
            records[index].earlier = GRAD.__get__(self._masters[index])
        drop_gradients(held)

    def finish(self) -> None:
        """Unscale the gradients of the backward, check them for overflow, and add the earlier ones; no sync."""
        if self._inverse is None:
            return
        if not with_gradient(self._masters):
            if self._has_earlier:
                self.drop()
            return
        earlier = self._take_earlier() if self._has_earlier else []
        aside = {record.master: Aside(record.master, grad, grad) for record, grad in earlier}
        self._note(gather([(master, master) for master in self._masters], self._inverse, aside=aside))

    def drop(self) -> None:
        """Drop the gradients of the backward, and restore the earlier ones."""
        drop_gradients(self._masters)
        if self._has_earlier:
            for record, grad in self._take_earlier():
                set_own_grad(record.master, grad)

    def _take_earlier(self) -> list[tuple[Record, Tensor]]:
        """Return the earlier gradients, without those that user code has cleared since."""
        if self._waiting is not None:
            self._waiting.in_body = False
        taken = [(record, record.earlier) for record in self._records if record.earlier is not None]
        for record, _ in taken:
            record.earlier = None
        return taken
