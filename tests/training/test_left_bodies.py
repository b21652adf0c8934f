"""Bodies of `scale_loss` whose `__exit__` did not run, because a signal's handler raised at its entry."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from interrupts import Training, surroundings
from torch import Tensor

from amp_patch import amp
from amp_patch.training.scaled_backward import ScaledBackward

EXIT = ScaledBackward.__exit__
OPEN = "is in the body of another scale_loss already"
CASES: list[tuple[str, dict[str, Any]]] = [
    ("O1", {}),
    ("O2", {}),
    ("O4", {}),
    ("O5", {}),
    ("O5", {"master_weights": "split"}),
    ("O5", {"optimizer_state": "8bit"}),
    ("O5", {"gradient_release": True}),
]


class Timeout(Exception):
    """The exception of a handler of SIGTERM."""


@pytest.fixture(autouse=True)
def sigterm_raises() -> Iterator[None]:
    def handler(number: int, frame: Any) -> None:
        raise Timeout

    before = signal.signal(signal.SIGTERM, handler)
    yield
    signal.signal(signal.SIGTERM, before)


def terminated(function: Callable[..., Any], run: Callable[[], Any]) -> Timeout:
    """Return the exception of `run` with a SIGTERM at the entry of its first call of `function`."""

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is function.__code__:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Timeout) as caught:
        try:
            sys.setprofile(look)
            run()
        finally:
            sys.setprofile(None)
    return caught.value


def iteration(training: Training, batch: str) -> None:
    training.optimizer.zero_grad()
    training.backward(batch)
    training.optimizer.step()


def in_generator(training: Training) -> Iterator[Tensor]:
    with amp.scale_loss(training.loss("first"), training.optimizer) as scaled_loss:
        yield scaled_loss


@pytest.mark.parametrize("where", [EXIT, ScaledBackward.close], ids=lambda function: function.__name__)
@pytest.mark.parametrize(("level", "options"), CASES, ids=str)
def test_a_training_goes_on_after_a_signal_at_the_exit(level, options, where):
    training, before = Training(level, **options), surroundings()
    alone = Training(level, **options)
    for each in (training, alone):
        iteration(each, "first")
    error = terminated(where, lambda: training.backward("second"))
    if where is EXIT:
        with pytest.raises(RuntimeError, match=f"{OPEN}|has stepped"):
            training.backward("first")
    del error  # and its traceback, which keeps the body
    gc.collect()
    assert surroundings() == before
    if "gradient_release" in options:  # the backward has stepped already
        iteration(alone, "second")
    for each in (training, alone):
        iteration(each, "first")
    assert all(map(torch.equal, training.weights(), alone.weights()))


@pytest.mark.parametrize("way", ["generator", "by hand", "thread", "nested"])
def test_an_open_body_is_never_ended_by_another(way):
    """Its own backward still counts: the step is that of this body alone."""
    training, alone = Training("O2"), Training("O2")
    entered, ends = threading.Event(), threading.Event()

    def body() -> Iterator[None]:
        if way == "generator":
            steps = in_generator(training)
            next(steps).backward()
            yield
            next(steps, None)
        elif way == "by hand":
            scaling = amp.scale_loss(training.loss("first"), training.optimizer)
            (lambda: scaling.__enter__())().backward()
            assert hasattr(scaling, "__exit__")
            yield
            scaling.__exit__(None, None, None)
        elif way == "nested":
            with amp.scale_loss(training.loss("first"), training.optimizer) as scaled_loss:
                scaled_loss.backward()
                yield
        else:
            loss = training.loss("first")

            def other() -> None:
                with amp.scale_loss(loss, training.optimizer) as scaled_loss:
                    scaled_loss.backward()
                    entered.set()
                    ends.wait(10)

            thread = threading.Thread(target=other)
            thread.start()
            entered.wait(10)
            yield
            ends.set()
            thread.join()

    running = body()
    next(running)
    gc.collect()
    with pytest.raises(RuntimeError, match=OPEN):
        training.backward("second")
    with pytest.raises(RuntimeError, match="called in the body"):
        training.optimizer.step()
    next(running, None)
    alone.backward("first")
    for each in (training, alone):
        each.step()
    assert all(map(torch.equal, training.weights(), alone.weights()))


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_scaled_loss_whose_context_manager_is_freed_is_refused(level):
    """Without the error, O1 would step with scaled gradients."""
    training = Training(level)
    scaled_loss = amp.scale_loss(training.loss("first"), training.optimizer).__enter__()
    with pytest.raises(RuntimeError, match="backward of the scaled loss after its with block"):
        scaled_loss.backward()
    training.iteration("first")
