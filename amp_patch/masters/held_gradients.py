"""Stores gradients of masters outside of the field that autograd fills: deferred gradients, and the last step's.

`HalfGradients` has deferred gradients. They stay in low precision until the first read of `Master.grad`, or until the
step; then they become FP32 gradients of the masters.

`SteppedGradients` has the gradients of the last step. As in plain torch, reads of `grad` return them until they are
cleared or new gradients replace them. Loggers read them, and torch's PeriodicModelAverager averages only parameters
that have a gradient after the step. No step uses them, and no backward pass adds to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from amp_patch import multi_tensor
from amp_patch.masters.recycled_memory import Recycled
from amp_patch.multi_tensor import backends
from amp_patch.multi_tensor.checks import Number
from amp_patch.support.blocks import without_grad
from amp_patch.support.interrupts import whole


class Gradients(NamedTuple):
    """Gradients of masters, in two tables whose keys are the ids of the masters.

    Attributes:
        half: low-precision gradients, not unscaled.
        factors: an unscaled gradient is one of `half` times all `factors`, multiplied in FP32 one after the other.
        fp32: FP32 gradients, unscaled.
    """

    half: dict[int, Tensor]
    factors: Sequence[Number]
    fp32: dict[int, Tensor]


def multiply(grads: list[Tensor], results: list[Tensor], factors: Sequence[Number]) -> None:
    """Write `grads` times all `factors` into `results` (FP32), each product rounded; no sync."""
    first, *others = factors or [1.0]
    multi_tensor.multi_tensor_scale(grads, results, first)
    for factor in others:
        multi_tensor.multi_tensor_scale(results, results, factor)


# ----------------------------------------------------------------------------------------------------------------------
# Deferred gradients


def room_for(tensor: Tensor) -> int:
    """Return the number of elements that `HalfGradients.lend` uses for the gradient of `tensor`: whole cache lines."""
    return -(-tensor.numel() // 16) * 16


def can_wait() -> bool:
    """Tell whether gradients can be deferred: only with the extension, whose kernels take low-precision gradients."""
    return backends.active is not None


class HalfGradients:
    """The deferred gradients of one optimizer's masters: low-precision, as one backward pass has left them.

    The FP32 gradient of a master is ``grad.float() * factors[0] * factors[1] ...``, each product rounded to FP32. The
    first read of `Master.grad` materializes the gradients of all masters in one pass. An optimizer with a kernel for
    `grads` and `factors` materializes none.

    Attributes:
        grads: master's id -> its low-precision gradient, which shares its memory with no other tensor and has the
            master's layout.
        factors: numbers, or FP32 tensors of one element on the gradients' device.
        lent: master's id -> the FP32 form of its deferred gradient, while a portion of masters is stepped (`lend`) or
            a body runs.
        norms: the 2-norm of each of `grads` times the factors at the overflow check; None if it computed no norms.
        in_body: whether a body runs whose backward may leave scaled gradients on the masters. If so, a read of `grad`
            moves the FP32 gradient to `lent`, and not to the master.
        clipped: whether `norm_of_each` was called since the last `check`. If so, the next `check` computes norms too.
    """

    def __init__(self) -> None:
        self.grads: dict[int, Tensor] = {}
        self.factors: list[Number] = []
        self.lent: dict[int, Tensor] = {}
        self.norms: Tensor | None = None
        self.in_body = self.clipped = False
        self._made: dict[int, Tensor] = {}  # master's id -> FP32 gradient, until the master gets it
        self._factors_of_norms = 0
        self._first: TensorWeakRef | None = None
        self._memory: dict[int, Recycled] = {}
        self._lent_memory = Recycled()
        self._making = RLock()

    def serve(self, master: Tensor, memory: Recycled) -> None:
        """From now on defer the gradients of `master` in this table; `memory` is for their FP32 form."""
        self._memory[id(master)] = memory

    def __bool__(self) -> bool:
        return bool(self.grads or self._made)

    def __contains__(self, master: Tensor) -> bool:
        """Tell whether a gradient of `master` is deferred here."""
        return id(master) in self.grads or id(master) in self._made

    def take(self, params: list[Tensor], masters: list[Tensor]) -> bool:
        """Move the gradients of low-precision `params` here, for their `masters`; no sync.

        Returns:
            False, with nothing changed, if a gradient is sparse, sharded, part of another tensor or referenced
            elsewhere, or if a master has a gradient already.
        """
        kernels = backends.active
        if self or kernels is None:
            return False
        taken: dict[int, Tensor] | None = kernels.take_half_gradients(params, masters)
        if taken is None:
            return False
        self.grads, self.factors, self.norms = taken, [], None
        self._first = next((TensorWeakRef(grad) for grad in taken.values()), None)
        return True

    def hold(self, grads: dict[int, Tensor]) -> None:
        """Defer `grads`, {id of a master: low-precision gradient}, for a step that follows at once.

        That step reads the gradients, or makes them FP32. This table must be empty before. Unlike in `take`, a gradient
        may be referenced elsewhere, or be part of another tensor, because nothing writes it before the step.
        """
        self.grads, self.factors, self.norms = grads, [], None

    def check(self, inverse: Number) -> Tensor:
        """Make `inverse` (FP32, one element; 1.0: no factor) the first factor, and check for overflow; no sync.

        If the previous gradients were clipped by their norm, the same pass computes the norms.

        Returns:
            On the gradients' device: 1.0 if a product is not finite, else 0.0; FP32, shape [].
        """
        grads = list(self.grads.values())
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
        """Return the 2-norms of `grads` times the first factor, if there is one: FP32, shape [len(grads)]; no sync."""
        self.clipped = True
        if self.norms is not None and len(self.factors) == self._factors_of_norms:
            return self.norms
        factor = self.factors[0] if self.factors else 1.0
        return multi_tensor.multi_tensor_l2norm(list(self.grads.values()), True, factor)[1]

    def first(self) -> Tensor | None:
        """Return one gradient of the last backward pass, low-precision or FP32 by now; None if it was freed."""
        return None if self._first is None else self._first()

    @whole
    def give(self, master: Tensor, grad: Any) -> None:
        """Materialize the deferred FP32 gradient of `master` in torch's attribute `grad`; no sync.

        If the master has a gradient, because user code has run backward on the master itself, the two are added. The
        gradient is added only once, also if several threads read it.
        """
        with self._making:
            if id(master) in self.grads:
                self.make()
            made = self._made.get(id(master))
            if made is None:
                return
            if self.in_body:
                self.lent[id(master)] = made
                return
            held = grad.__get__(master)
            grad.__set__(master, made if held is None else held.detach() + made)
            self.drop(master)

    @whole
    def replace(self, master: Tensor, grad: Any, value: Tensor | None) -> None:
        """Write `value` into torch's attribute `grad` of `master`, and drop the deferred gradient.

        If torch refuses `value`, raise torch's error, and keep the deferred gradient.
        """
        with self._making:
            grad.__set__(master, value)  # torch refuses a value of another shape: the deferred gradient stays
            self.drop(master)

    def make(self) -> None:
        """Make the deferred gradients of all masters FP32, in one pass per factor; no sync with the device."""
        if not torch.is_inference_mode_enabled():
            self._make()
            return
        with torch.inference_mode(False):
            self._make()

    @without_grad
    def _make(self) -> None:
        with self._making:
            if not self.grads:
                return
            made = {key: self._memory[key].empty_like(grad) for key, grad in self.grads.items()}
            results = list(made.values())
            multiply(list(self.grads.values()), results, self.factors)
            self._first = TensorWeakRef(results[0])
            self._made.update(made)
            self.grads = {}

    def lend(self, masters: Sequence[Tensor], count: int) -> None:
        """Write FP32 copies of the deferred gradients of `masters` (on the CPU) into `lent`.

        Reads of `Master.grad` return the copies until the caller clears `lent`. The deferred gradients stay here, so
        that an exception loses nothing. Call under no_grad.

        Args:
            masters: the masters of one portion.
            count: the number of elements to allocate for all of them, at least the sum of `room_for`. Only a call with
                the same `count` as the last one reuses its memory.
        """
        grads = {id(master): self.grads[id(master)] for master in masters if id(master) in self.grads}
        if not grads:
            return
        flat, offset, results = self._lent_memory.flat(count), 0, []
        for grad in grads.values():
            results.append(flat.as_strided(grad.shape, grad.stride(), offset))
            offset += room_for(grad)
        multiply(list(grads.values()), results, self.factors)
        self.lent = dict(zip(grads, results, strict=True))

    def end_body(self) -> None:
        """Let reads of `grad` move FP32 gradients to their masters again."""
        if self.in_body:
            self.in_body, self.lent = False, {}

    def drop(self, master: Tensor) -> None:
        """Free the deferred gradient of `master`."""
        self.lent.pop(id(master), None)
        self.grads.pop(id(master), None)
        self._made.pop(id(master), None)

    def hand_over(self, masters: list[Tensor]) -> Gradients:
        """Return the deferred gradients of `masters`, and remove them here."""
        if len(masters) >= len(self._memory):
            waited = Gradients(self.grads, self.factors, self._made)
        else:
            keys = set(map(id, masters))
            half, made = ({k: g for k, g in table.items() if k in keys} for table in (self.grads, self._made))
            waited = Gradients(half, self.factors, made)
        self.clear(masters)
        return waited

    def tensors(self) -> list[Tensor]:
        """Return every deferred gradient."""
        return [*self.grads.values(), *self._made.values()]

    def clear(self, masters: list[Tensor]) -> None:
        """Free the deferred gradients of `masters`."""
        if len(masters) >= len(self._memory):
            self.grads, self._made, self.lent = {}, {}, {}
        for master in masters if self else ():
            self.drop(master)


# ----------------------------------------------------------------------------------------------------------------------
# Gradients of the last step


class SteppedGradients:
    """The gradients of one optimizer's masters in its last step, taken or skipped."""

    def __init__(self) -> None:
        self._held = Gradients({}, (), {})

    def __bool__(self) -> bool:
        return bool(self._held.half or self._held.fp32)

    def hold(self, grads: Gradients) -> None:
        """Store the gradients of a step; they replace the gradients of the step before it."""
        self._held = grads

    def put(self, grads: Mapping[int, Tensor]) -> None:
        """Add the FP32 `grads` of some masters, by id, which a running body has set aside."""
        self._held = self._held._replace(fp32={**self._held.fp32, **grads})  # tables may share the dict

    def take(self, masters: Iterable[int]) -> dict[int, Tensor]:
        """Remove the FP32 gradients of `masters` (ids) that are here still, and return them."""
        fp32 = self._held.fp32
        return {key: fp32.pop(key) for key in masters if key in fp32}

    def read(self, master: Tensor) -> Tensor | None:
        """Return the FP32 gradient of `master` in the last step, materialized if it was deferred; None without one."""
        half, factors, fp32 = self._held
        if (grad := half.pop(id(master), None)) is not None:
            fp32[id(master)] = _product(grad, factors)
        return fp32.get(id(master))

    def replace(self, master: Tensor, grad: Tensor) -> None:
        """Store `grad` (FP32), which user code has assigned, as the gradient of `master` in the last step."""
        self._held.half.pop(id(master), None)
        self._held.fp32[id(master)] = grad

    def drop(self, master: Tensor) -> None:
        """Free the gradient of `master`."""
        self._held.half.pop(id(master), None)
        self._held.fp32.pop(id(master), None)

    def clear(self) -> None:
        """Free all gradients."""
        self._held = Gradients({}, (), {})


@without_grad
def _product(grad: Tensor, factors: Sequence[Number]) -> Tensor:
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return _product(grad, factors)
    result = torch.empty_like(grad, dtype=torch.float32)
    multiply([grad], [result], factors)
    return result
