"""Signals that interrupt a command: Ctrl-C, SIGTERM of `timeout` and schedulers, SIGHUP of a closed terminal."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")


class Ended(KeyboardInterrupt):
    """The exception for a received signal of `_SIGNALS`.

    It is a KeyboardInterrupt, so that code which cleans up after Ctrl-C does the same after the other signals.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def status(self) -> int:
        """The exit status that a shell reports for a process ended by this signal."""
        return 128 + self.number


class Interrupts:
    """A `with` block that defers signals. Each is counted; the caller calls `check`, which raises the first one.

    A signal that is ignored (nohup), or that has a handler of other code, keeps its handler. In a thread other than the
    main one Python cannot set handlers, so there every signal keeps its handler.

    Attributes:
        count: the signals received so far.
        number: the number of the first one; 0 if none was received.
    """

    def __init__(self) -> None:
        self.count = self.number = 0
        self._raised = False
        self._taken: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is not threading.main_thread():
            return self
        for name in _SIGNALS:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                self._taken[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: Any) -> None:
        for number, before in self._taken.items():
            signal.signal(number, before)
        self._taken.clear()

    def check(self) -> None:
        """Raise the first signal received, if there is one. Later calls do not raise it again.

        Raises:
            Ended: a signal was received.
        """
        if self.number and not self._raised:
            self._raised = True
            raise Ended(self.number)

    @property
    def hurried(self) -> bool:
        """Whether a second signal was received: the caller then kills its runs, and does not wait for their end."""
        return self.count > 1

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.number = self.number or number
