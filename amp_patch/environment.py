"""An opt level from outside: the environment variables that override what a script passes to `initialize`."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from amp_patch.policy import CLOSED, LOW_PRECISION, OPT_LEVELS, Options, resolve
from amp_patch.support.distributed import is_first_rank

logger = logging.getLogger("amp_patch")

LEVEL, DTYPE, MASTERS = "AMP_PATCH_OPT_LEVEL", "AMP_PATCH_DTYPE", "AMP_PATCH_MASTER_WEIGHTS"
BANNED, METHODS = "AMP_PATCH_ALLOW_BANNED", "AMP_PATCH_METHODS"
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in LOW_PRECISION}
_OF_EITHER_DTYPE = ("O1", "O2", "O3")

Choice = TypeVar("Choice")


def asked_level() -> str | None:
    """What ``AMP_PATCH_OPT_LEVEL`` is; None where it is not set, or empty.

    Raises:
        ValueError: it names no level.
    """
    return _read(LEVEL, {level: level for level in OPT_LEVELS})


def with_asked_methods(methods: Iterable[str], models: Iterable[Any]) -> tuple[str, ...]:
    """A script's `methods`, and those that ``AMP_PATCH_METHODS`` names ("encode,decode") and one of `models` has."""
    methods, models = tuple(methods), list(models)
    names = (each.strip() for each in os.environ.get(METHODS, "").split(","))
    asked = [name for name in names if name and name not in methods]
    found = [name for name in asked if any(callable(getattr(model, name, None)) for model in models)]
    if (missing := [name for name in asked if name not in found]) and is_first_rank():
        kinds = ", ".join(type(model).__name__ for model in models)
        logger.info("amp_patch: %s names %s, which %s does not have", METHODS, ", ".join(missing), kinds)
    return (*methods, *found)


def overridden(opt_level: str, options: Options) -> tuple[str, Options]:
    """The level and the options that the environment makes of a script's; without it the very same.

    ``AMP_PATCH_OPT_LEVEL`` replaces the level, ``AMP_PATCH_DTYPE`` ("float16", "bfloat16") the dtype at O1, O2 and O3;
    ``AMP_PATCH_MASTER_WEIGHTS`` ("split", "stochastic") says how masters of bfloat16 weights are kept, at O5 and O2.
    ``AMP_PATCH_ALLOW_BANNED`` ("1", "0") says whether banned functions run in FP32, or are refused.
    All are read at each call, and an empty one is as none. At O0 by override nothing is left of the script's options.
    At a level that the script did not ask for an option is dropped if `resolve` refuses it there, or if it would undo
    the level (patch_torch_functions=False at O1, cast_model_type=torch.float32 at O2, torch.float16 at O5). What was
    dropped is logged.

    Raises:
        ValueError, TypeError: a variable that names no level or dtype; what `resolve` refuses at the script's own.
    """
    wanted, dtype = asked_level(), _read(DTYPE, _DTYPES)
    if (banned := _read(BANNED, {"1": True, "0": False})) is not None:
        options = replace(options, allow_banned=banned)
    level = opt_level if wanted is None else wanted
    if level not in _OF_EITHER_DTYPE:
        dtype = None
    masters = _read(MASTERS, {form: form for form in CLOSED})
    if wanted is None and dtype is None and masters is None:
        return opt_level, options
    resolve(opt_level, options)  # raises for mistakes of the script, before the environment's
    given = options.given()
    kept: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    if level != "O0":
        for name, value in given.items():
            if name not in kept and _accepts(level, {**kept, name: value}, undone=level == opt_level):
                kept[name] = value
    closed = {**kept, "master_weights": masters}
    if masters is None or not OPT_LEVELS[level].master_weights or not _accepts(level, closed, undone=True):
        masters = None
    else:
        kept = closed
    if wanted is None and dtype is None and masters is None:
        return opt_level, options
    by = {LEVEL: wanted, DTYPE: dtype, MASTERS: masters}
    if is_first_rank():
        dropped = [f"{name}={value!r}" for name, value in given.items() if kept.get(name) is not value]
        logger.info(
            "amp_patch: the script asked for %s, by %s it is %s%s; dropped: %s",
            opt_level,
            " and ".join(name for name, value in by.items() if value is not None),
            level,
            ("" if dtype is None else f" in {dtype}") + ("" if masters is None else f", masters {masters}"),
            ", ".join(dropped) or "nothing",
        )
    nothing = {name: getattr(Options, name) for name in given}
    return level, replace(options, **nothing | kept)


def _accepts(level: str, options: dict[str, Any], undone: bool) -> bool:
    """Whether the level takes the options. If they undo its own casts, only where `undone`."""
    try:
        policy = resolve(level, **options)
    except (TypeError, ValueError):
        return False
    if undone:
        return True
    if level not in _OF_EITHER_DTYPE and policy.dtype is not OPT_LEVELS[level].dtype:
        return False
    own, unchanged = OPT_LEVELS[level], options.get("cast_model_type") is not False  # Apex's word for FP32 weights
    casts_model = policy.cast_model_type is not None
    return unchanged and (policy.patch_torch_functions, casts_model) == (
        own.patch_torch_functions,
        own.cast_model_type is not None,
    )


def _read(variable: str, choices: Mapping[str, Choice]) -> Choice | None:
    value = os.environ.get(variable, "")
    if value and value not in choices:
        raise ValueError(f"initialize: the environment variable {variable} is {value!r}; wanted {', '.join(choices)}")
    return choices[value] if value else None
