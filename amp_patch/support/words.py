"""Words of error texts: classes with their article, names that are similar to a wrong one."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any


def of_class(value: object) -> str:
    """Return the name of the class of `value` with its article: "an int", "a Linear", "an SGD"."""
    name = type(value).__name__
    spelled = name.isupper() and name[0] in "FHLMNRSX"  # spoken letter by letter
    return f"{'an' if spelled or name[0] in 'AEIOaeio' else 'a'} {name}"


def did_you_mean(wrong: str, names: Iterable[str]) -> str:
    """Return "; did you mean 'this' or 'that'?" with the `names` that are similar to `wrong`; "" if none is."""
    near = difflib.get_close_matches(wrong, names)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def names_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate `function`: the error of a keyword that it does not have names the arguments that are similar."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs.keys() - known.keys():
            raise TypeError(f"{function.__name__}: there is no argument {name!r}{did_you_mean(name, known)}")
        return function(*args, **kwargs)

    return call
