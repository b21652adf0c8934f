"""Ctrl-C while a function runs that it must not interrupt."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from amp_patch import amp
from amp_patch.casts import regions
from amp_patch.support import interrupts
from amp_patch.support.interrupts import WholeFirst, hold_sigint, interruptible, whole


@pytest.fixture(autouse=True)
def handler_fixture() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    amp.restore()
    signal.signal(signal.SIGINT, before)


def ctrl_c(times: int = 1) -> None:
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.002)


def wait(seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.001)


done: list[str] = []


@whole
def inner(times: int) -> None:
    ctrl_c(times)
    wait(0.05)
    done.append("inner")


@whole
def outer(times: int = 1) -> None:
    inner(times)
    wait(0.05)
    done.append("outer")


def test_ctrl_c_waits_for_the_end_of_the_outermost_whole_function():
    hold_sigint()
    done.clear()
    with pytest.raises(KeyboardInterrupt):
        outer()
        wait()
    assert done == ["inner", "outer"]
    wait(0.03)  # it came once


def test_a_second_ctrl_c_interrupts_at_once():
    hold_sigint()
    done.clear()
    with pytest.raises(KeyboardInterrupt):
        outer(2)
    assert done == []
    wait(0.03)  # the first does not come again


def test_user_code_in_a_whole_function_is_interrupted():
    @interruptible
    def closure() -> None:
        ctrl_c()
        wait()

    @whole
    def step() -> None:
        closure()

    hold_sigint()
    with pytest.raises(KeyboardInterrupt):
        step()


def test_a_handler_of_user_code_is_called_afterwards_and_is_back_after_restore():
    calls: list[int] = []

    def handler(number: int, frame: Any) -> None:
        calls.append(number)
        assert frame.f_code is wait.__code__

    signal.signal(signal.SIGINT, handler)
    hold_sigint()
    done.clear()
    outer()
    assert done == ["inner", "outer"] and calls == []
    wait(0.2)
    assert calls == [signal.SIGINT]
    amp.restore()
    assert signal.getsignal(signal.SIGINT) is handler


def test_regions_take_the_place_before_a_handler_that_was_set_later():
    """As a notebook sets one in each cell."""
    for _ in range(3):
        with regions.region(None):
            found = signal.getsignal(signal.SIGINT)
            assert isinstance(found, WholeFirst) and found.before is signal.default_int_handler
        signal.signal(signal.SIGINT, signal.default_int_handler)
    amp.restore()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_restore_leaves_a_handler_that_user_code_has_set_around_ours():
    hold_sigint()
    ours = signal.getsignal(signal.SIGINT)

    def around(number: int, frame: Any) -> None:
        ours(number, frame)

    signal.signal(signal.SIGINT, around)
    hold_sigint()
    with pytest.raises(KeyboardInterrupt):
        ctrl_c()
        wait()
    amp.restore()
    assert signal.getsignal(signal.SIGINT) is around


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_an_ignored_signal_stays_ignored_and_one_that_ends_the_process_ends_it(handler):
    signal.signal(signal.SIGINT, handler)
    with regions.region(None):
        assert signal.getsignal(signal.SIGINT) is handler


def test_other_threads_set_no_handler():
    thread = threading.Thread(target=hold_sigint)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert interrupts.sigint_handler() is signal.default_int_handler
