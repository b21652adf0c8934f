"""Gradients that the backward of a `scale_loss` leaves on masters themselves, as for a penalty over master_params."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from amp_patch.masters.grad_field import GRAD, drop_gradients, set_own_grad, with_gradient
from amp_patch.masters.gradients import Aside, FoundInf, gather
from amp_patch.masters.masters import add_gradients
from amp_patch.masters.of_optimizer import Masters
from amp_patch.multi_tensor.checks import Number


class DirectGradients:
    """The gradients that one backward pass leaves on the masters of one optimizer.

    Like all gradients of that backward, they are scaled. If they are checked, the earlier gradients of the masters are
    set aside until `finish` or `drop`: otherwise backward would add scaled gradients to them. Reads of `grad` still
    return the earlier ones, until backward reaches the master. If user code clears them, they are not restored.

    Args:
        known: the masters of the optimizer.
        masters: those of `known` that this object is for, each once.
        inverse: as in `gather`.
        note: called with the overflow flags, as `gather` returns them.

    Attributes:
        earlier: ids of the masters whose earlier gradients are set aside.
    """

    def __init__(
        self, known: Masters, masters: list[Tensor], inverse: Number | None, note: Callable[[FoundInf], None]
    ) -> None:
        self._known, self._masters, self._inverse, self._note = known, masters, inverse, note
        found = with_gradient(masters)
        held = {id(masters[index]): masters[index] for index in found} if found else {}
        if inverse is None:  # nothing is unscaled or checked: backward may add to the earlier gradients
            self._masters = [master for master in masters if id(master) not in held] if held else masters
            held = {}
        elif known.waiting:
            add_gradients([*held.values()])
            known.waiting.in_body = True
        self.earlier = held.keys()
        if held:
            grads = {key: GRAD.__get__(master) for key, master in held.items()}
            for table in known.stepped_grads:
                table.put(grads)
            drop_gradients(list(held.values()))

    def finish(self) -> None:
        """Unscale the gradients of the backward, check them for overflow, and add the earlier ones; no sync."""
        if self._inverse is None:
            return
        if not with_gradient(self._masters):
            waiting = self._known.waiting
            if self.earlier or (waiting is not None and waiting.in_body):
                self.drop()
            return
        earlier = self._take_earlier()
        aside = {id(m): Aside(m, grad, grad) for m in self._masters if (grad := earlier.get(id(m))) is not None}
        self._note(gather([(master, master) for master in self._masters], self._inverse, aside=aside))

    def drop(self) -> None:
        """Drop the gradients of the backward, and restore the earlier ones."""
        drop_gradients(self._masters)
        earlier = self._take_earlier()
        for master in self._masters if earlier else ():
            if (grad := earlier.get(id(master))) is not None:
                set_own_grad(master, grad)

    def _take_earlier(self) -> dict[int, Tensor]:
        """Return {master's id: its earlier gradient} without those that user code has cleared since."""
        if self._known.waiting is not None:
            self._known.waiting.end_body()
        taken = [table.take(self.earlier) for table in self._known.stepped_grads] if self.earlier else [{}]
        return {key: grad for key, grad in taken[0].items() if all(key in others for others in taken)}
