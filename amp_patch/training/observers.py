"""Observers: objects that are notified of bodies of `scale_loss`, of steps and of calls of GradScalers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from amp_patch.support.compiled import not_traced
from amp_patch.support.patches import Patches
from amp_patch.training.joints import Optimizer
from amp_patch.training.stash import Body


class Observer:
    """Base class of observers, with one method for each event. A subclass overrides the methods of its events.

    The methods are called at the event, on the thread of the training, and must not sync with a device. If a method
    raises, all other observers are notified first, and then the first error is raised.
    """

    def training_begun(self, training: Any) -> None:
        """`initialize` has made `training`; None after `initialize(enabled=False)`."""

    def body_begins(self, body: Body) -> None:
        """The body of a `scale_loss` begins. `body` is its `ScaledBackward`, before it has changed any gradient."""

    def loss_scaled(self, body: Body, loss: Tensor) -> None:
        """`body` is about to multiply `loss` by the scale."""

    def body_ends(self, body: Body) -> None:
        """The body has ended. `body.failed`: whether an exception has ended it."""

    def step_begins(self, optimizer: Optimizer) -> None:
        """`step()` of any optimizer was called. If its class calls `super().step()`, this method is called twice."""

    def step_ends(self, optimizer: Optimizer) -> None:
        """`optimizer.step()` has returned."""

    # The methods below are called at calls of GradScalers: torch's, or a subclass's, unless the scaler is disabled.

    def loss_given_to_scaler(self, scaler: Any, loss: Any, scaled: Any, scale: Any) -> None:
        """`scaler.scale(loss)` has returned `scaled`. `scale`: the factor, a tensor of one element."""

    def scaler_unscales(self, scaler: Any, optimizer: Optimizer) -> None:
        """`scaler.unscale_(optimizer)` was called by the script."""

    def scaler_unscaled(self, scaler: Any, optimizer: Optimizer) -> None:
        """`scaler.unscale_(optimizer)` has returned, or raised."""

    def scaler_steps(self, scaler: Any, optimizer: Optimizer) -> None:
        """`scaler.step(optimizer)` was called. If the optimizer steps, `step_begins` and `step_ends` follow."""

    def scaler_stepped(self, scaler: Any, optimizer: Optimizer, skipped: Any) -> None:
        """`scaler.step(optimizer)` has returned, or raised.

        `skipped`: a tensor of one element, not 0 if there was an overflow; None after an exception.
        """


_lock = threading.Lock()
present: list[Observer] = []
_hooks: list[Any] = []  # the handles of torch's global step hooks, while there are observers


_patches = Patches()
installers: list[Callable[[Patches], None]] = []  # patch other code so that it calls `tell`, while there are observers


def add(observer: Observer) -> None:
    """Register `observer`, whose methods are then called at each event."""
    with _lock:
        if not present:
            # torch calls these global hooks around an optimizer's own.
            _hooks.append(register_optimizer_step_pre_hook(_step_begins))
            _hooks.append(register_optimizer_step_post_hook(_step_ends))
            for install in installers:
                install(_patches)
        present.append(observer)


def remove(observer: Observer) -> None:
    """Stop notifying `observer`. If it was the last observer, remove the hooks and patches."""
    with _lock:
        present.remove(observer)
        if not present:
            _patches.remove()
        while _hooks and not present:
            _hooks.pop().remove()


def tell(what: str, *args: Any) -> None:
    """Call the method named `what` of all observers; raise their first error after the last call."""
    failure: BaseException | None = None
    for observer in tuple(present):
        try:
            getattr(observer, what)(*args)
        except BaseException as error:
            failure = failure or error
    if failure is not None:
        raise failure


@not_traced
def _step_begins(optimizer: Optimizer, *_: Any) -> None:
    tell("step_begins", optimizer)


@not_traced
def _step_ends(optimizer: Optimizer, *_: Any) -> None:
    tell("step_ends", optimizer)
