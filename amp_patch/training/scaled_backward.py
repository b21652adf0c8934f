"""The context manager of `scale_loss`: it prepares gradients before a backward pass, and unscales them after it.

`ScaledBackward` is enough for a training whose one optimizer holds all of the model's parameters. `shared_backward.py`
has its subclass for trainings with several optimizers, or with parameters that no optimizer holds.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from amp_patch.casts import regions
from amp_patch.masters import gradients
from amp_patch.masters.grad_field import drop_gradients, with_gradient
from amp_patch.masters.held_gradients import DirectGradients
from amp_patch.masters.of_optimizer import GroupParams
from amp_patch.masters.record import Record
from amp_patch.model import forward as model_forward
from amp_patch.model.type_errors import explain_types_in_body
from amp_patch.policy import LOW_PRECISION
from amp_patch.support import distributed, fsdp
from amp_patch.support.interrupts import whole
from amp_patch.training import joints, observers
from amp_patch.training.loss_scaler import LossScaler
from amp_patch.training.stash import Pending, Stash, body_events, has_unscaled, no_body
from amp_patch.training.unscale import add, unscale


class ScaledBackward:
    """The context manager that `scale_loss` returns. User code runs the backward pass in its body.

    Nothing here syncs with the device. After an exception anywhere in the block the gradients of the body are dropped
    (`abandon`).

    Args:
        loss: the loss, floating, any shape.
        optimizers: the innermost optimizers of the loss, each once.
        stashes: the stash of each of `optimizers`, in the same order.
        scaler: the scaler of the loss, on the loss's device.
        delay_unscale, delay_overflow_check: as in `scale_loss`.

    Attributes:
        now: the scale of this body's gradients. An inner body may change the scaler's scale before this one ends.
        inverse: the factor that unscales them, as in `gather`.
        checking: whether the exit checks gradients for overflow.
        parts: for each optimizer, in order, its parameters that no optimizer before it holds; params: all of them, each
            once.
        begun: whether the body has begun and `close` has yet to end it.
        done: whether `delay`, `finish` or `abandon` has handled the gradients of the body.
        failed: whether an exception has ended the body.
    """

    begun = False  # of the class: a signal may end `__init__`, and `__del__` reads it

    def __init__(
        self,
        loss: Tensor,
        optimizers: list[Any],
        stashes: list[Stash],
        scaler: LossScaler,
        *,
        delay_unscale: bool = False,
        delay_overflow_check: bool = False,
    ) -> None:
        self.loss: Tensor | None = loss
        self.optimizers, self.stashes, self.scaler = optimizers, stashes, scaler
        self.delay_unscale, self.delay_overflow_check = delay_unscale, delay_overflow_check
        self.done = self.failed = False
        self.parts: list[GroupParams] = []
        self.params: list[Tensor] = []
        self.reached: list[Tensor] = []  # the tensors on which this body's backward may leave gradients
        self.had_grad: Sequence[int] | None = None  # indices of those of `reached` that had one when the body began
        self._announced = False  # whether observers were notified of `body_begins`, and not of `body_ends` yet
        self._casts: regions.region | None = None
        # If the loss is scaled, hooks append the gradients of the loss, and of the scaled loss, to these two lists. At
        # the exit they show which of the two losses the body's backward passes went through.
        self.of_loss: list[Tensor | None] = []  # None: a backward pass through another result of the loss's operator
        self.of_scaled: list[Tensor] = []
        self.hooks: list[Any] = []
        self.others: Any = None  # of a guest that watches the backward passes in the optimizers' first body
        self.returned: Callable[[], Tensor | None] = type(None)  # the scaled loss; weak, so that its graph can be freed

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"scale_loss gives a context manager, which has no attribute {name!r}; write `with amp.scale_loss(loss, "
            "optimizer) as scaled_loss: scaled_loss.backward()`"
        )

    @whole
    def __enter__(self) -> Tensor:
        if self.loss is None:
            raise RuntimeError("scale_loss: this context manager was entered before; call scale_loss for each backward")
        try:
            return self._enter(self.loss)
        except BaseException:
            self.close()
            raise

    def _enter(self, loss: Tensor) -> Tensor:
        self.now = Pending(self.scaler)
        self.scale, self.checking, self.inverse = self.now.scale, self.now.checking, self.now.inverse()
        self.begin()
        self._casts = regions.process_wide_region(self.stashes[0].policy)
        self._casts.__enter__()
        self.loss = None  # otherwise `self` would keep the graph of the loss alive
        if observers.present:
            observers.tell("loss_scaled", self, loss)
        if self.now.scaling:
            scaled = (loss if loss.dtype is torch.float64 else loss.float()) * self.scale
            if scaled.requires_grad:  # hooks that are builtins cost no Python frame
                self.hooks.append(loss.register_hook(self.of_loss.append))
                self.hooks.append(scaled.register_hook(self.of_scaled.append))
                # Only in first bodies. Not with FSDP, which calls parameters' hooks after the backward pass has ended.
                first = self.stashes[0].bodies == 1
                if first and all(stash.bodies == 1 and not stash.neighbours.sharded for stash in self.stashes):
                    joints.tell(joints.first_body, self, scaled)
        else:
            scaled = loss.float() if loss.dtype in LOW_PRECISION else loss
        self.returned = weakref.ref(scaled)
        return scaled

    @whole
    def __exit__(self, raised: Any = None, error: Any = None, *_: Any) -> None:
        try:
            self._leave_casts()
            if raised is None:
                if self.hooks and (self.others is not None or not self.of_scaled):
                    joints.tell(joints.body_left, self)
                self.delay_unscale = self.must_delay() or self.delay_unscale
                if self.delay_unscale:
                    self.delay()
                else:
                    self.finish()
                    if not has_unscaled(self.stashes[0]):
                        joints.tell(joints.nothing_unscaled, self)
        finally:
            self.close()
        if isinstance(error, RuntimeError):
            explain_types_in_body(self.stashes[0].policy, error)
        if raised is None and not (self.delay_unscale or self.delay_overflow_check):
            self.scaler.update()
        else:
            self.scaler.defer()

    def begin(self) -> None:
        """Begin the body: leave on the model only gradients that this backward may add to.

        Gradients that a delayed exit left scaled stay, since DDP must reduce the sum. If the scale has changed since,
        they are rescaled.

        All other gradients are treated by parameter. If the parameter has a master, the gradient is of another
        optimizer's loss (a GAN's generator loss fills the discriminator's gradients), and is dropped. If it has none,
        an earlier exit has unscaled the gradient. It is set aside, so that the exit checks only the gradients of this
        backward, and `finish` adds it.
        """
        self._announced = True
        if observers.present:
            observers.tell("body_begins", self)
        self.prepare()
        self.begun = True
        body_events.count += 1
        self.claim_other_gradients()
        for stash in self.stashes:
            stash.neighbours.body = weakref.ref(self)
            stash.route_grads()
            stash.masters.drop_last()
            stash.masters.strays.clear()
            stash.bodies += 1
        self.find_parts()
        self._make_room()
        self.reached = self.params
        for stash, new in zip(self.stashes, self.parts, strict=True):
            if new.linked and self.inverse is not None:
                note = partial(add, self.now.found)
                stash.masters.direct = DirectGradients(stash.masters.waiting, new.linked, self.inverse, note)
            elif new.linked:  # nothing is unscaled or checked: backward may add to earlier gradients of masters
                self.reached = self.reached + new.linked_masters
        self.had_grad = with_gradient(self.reached)

    def _make_room(self) -> None:
        accumulating = []
        for stash, new in zip(self.stashes, self.parts, strict=True):
            if stash.pending is None:
                # Warn only in the first two bodies, and only if no other body was open since this optimizer's last one:
                # the loss of another body may rightly leave such gradients.
                if stash.bodies <= 2 and stash.neighbours.ended == body_events.count - 1:
                    joints.tell(joints.dropped, stash, new.low)
                drop_gradients(new.low)
                if not stash.masters.waiting and not with_gradient(stash.masters.known_masters):
                    stash.clear_found()
                elif self.checking:
                    accumulating.append((stash, new))
                continue
            stash.forget_cleared()
            if not stash.pending.has_scale_of(self.scaler):
                gradients.rescale(new.distinct, self.scale / stash.pending.scale)
                add(self.now.found, stash.pending.found)
                stash.pending = self.now
        for stash, new in accumulating:  # after the loop above, since optimizers may share parameters
            stash.masters.set_aside(new)
            if stash.masters.aside:
                model_forward.bodies.add(self)

    def prepare(self) -> None:
        """Raise if gradients of two bodies, or of two scales, would be summed. This changes nothing."""
        for stash in self.stashes:
            if stash.neighbours.body() is not None:
                raise RuntimeError(
                    "scale_loss: an optimizer of this call is in the body of another scale_loss already; end that one "
                    "first (gradients add up over several), or add the losses"
                )
        for stash in self.stashes:
            pending = stash.pending
            if pending is not None and pending.held_back and not pending.has_scale_of(self.scaler):
                raise RuntimeError(
                    "scale_loss: fully_shard holds back gradients of an earlier micro-batch, whose loss scale may "
                    "differ from that of this loss; give all losses of such an iteration one loss_id, or call "
                    "model.set_requires_gradient_sync(True) before the last backward with another loss_id"
                )

    def claim_other_gradients(self) -> None:
        """Set aside gradients of parameters that the body's optimizers do not hold: backward must not add to them.

        Does nothing in this class, whose optimizer holds all parameters. around/shared_backward.py overrides this.
        """

    def release_other_gradients(self) -> None:
        """Undo `claim_other_gradients` at the end of the body."""

    def must_delay(self) -> bool:
        """Tell whether this exit must be delayed, because a later backward completes the gradients.

        There are two cases: FSDP modules hold back some gradients unreduced, or DDP reduces none, under `no_sync()` or
        by its flag.
        """
        now = self.now
        if distributed.unreduced:
            own = set(self.params)
            now.local = any(not own.isdisjoint(ddp.parameters()) for ddp in distributed.unreduced)
        for stash in self.stashes:
            around = stash.neighbours
            if around.sharded and now.scaling:
                sharded = [module for ref in around.sharded if (module := ref()) is not None]
                now.held_back = now.held_back or fsdp.hold_gradients_back(sharded)
        return now.local or now.held_back

    def delay(self) -> None:
        """Leave the gradients scaled on the model, and store their scale in `stash.pending`.

        The gradients that `begin` set aside are multiplied by the scale and added to them.
        """
        for record in self._taken():
            record.aside = record.aside.give_back_scaled(self.scale)
        for stash in self.stashes:
            stash.masters.end_direct()
            if stash.pending is not None and stash.pending is not self.now:
                add(self.now.found, stash.pending.found)
            stash.pending = self.now
        self.done = True

    def finish(self) -> None:
        """Unscale the gradients into the masters, add the gradients set aside, and record overflow on the device."""
        unscale(self.optimizers, self.scaler, self.inverse, self.now.found)
        self.done = True

    def abandon(self) -> None:
        """Drop the scaled gradients of the body after an exception; scale and recorded overflows do not change.

        Gradients that an earlier exit unscaled are restored bit for bit. Gradients that an earlier exit left scaled
        stay, including what this backward added to them before it failed. All other gradients are dropped.
        """
        self.failed = True
        if self.had_grad is not None:
            drop_gradients([self.reached[index] for index in set(range(len(self.reached))).difference(self.had_grad)])
        for stash in self.stashes:
            direct, stash.masters.direct = stash.masters.direct, None
            if direct is not None:
                direct.drop()
        for record in self._taken():
            record.aside.give_back()
            record.aside = None
        for stash in self.stashes:
            stash.masters.forget_aside(lambda _: False)

    @whole
    def __del__(self) -> None:
        """End a body whose `__exit__` did not run to its end, because a signal handler raised; drop its gradients."""
        if self.begun:
            if (scaled := self.returned()) is not None and scaled.requires_grad:
                refuse_too_late(scaled, weakref.ref(self.stashes[0]))
            self.failed = True
            self.close()
            self.scaler.defer()

    def close(self) -> None:
        """End the body. If its gradients were not handled by `delay` or `finish`, call `abandon`."""
        try:
            self._close()
        finally:
            if self._announced:
                self._announced = False
                if observers.present:
                    observers.tell("body_ends", self)

    def _leave_casts(self) -> None:
        if self._casts is not None:
            self._casts.__exit__(None, None, None)
            self._casts = None

    def _close(self) -> None:
        self._leave_casts()
        if not self.begun:
            return
        try:
            while self.hooks:
                self.hooks.pop().remove()
            self.of_loss.clear()
            self.of_scaled.clear()
            if not self.done:
                self.abandon()
                self.done = True
        finally:
            body_events.count += 1
            for stash in self.stashes:
                stash.neighbours.body, stash.neighbours.ended = no_body, body_events.count
                stash.route_grads()
                if self.failed and stash.neighbours.strategy is not None:
                    stash.neighbours.strategy.drop()
            self.release_other_gradients()
            self.begun = False

    def forget_taken(self, params: set[Tensor]) -> None:
        """Drop the set-aside gradients of `params`, so that the exit does not restore them."""
        for stash in self.stashes:
            stash.masters.forget_aside(params.__contains__)

    def _taken(self) -> list[Record]:
        """Return the record of each parameter whose gradient `begin` set aside, and that was not restored yet."""
        return [record for stash in self.stashes if stash.pending is None for record in stash.masters.aside]

    def find_parts(self) -> None:
        """Set `parts` and `params` from the groups of the optimizers."""
        self.parts = [self.stashes[0].masters.known(self.optimizers[0].param_groups)]
        self.params = self.parts[0].distinct_params


def refuse_too_late(scaled: Tensor, ref: weakref.ref[Stash]) -> None:
    """Make a backward pass through a scaled loss that its body did not use raise, unless another body is running."""

    def hook(grad: Tensor) -> None:
        if (stash := ref()) is not None and stash.neighbours.body() is None:
            raise RuntimeError(
                "scale_loss: backward of the scaled loss after its with block has ended, where nothing unscales the "
                "gradients; call scaled_loss.backward() inside the block"
            )

    scaled.register_hook(hook)
