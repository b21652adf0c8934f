"""What ends a command before its end: Ctrl-C, and the signals of `timeout`, schedulers and terminals that close."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")


class Ended(KeyboardInterrupt):
    """One of the signals has come; a KeyboardInterrupt, so that what Ctrl-C leaves in order stays so."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def status(self) -> int:
        """The exit status of a process that the signal ends, as a shell has it."""
        return 128 + self.number


class Interrupts:
    """In its `with` block these signals are noted, and raised where `check` is called: nothing is left half done.

    Signals that are ignored (nohup) or somebody else's stay so. So does all outside of the main thread, where Ctrl-C
    goes to the other one.

    Attributes:
        count: how many have come.
        number: the first one's; 0 before.
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
        """
        Raises:
            Ended: once, if one of the signals has come.
        """
        if self.number and not self._raised:
            self._raised = True
            raise Ended(self.number)

    @property
    def hurried(self) -> bool:
        """Whether another one has come behind the first: what still ends by itself is not waited for."""
        return self.count > 1

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.number = self.number or number
