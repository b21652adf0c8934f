"""Calls on another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def run_in_thread(function: Callable[[], Any]) -> Any:
    """Return the result of `function`, called on a new thread."""
    box: list[Any] = []
    thread = threading.Thread(target=lambda: box.append(function()))
    thread.start()
    thread.join()
    return box[0]
