"""Gradients of masters that are not in torch's field `grad`: those that wait, and those that a step is done with.

`HalfGradients` wait: of low precision, they stand for FP32 ones until somebody looks at those, or a step is made.

`SteppedGradients` are what a step was for: `grad` still gives them, as torch's does, until others come or they are
cleared. Loggers read them, and torch's PeriodicModelAverager averages those parameters alone that have one after the
step. No step takes them, and no backward pass adds to them.
"""

from __future__ import annotations

from collections.abc import Sequence
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


class Gradients(NamedTuple):
    """Gradients, by the id of their masters.

    Attributes:
        half: in low precision.
        factors: what these are to be multiplied by, in FP32, one after the other.
        fp32: as masters have them.
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
# Those that wait


def room_for(tensor: Tensor) -> int:
    """The elements that `HalfGradients.lend` takes for the gradient of `tensor`: whole cache lines."""
    return -(-tensor.numel() // 16) * 16


def can_wait() -> bool:
    """Whether gradients can be left in low precision at all: the walk over them is the extension's."""
    return backends.active is not None


class HalfGradients:
    """The gradients of one optimizer's masters that one backward pass has left, as it made them.

    The FP32 gradient of a master is ``grad.float() * factors[0] * factors[1] ...``, each product rounded to FP32. Those
    of all masters are made in one pass, when somebody asks for the first: `Master.grad` does. An optimizer that knows
    better reads `grads` and `factors` and makes none.

    Attributes:
        grads: by the master's id its low-precision gradient, alone in its memory and laid out as the master is.
        factors: numbers, or FP32 tensors of one element on the gradients' device.
        lent: by the master's id the FP32 gradient that it has while a portion is stepped (`lend`).
        norms: the 2-norm of each of `grads`, times the factors of then, if the overflow check has taken them.
        clipped: whether the norm of `grads`, or of those before them, was asked for.
    """

    def __init__(self) -> None:
        self.grads: dict[int, Tensor] = {}
        self.factors: list[Number] = []
        self.lent: dict[int, Tensor] = {}
        self.norms: Tensor | None = None
        self.clipped = False
        self._made: dict[int, Tensor] = {}  # by the master's id the FP32 gradient, until that master has it
        self._factors_of_norms = 0
        self._first: TensorWeakRef | None = None
        self._memory: dict[int, Recycled] = {}
        self._lent_memory = Recycled()
        self._making = RLock()

    def serve(self, master: Tensor, memory: Recycled) -> None:
        """Let gradients of `master` wait here; its FP32 ones are made in `memory`."""
        self._memory[id(master)] = memory

    def __bool__(self) -> bool:
        return bool(self.grads or self._made)

    def __contains__(self, master: Tensor) -> bool:
        """Whether a gradient of `master` waits here."""
        return id(master) in self.grads or id(master) in self._made

    def take(self, params: list[Tensor], masters: list[Tensor]) -> bool:
        """Take the gradients off low-precision `params`, for their `masters`; no sync.

        Returns:
            Whether that could be done. Not where a gradient is sparse, sharded, part of another tensor or held by
            somebody else, nor where a master has one already. Nothing was changed then.
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
        """Have these wait, by the id of their masters, for a step that follows at once; none may wait before.

        Others may hold them too, and they may be parts of other tensors: nobody writes them before the step.
        """
        self.grads, self.factors, self.norms = grads, [], None

    def check(self, inverse: Number) -> Tensor:
        """Make `inverse` (FP32, one element; 1.0: none) the first factor; whether a product overflows; no sync.

        Where the gradients before these were clipped by their norm, the norms come out of the same pass.

        Returns:
            On the gradients' device 1.0 where a product is not finite, else 0.0; FP32, shape [].
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
        """The 2-norms of the gradients, times the one factor that they may have: FP32, on their device; no sync."""
        self.clipped = True
        if self.norms is not None and len(self.factors) == self._factors_of_norms:
            return self.norms
        factor = self.factors[0] if self.factors else 1.0
        return multi_tensor.multi_tensor_l2norm(list(self.grads.values()), True, factor)[1]

    def first(self) -> Tensor | None:
        """The first of the gradients that were taken, in the type that it has now; None if that is gone."""
        return None if self._first is None else self._first()

    def give(self, master: Tensor, grad: Any) -> None:
        """Give `master` the FP32 gradient that waits for it, through torch's attribute `grad`; no sync.

        It is added to one that the master has: somebody has run backward on the master itself. Nobody is given it
        twice: not another thread that asks, nor who asks again after an interrupt in here.
        """
        with self._making:
            if id(master) in self.grads:
                self.make()
            made = self._made.get(id(master))
            if made is None:
                return
            held = grad.__get__(master)
            if held is not None and held is not made:
                made = self._made[id(master)] = held.detach() + made
            grad.__set__(master, made)
            self.drop(master)

    def replace(self, master: Tensor, grad: Any, value: Tensor | None) -> None:
        """Write `value` into torch's attribute `grad` of `master`, in the place of what waits."""
        with self._making:
            half, made = self.grads.pop(id(master), None), self._made.pop(id(master), None)
            try:
                grad.__set__(master, value)
            except BaseException:  # torch refuses a value of another shape
                if half is not None:
                    self.grads[id(master)] = half
                if made is not None:
                    self._made[id(master)] = made
                raise
            self.lent.pop(id(master), None)

    def make(self) -> None:
        """Make the FP32 gradients of all masters that wait for one, in one pass for each factor; no sync."""
        if not torch.is_inference_mode_enabled():
            self._make()
            return
        # Not inside of a region without gradients: after an interrupt torch's context manager would bring that back.
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
        """Give those of the `masters` (on the CPU) that wait FP32 gradients, until `lent` is cleared.

        Nothing moves: what waits stays here meanwhile, so that an exception finds all as it was.

        Args:
            masters: under no_grad.
            count: the elements of the memory for them: at least `room_for` all of them, and better ever the same.
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

    def drop(self, master: Tensor) -> None:
        """Forget what waits for `master`."""
        self.lent.pop(id(master), None)
        self.grads.pop(id(master), None)
        self._made.pop(id(master), None)

    def hand_over(self, masters: list[Tensor]) -> Gradients:
        """Give away what waits for `masters`."""
        if len(masters) >= len(self._memory):
            waited = Gradients(self.grads, self.factors, self._made)
        else:
            keys = set(map(id, masters))
            half, made = ({k: g for k, g in table.items() if k in keys} for table in (self.grads, self._made))
            waited = Gradients(half, self.factors, made)
        self.clear(masters)
        return waited

    def tensors(self) -> list[Tensor]:
        """Every gradient that waits."""
        return [*self.grads.values(), *self._made.values()]

    def clear(self, masters: list[Tensor]) -> None:
        """Forget what waits for `masters`."""
        if len(masters) >= len(self._memory):
            self.grads, self._made, self.lent = {}, {}, {}
        for master in masters if self else ():
            self.drop(master)


# ----------------------------------------------------------------------------------------------------------------------
# Those of the last step


class SteppedGradients:
    """The gradients of one optimizer's masters that its last step, taken or skipped, was for."""

    def __init__(self) -> None:
        self._held = Gradients({}, (), {})

    def __bool__(self) -> bool:
        return bool(self._held.half or self._held.fp32)

    def hold(self, grads: Gradients) -> None:
        """Hold these in place of those before."""
        self._held = grads

    def read(self, master: Tensor) -> Tensor | None:
        """The gradient of `master`, FP32, or None; made now where it was left in low precision; no sync."""
        half, factors, fp32 = self._held
        if (grad := half.pop(id(master), None)) is not None:
            fp32[id(master)] = _product(grad, factors)
        return fp32.get(id(master))

    def replace(self, master: Tensor, grad: Tensor) -> None:
        """Give `grad` (FP32) as the gradient of `master` from now on."""
        self._held.half.pop(id(master), None)
        self._held.fp32[id(master)] = grad

    def drop(self, master: Tensor) -> None:
        """Forget the gradient of `master`."""
        self._held.half.pop(id(master), None)
        self._held.fp32.pop(id(master), None)

    def clear(self) -> None:
        """Forget all."""
        self._held = Gradients({}, (), {})


@without_grad
def _product(grad: Tensor, factors: Sequence[Number]) -> Tensor:
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return _product(grad, factors)
    result = torch.empty_like(grad, dtype=torch.float32)
    multiply([grad], [result], factors)
    return result
