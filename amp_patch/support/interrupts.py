"""Ctrl-C in the main thread: a SIGINT that comes within a `whole` function is sent again 10 ms later.

Python may run a signal handler at the entry of any Python function, and the default handler of SIGINT raises
KeyboardInterrupt there. In a step that would leave half of the parameters stepped. At the entry of an `__exit__` it
would leave a region of casts in force. `WholeFirst` is a handler in front of the handler that user code has set. It
calls the user's handler only if no function marked by `whole` is running. A second Ctrl-C calls the user's handler at
once, because the marked function may hang.

A mark adds no time to a call. Only SIGINT is held back. If another signal or another thread raises an exception in the
main thread, a marked function is left at that line, and only its `try` and `finally` blocks clean up. (A body of
`scale_loss` whose exit was skipped ends when Python frees it.)
"""

from __future__ import annotations

import functools
import signal
import threading
import time
from _signal import getsignal  # type: ignore[import-not-found]  # that of `signal` has a Python frame
from _thread import interrupt_main, start_new_thread
from collections.abc import Callable
from signal import SIGINT
from signal import signal as set_handler
from types import CodeType, FrameType
from typing import Any, TypeVar, cast

from amp_patch.support.patches import Installation, Patches

Function = TypeVar("Function", bound=Callable[..., Any])

DELAY = 0.01  # seconds until a signal is sent again
_is_whole: dict[CodeType, bool] = {}  # True: marked by `whole`; False: by `interruptible`
_installation = Installation()


def whole(function: Function) -> Function:
    """Mark a function that SIGINT must not interrupt, nor the functions that it calls, except `interruptible` ones."""
    _is_whole[function.__code__] = True
    return function


def interruptible(function: Function) -> Function:
    """Mark a function that runs user code: SIGINT interrupts it even if a `whole` function has called it."""
    _is_whole[function.__code__] = False
    return function


class WholeFirst:
    """A handler of SIGINT that calls the handler `before` it as soon as no `whole` function is running.

    Attributes:
        before: the handler that was set when this one was made.
        is_waiting: whether a signal came within a whole function, and `before` was not called since.
        is_again: whether the next signal is the one that `_send_again` sends, and not a new Ctrl-C.
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


def _is_within_whole(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code not in _is_whole:
        frame = frame.f_back
    return frame is not None and _is_whole[frame.f_code]


sigint_handler: Callable[[], Any] = functools.partial(getsignal, SIGINT)


def hold_sigint() -> None:
    """Set a `WholeFirst` in front of the present handler of SIGINT, if that is not one; `amp.restore()` removes it.

    Until then `signal.getsignal` and `signal.signal` return the handler behind it, as if it were not there. Without
    this, `asyncio.run` would find a handler that is not Python's own, and Ctrl-C would not cancel its task.

    Does nothing if SIGINT has no handler in Python (it is ignored, or ends the process), or outside of the main thread,
    where Python cannot set one. Every region calls this if `sigint_handler()` is no `WholeFirst`, because a notebook
    sets its own handler in each cell.
    """
    before = sigint_handler()
    if callable(before) and type(before) is not WholeFirst and threading.current_thread() is threading.main_thread():
        _installation.install(_hide)
        set_handler(SIGINT, WholeFirst(before))


def _hide(patches: Patches) -> None:
    for function in signal.getsignal, signal.signal:
        patches.set(signal, function.__name__, _without_ours(function))
    patches.on_remove(_remove)


def _without_ours(function: Function) -> Function:
    @functools.wraps(function)
    def behind(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        return found.before if type(found) is WholeFirst else found

    return cast(Function, behind)


def _remove() -> None:
    """Set the handler behind ours again, unless user code has set another. Only the main thread can set handlers."""
    found = sigint_handler()
    if type(found) is WholeFirst and threading.current_thread() is threading.main_thread():
        set_handler(SIGINT, found.before)
