"""Functions that ask the class of what they are given, where torch's do not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def asks_first(function: Callable[..., Any], kind: type, prepare: Callable[[list[Any]], list[Any]]) -> Any:
    """`function`, which calls `prepare([data])` if its first argument is of this kind, and holds the result meanwhile.

    Dynamo reads this file, as it does not that of a master: `torch.tensor` in compiled code goes through here.
    """

    @functools.wraps(function)
    def asking(*args: Any, **kwargs: Any) -> Any:
        data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
        if not isinstance(data, kind):
            return function(*args, **kwargs)
        held = prepare([data])
        try:
            return function(*args, **kwargs)
        finally:
            held.clear()  # a traceback that keeps this frame would keep the object alive

    return asking
