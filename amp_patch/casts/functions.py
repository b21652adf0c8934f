"""The user's own functions in the casts: decorators, and the registration of names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from amp_patch.casts.install import register, resolve_address
from amp_patch.casts.oplists import OPLISTS
from amp_patch.casts.wrappers import CastFunction, wrap


def half_function(function: Any) -> Any:
    """A decorator: the function's floating arguments are cast to the low-precision type of the acting policy.

    Takes what is called: plain functions, builtins and functions of compiled modules, bound methods, `staticmethod` and
    `classmethod` objects, `torch.autograd.Function.apply`. Tensors are found in all containers of the call; float64 and
    integer tensors are left alone, and so is a call with `out=`. While no casts act the function is called as it is.
    Inside the function torch's own functions keep to the op lists. Gradients arrive in the types of the arguments.

    Source: Apex's `amp.half_function`.

    Raises:
        TypeError: `function` cannot be called.
    """
    return _decorate(function, "user_lower", half_function)


def float_function(function: Any) -> Any:
    """As `half_function`, but FP16 and BF16 arguments are cast to FP32."""
    return _decorate(function, "user_fp32", float_function)


def bfloat16_function(function: Any) -> Any:
    """As `half_function`, but arguments are cast to bfloat16, whatever the type of the policy. Source: ROCm's Apex."""
    return _decorate(function, "user_bfloat16", bfloat16_function)


def promote_function(function: Any) -> Any:
    """As `half_function`, but floating arguments are cast to the widest floating type among them."""
    return _decorate(function, "user_widest", promote_function)


def _decorate(function: Any, rule: str, decorator: Callable[[Any], Any]) -> Any:
    if isinstance(function, (staticmethod, classmethod)) and not isinstance(function, CastFunction):
        return type(function)(_decorate(function.__func__, rule, decorator))
    if not callable(function):
        raise TypeError(f"{decorator.__name__}: wanted a function, got {function!r} of type {type(function).__name__}")
    return wrap(function, rule, (decorator, (function,)))


def register_half_function(module: Any, name: str) -> None:
    """From now on `module.name` casts its arguments as `half_function` does, wherever it is called through `module`.

    `module` is a module or a class. The rule takes the place of the op lists' rule for the same name, and of an earlier
    registration. Callable before `initialize` (it acts from then on) and after; it outlives `uninstall`. A caller that
    has imported the function itself (`from module import name`) does not see it.

    Source: Apex's `amp.register_half_function`.

    Raises:
        ValueError: `module` has no such name.
        TypeError: what is there cannot be called.
    """
    register(module, name, _half_rule(module, name), "register_half_function")


def register_float_function(module: Any, name: str) -> None:
    """As `register_half_function`, with the rule of `float_function`."""
    register(module, name, "user_fp32", "register_float_function")


def register_bfloat16_function(module: Any, name: str) -> None:
    """As `register_half_function`, with the rule of `bfloat16_function`."""
    register(module, name, "user_bfloat16", "register_bfloat16_function")


def register_promote_function(module: Any, name: str) -> None:
    """As `register_half_function`, with the rule of `promote_function`."""
    register(module, name, "user_widest", "register_promote_function")


def register_without_rule(module: Any, name: str) -> None:
    """As `register_half_function`, with no rule: calls of `module.name` are not cast, and nothing is refused."""
    register(module, name, "none", "register_without_rule")


def _half_rule(module: Any, name: str) -> str:
    """The rule for `module.name`: the op lists' own if that also emulates FP16 on a CPU, else "user_lower".

    "user_lower" would cast the arguments alone, and leave the CPU to multiply in FP16.
    """
    for address, rules in OPLISTS.items():
        for rule in ("lower", "einsum", "rnn", "emulated"):
            if name in rules.get(rule, ()) and resolve_address(address) is module:
                return "lower" if rule == "emulated" else rule
    return "user_lower"
