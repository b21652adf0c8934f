"""Ctrl-C in the main thread: a SIGINT that comes within a `whole` function is sent again 10 ms later.

Python may run a signal handler at the entry of any Python function, and the default handler of SIGINT raises
KeyboardInterrupt there. In a step that would leave half of the parameters stepped. At the entry of an `__exit__` it
would leave a region of casts in force. `WholeFirst` is a handler in front of the one that user code has set. It runs
that handler only if no function marked by `whole` is running. A second Ctrl-C runs it at once, because the function may
hang.

A call of a marked function costs nothing. The promise holds for SIGINT alone: for exceptions that other signals, or
other threads, raise in the main thread, only `try` and `finally` count.
"""

from __future__ import annotations

import functools
import threading
import time
from _signal import getsignal  # type: ignore[import-not-found]  # that of `signal` has a Python frame
from _thread import interrupt_main, start_new_thread
from collections.abc import Callable
from signal import SIGINT, signal
from types import CodeType, FrameType
from typing import Any, TypeVar

from amp_patch.support.patches import Installation

Function = TypeVar("Function", bound=Callable[..., Any])

DELAY = 0.01  # seconds until a signal is sent again
_is_whole: dict[CodeType, bool] = {}  # False for functions that run user code inside of whole ones
_installation = Installation()


def whole(function: Function) -> Function:
    """Decorate a function that SIGINT does not interrupt. Functions that it calls are not interrupted either."""
    _is_whole[function.__code__] = True
    return function


def interruptible(function: Function) -> Function:
    """Decorate a function that runs user code: SIGINT interrupts it, also inside of a `whole` function."""
    _is_whole[function.__code__] = False
    return function


class WholeFirst:
    """A handler of SIGINT that calls `before`, another handler, once no `whole` function is running.

    Attributes:
        is_waiting: whether a signal came within a whole function, and `before` was not called since.
        is_again: whether the next signal is one that was sent again.
    """

    def __init__(self, before: Callable[..., Any]) -> None:
        self.before = before
        self.is_waiting = self.is_again = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        is_again, self.is_again = self.is_again, False
        if is_again and not self.is_waiting:
            return  # a second Ctrl-C has called `before` already
        self.is_waiting = is_again == self.is_waiting and _is_within_whole(frame)
        if self.is_waiting:
            start_new_thread(self._send_again, ())
        else:
            self.before(number, frame)

    def _send_again(self) -> None:
        time.sleep(DELAY)
        self.is_again = True
        interrupt_main()

    def remove(self) -> None:
        """Set `before` again, unless other code has set a handler since, or this thread cannot set one."""
        if sigint_handler() is self and threading.current_thread() is threading.main_thread():
            signal(SIGINT, self.before)


def _is_within_whole(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code not in _is_whole:
        frame = frame.f_back
    return frame is not None and _is_whole[frame.f_code]


sigint_handler: Callable[[], Any] = functools.partial(getsignal, SIGINT)


def hold_sigint() -> None:
    """Set a `WholeFirst` in front of the handler of SIGINT, until `amp.restore()`.

    If the signal is ignored or ends the process, and outside of the main thread, where Python sets no handlers, this
    does nothing. Every region calls this if `sigint_handler()` is no `WholeFirst`, because a notebook sets its own
    handler in each cell.
    """
    before = sigint_handler()
    if callable(before) and threading.current_thread() is threading.main_thread():
        handler = WholeFirst(before)
        _installation.add(lambda patches: patches.apply(lambda: signal(SIGINT, handler), handler.remove))
