"""Deferred gradients of masters: low-precision gradients that become FP32 gradients of the masters when needed.

They stay in low precision until the first read of `Master.grad`, or until the step. The gradients of a step can be read
after it, as in plain torch (`Record.last`): loggers read them, and torch's PeriodicModelAverager averages only
parameters that have a gradient after the step. No step uses them, and no backward pass adds to them.

`DirectGradients` has the gradients that the backward of a `scale_loss` leaves on masters themselves, as for a penalty
over `master_params`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import starmap
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from amp_patch import multi_tensor
from amp_patch.masters import on_host
from amp_patch.masters.grad_field import GRAD, drop_gradients, set_own_grad, with_gradient
from amp_patch.masters.gradients import Aside, FoundInf, check_finite, gather
from amp_patch.masters.masters import add_gradients
from amp_patch.masters.record import Record, multiply
from amp_patch.masters.recycled_memory import Recycled
from amp_patch.multi_tensor import backends
from amp_patch.multi_tensor.checks import Number
from amp_patch.support.blocks import without_grad
from amp_patch.support.interrupts import whole


def room_for(tensor: Tensor) -> int:
    """Return the number of elements that `HalfGradients.lend` uses for the gradient of `tensor`: whole cache lines."""
    return -(-tensor.numel() // 16) * 16


def can_wait() -> bool:
    """Tell whether gradients can be deferred: only with the extension, whose kernels take low-precision gradients."""
    return backends.active is not None


def _may_go(param: Tensor, record: Record, grad: Tensor) -> bool:
    """Tell whether a copy of `grad`, the gradient of `param`, may be deferred on the host."""
    master = record.master
    is_plain = grad.layout is torch.strided and grad.dtype is param.dtype and not grad.requires_grad
    is_alike = is_plain and grad.stride() == master.stride() and GRAD.__get__(master) is None
    return is_alike and record.host is not None and master.requires_grad is param.requires_grad


class HalfGradients:
    """The deferred gradients of one optimizer's masters: low-precision, as one backward pass has left them.

    The FP32 gradient of a master is ``half.float() * factors[0] * factors[1] ...``, each product rounded to FP32. The
    first read of `Master.grad` materializes the gradients of all masters in one pass. An optimizer with a kernel for
    low-precision gradients and `factors` materializes none.

    Attributes:
        factors: numbers, or FP32 tensors of one element on the gradients' device.
        spent: the factors of the last step's gradients.
        norms: the 2-norm of each gradient times the factors at the overflow check; None if it computed no norms.
        in_body: whether a body runs whose backward may leave scaled gradients on the masters. If so, FP32 gradients are
            made in `Record.earlier`, and not on the masters.
        clipped: whether `norm_of_each` was called since the last `check`. If so, the next `check` computes norms too.
    """

    def __init__(self) -> None:
        self._held: list[weakref.ref[Record]] = []  # weak, because records reference this object
        self.factors: list[Number] = []
        self.spent: Sequence[Number] = ()
        self.norms: Tensor | None = None
        self.in_body = self.clipped = False
        self._factors_of_norms = 0
        self._first: TensorWeakRef | None = None
        self._lent_memory = Recycled()
        self._making = RLock()

    def __bool__(self) -> bool:
        return bool(self._held)

    @property
    def records(self) -> list[Record]:
        """The records whose gradient is deferred now.

        The gradient is `half`, which shares its memory with no other tensor and has the master's layout.
        """
        return [record for ref in self._held if (record := ref()) is not None]

    def grads(self) -> list[Tensor]:
        """Return the deferred gradients, in the order of `records`; waits for those on their way to the host."""
        if on_host.used:
            on_host.arrive()
        return [record.half for ref in self._held if (record := ref()) is not None and record.half is not None]

    def take(self, params: list[Tensor], records: list[Record], masters: list[Tensor]) -> bool:
        """Move the gradients of low-precision `params` here, for their `masters`; no sync.

        Returns:
            False, with nothing changed, if a gradient is sparse, sharded, part of another tensor or referenced
            elsewhere, or if a master has a gradient already.
        """
        kernels = backends.active
        if self._held or kernels is None:
            return False
        taken: dict[int, Tensor] | None = kernels.take_half_gradients(params, masters)
        if taken is None:
            return False
        if len(taken) < len(records):
            records = [record for record in records if id(record.master) in taken]
        self.hold(records, list(taken.values()))
        self._first = TensorWeakRef(next(iter(taken.values()))) if taken else None
        return True

    def take_to_host(self, params: list[Tensor], records: list[Record], inverse: Number | None) -> FoundInf | None:
        """Check the gradients of `params` on their devices, and move them here, on their way to the host; no sync.

        Args:
            inverse: as in `Masters.take_half`.

        Returns:
            As `gather`. None, with nothing changed, if the gradients cannot be deferred.
        """
        pairs = zip(params, records, strict=True)
        rows = [(p, record, grad) for p, record in pairs if (grad := on_host.gradient(p, record)) is not None]
        if self._held or not all(starmap(_may_go, rows)):
            return None
        flags = check_finite([grad for *_, grad in rows], inverse)
        halves = [record.host.fetch(grad) for _, record, grad in rows if record.host is not None]
        self.hold([record for _, record, _ in rows], halves)
        drop_gradients(params)
        if isinstance(inverse, Tensor):
            self.factors.append(on_host.number(inverse))
        self._factors_of_norms = len(self.factors)
        self._first = TensorWeakRef(halves[0]) if halves else None
        return flags

    @whole
    def hold(self, records: list[Record], grads: list[Tensor]) -> None:
        """Defer the low-precision `grads` of `records`. None may be deferred here before.

        Unlike in `take`, a gradient may be referenced elsewhere, or be part of another tensor, if a step follows at
        once: nothing writes the gradient before that step.
        """
        for record, grad in zip(records, grads, strict=True):
            record.half = grad
        self._held, self.factors, self.norms = list(map(weakref.ref, records)), [], None

    def check(self, inverse: Number) -> Tensor:
        """Make `inverse` (FP32, one element; 1.0: no factor) the first factor, and check for overflow; no sync.

        If the previous gradients were clipped by their norm, the same pass computes the norms.

        Returns:
            On the gradients' device: 1.0 if a product is not finite, else 0.0; FP32, shape [].
        """
        grads = self.grads()
        device = grads[0].device
        found_inf = torch.zeros((), dtype=torch.float32, device=device)
        factor = inverse
        if isinstance(inverse, Tensor):
            factor = inverse.to(device)
            self.factors.append(factor)
        self._factors_of_norms = len(self.factors)
        clipped, self.clipped = self.clipped, False
        if clipped:
            self.norms = multi_tensor.multi_tensor_l2norm(grads, True, factor, found_inf)[1]
        else:
            multi_tensor.multi_tensor_check_finite(grads, found_inf, factor)
        return found_inf

    def norm_of_each(self) -> Tensor:
        """Return the 2-norms of `grads()` times the first factor, if there is one: FP32, one for each; no sync."""
        self.clipped = True
        if self.norms is not None and len(self.factors) == self._factors_of_norms:
            return self.norms
        factor = self.factors[0] if self.factors else 1.0
        return multi_tensor.multi_tensor_l2norm(self.grads(), True, factor)[1]

    def first(self) -> Tensor | None:
        """Return one gradient of the last backward pass, low-precision or FP32 by now; None if it was freed."""
        return None if self._first is None else self._first()

    def make(self) -> None:
        """Make the deferred gradients of all masters FP32, in one pass per factor; no sync with the device.

        If a master has a gradient, because user code has run backward on the master itself, the two are added. A
        gradient is added only once, also if several threads read it.
        """
        with self._making:
            if not self._held:
                return
            if torch.is_inference_mode_enabled():
                with torch.inference_mode(False):
                    self._make()
            else:
                self._make()

    @without_grad
    def _make(self) -> None:
        grads = self.grads()
        made = [record.memory.empty_like(grad) for record, grad in zip(self.records, grads, strict=True)]
        if made:
            multiply(grads, made, self.factors)
            self._first = TensorWeakRef(made[0])
        self._give(made)

    @whole
    def _give(self, made: list[Tensor]) -> None:
        records, self._held = self.records, []
        for record, grad in zip(records, made, strict=True):
            record.half = None
            if self.in_body:
                record.earlier = grad
            else:
                held: Any = GRAD.__get__(record.master)
                GRAD.__set__(record.master, grad if held is None else held.detach() + grad)

    def lend(self, records: Sequence[Record], count: int) -> None:
        """Write FP32 copies of the deferred gradients of `records` (on the CPU) into their `lent`.

        Reads of `Master.grad` return the copies until the caller clears `lent`. The deferred gradients stay here, so
        that an exception loses nothing. Call under no_grad.

        Args:
            records: the records of one portion.
            count: the number of elements to allocate for all of them, at least the sum of `room_for`. Only a call with
                the same `count` as the last one reuses its memory.
        """
        if on_host.used:
            on_host.arrive()
        grads = [record.half for record in records if record.half is not None]
        if not grads:
            return
        flat, offset, results = self._lent_memory.flat(count), 0, []
        for grad in grads:
            results.append(flat.as_strided(grad.shape, grad.stride(), offset))
            offset += room_for(grad)
        multiply(grads, results, self.factors)
        lent = iter(results)
        for record in records:
            record.lent = None if record.half is None else next(lent)

    def drop(self, record: Record) -> None:
        """Free the deferred gradient of `record`."""
        with self._making:
            if record.half is not None:
                record.half = record.lent = None
                self._held.remove(weakref.ref(record))

    @whole
    def clear(self, records: Sequence[Record]) -> None:
        """Free the deferred gradients of `records`."""
        if self._held:
            for record in records:
                record.half = record.lent = None
            self._held = [ref for ref in self._held if (left := ref()) is not None and left.half is not None]


# ----------------------------------------------------------------------------------------------------------------------
# Gradients on masters themselves


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
        inverse: Number,
        note: Callable[[FoundInf], None],
    ) -> None:
        self._waiting, self._records, self._inverse, self._note = waiting, records, inverse, note
        self._masters = [record.master for record in records]
        found = with_gradient(self._masters)
        self._has_earlier = bool(found or waiting)
        held = [self._masters[index] for index in found]
        if waiting:
            add_gradients(held)
            waiting.in_body = True
        for index in found:
            records[index].earlier = GRAD.__get__(self._masters[index])
        drop_gradients(held)

    def finish(self) -> None:
        """Unscale the gradients of the backward, check them for overflow, and add the earlier ones; no sync."""
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
