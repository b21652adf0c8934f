"""Observers of trainings: recordings are told here what happens, so that they need not patch any of it."""

from __future__ import annotations

import threading
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from amp_patch.support.compiled import not_traced
from amp_patch.training import scaler_calls


class Observer:
    """One method for each thing that observers are told of. A subclass overrides those that it wants to hear of.

    They are called where it happens, on the thread of the training, and must not wait for a device. All observers are
    told; what the first of them raises is raised afterwards.
    """

    def training_begun(self, training: Any) -> None:
        """`initialize` has made `training`; None: it was called with `enabled=False`."""

    def body_begins(self, body: Any) -> None:
        """The body of a `scale_loss` begins: `body` is its `ScaledBackward`, which has changed nothing yet."""

    def loss_scaled(self, body: Any, loss: Any) -> None:
        """`loss` is about to be multiplied for `body`."""

    def body_ends(self, body: Any) -> None:
        """The body is over; `body.failed` says whether an exception has ended it."""

    def step_begins(self, optimizer: Any) -> None:
        """`optimizer.step()` was called, of any optimizer. A step that calls its parent tells twice."""

    def step_ends(self, optimizer: Any) -> None:
        """`optimizer.step()` has returned."""

    # Calls of torch's GradScaler and of its subclasses; disabled scalers are left out.

    def loss_given_to_scaler(self, scaler: Any, loss: Any, scaled: Any, scale: Any) -> None:
        """`scaler.scale(loss)` has returned `scaled`; `scale`: by how much, a tensor of one element."""

    def scaler_unscales(self, scaler: Any, optimizer: Any) -> None:
        """`scaler.unscale_(optimizer)` was called by the script."""

    def scaler_unscaled(self, scaler: Any, optimizer: Any) -> None:
        """`scaler.unscale_(optimizer)` has returned, or raised."""

    def scaler_steps(self, scaler: Any, optimizer: Any) -> None:
        """`scaler.step(optimizer)` was called. If the optimizer steps, `step_begins` and `step_ends` come inside."""

    def scaler_stepped(self, scaler: Any, optimizer: Any, skipped: Any) -> None:
        """`scaler.step(optimizer)` has returned, or raised.

        `skipped`: not 0 if an overflow was found, a tensor of one element; None after an exception.
        """


_lock = threading.Lock()
_observers: list[Observer] = []
_hooks: list[Any] = []  # torch's, of the steps of all optimizers, while somebody listens


def add(observer: Observer) -> None:
    """Tell `observer` from now on."""
    with _lock:
        if not _observers:
            # torch calls these global hooks around an optimizer's own.
            _hooks.append(register_optimizer_step_pre_hook(_step_begins))
            _hooks.append(register_optimizer_step_post_hook(_step_ends))
            scaler_calls.install(tell)
        _observers.append(observer)


def remove(observer: Observer) -> None:
    """Tell `observer` no more."""
    with _lock:
        _observers.remove(observer)
        if not _observers:
            scaler_calls.uninstall()
        while _hooks and not _observers:
            _hooks.pop().remove()


def tell(what: str, *args: Any) -> None:
    """Call the method `what` of all observers."""
    failure: BaseException | None = None
    for observer in tuple(_observers):
        try:
            getattr(observer, what)(*args)
        except BaseException as error:
            failure = failure or error
    if failure is not None:
        raise failure


@not_traced
def _step_begins(optimizer: Any, *_: Any) -> None:
    tell("step_begins", optimizer)


@not_traced
def _step_ends(optimizer: Any, *_: Any) -> None:
    tell("step_ends", optimizer)
