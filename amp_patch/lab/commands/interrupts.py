"""What ends a command before its end: Ctrl-C, and the signals of `timeout`, schedulers and terminals that close."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = ("SIGTERM", "SIGHUP")


class Ended(KeyboardInterrupt):
    """One of the signals has come; a KeyboardInterrupt, so that what Ctrl-C leaves in order stays so."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def as_interrupts() -> Iterator[None]:
    """In the body these signals raise `Ended`, save those that are ignored (nohup) or somebody else's."""
    mine = threading.current_thread() is threading.main_thread()
    numbers = [getattr(signal, name) for name in _SIGNALS if mine and hasattr(signal, name)]
    taken = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in taken:
            signal.signal(number, _end)
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _end(number: int, frame: FrameType | None) -> None:
    raise Ended(number)


def status_of(interrupt: KeyboardInterrupt) -> int:
    """The exit status of a process that it ends, as a shell has it."""
    return 128 + (interrupt.number if isinstance(interrupt, Ended) else signal.SIGINT)
