"""What another thread sees."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def run_in_thread(function: Callable[[], Any]) -> Any:
    """What `function` returns in a thread of its own."""
    box: list[Any] = []
    thread = threading.Thread(target=lambda: box.append(function()))
    thread.start()
    thread.join()
    return box[0]
