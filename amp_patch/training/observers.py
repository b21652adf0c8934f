"""Observers of trainings: recordings are told here what happens, so that they need not patch any of it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from amp_patch.support.compiled import not_traced
from amp_patch.support.patches import Patches


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
            _tell_of_scalers()
        _observers.append(observer)


def remove(observer: Observer) -> None:
    """Tell `observer` no more."""
    with _lock:
        _observers.remove(observer)
        if not _observers:
            _patches.remove()
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


# ----------------------------------------------------------------------------------------------------------------------
# GradScalers
#
# While somebody listens, and only then, `scale`, `unscale_` and `step` of `torch.amp.GradScaler`, and of every class
# that has them from it and in a way of its own, are replaced by functions that tell of the call:
# `torch.cuda.amp.GradScaler`, those that Lightning and accelerate make, FSDP's, ours. A call inside of another is part
# of that one.


_patches = Patches()


class _Thread(threading.local):
    inside = False  # whether a call of a scaler's is running


_thread = _Thread()


def _tell_of_scalers() -> None:
    """Tell of calls until `_patches` are removed. The caller holds `_lock`."""
    tellers = {"scale": _scaling, "unscale_": _unscaling, "step": _stepping}
    for owner in _classes(torch.amp.GradScaler):
        for name, told in tellers.items():
            if name in vars(owner):
                _patches.set(owner, name, _outermost(vars(owner)[name], told))


def _classes(base: type) -> Iterator[type]:
    yield base
    each: type
    for each in base.__subclasses__():
        yield from _classes(each)


def _outermost(original: Callable[..., Any], told: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, told of by `told` unless it is part of another call, or the scaler is disabled."""

    @functools.wraps(original)
    def call(scaler: Any, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or _thread.inside or not scaler.is_enabled():
            return original(scaler, *args, **kwargs)
        _thread.inside = True
        try:
            return told(functools.partial(original, scaler), scaler, *args, **kwargs)
        finally:
            _thread.inside = False

    return call


def _scaling(original: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
    scaled = original(outputs)
    if isinstance(scaled, Tensor) and scaled is not outputs:
        tell("loss_given_to_scaler", scaler, outputs, scaled, vars(scaler)["_scale"].clone())
    return scaled


def _unscaling(original: Callable[..., Any], scaler: Any, optimizer: Any) -> Any:
    tell("scaler_unscales", scaler, optimizer)
    try:
        return original(optimizer)
    finally:
        tell("scaler_unscaled", scaler, optimizer)


def _stepping(original: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    skipped: Tensor | None = None
    tell("scaler_steps", scaler, optimizer)
    try:
        result = original(optimizer, *args, **kwargs)
        found = [*scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()]
        nothing = torch.zeros((), dtype=torch.float32, device="cpu")
        skipped = sum((each.to(found[0].device) for each in found[1:]), found[0].clone()) if found else nothing
        return result
    finally:
        tell("scaler_stepped", scaler, optimizer, skipped)
