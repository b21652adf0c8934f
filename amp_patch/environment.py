"""Opt levels from outside the code: names with rungs ("O5+split"), and environment variables that override a script.

A rung is a word after the level's name. It sets an option of `initialize` that stores masters, the optimizer's state or
activations in fewer bytes, keeps masters on the host, or sets the format of products at O6 and O7 ("O6+mxfp8").
`RUNGS` lists them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch

from amp_patch.policy import (
    LOW_PRECISION,
    OPT_LEVELS,
    PRODUCT_FORMATS,
    SPLIT,
    STOCHASTIC,
    Options,
    Policy,
    no_level,
    resolve,
)
from amp_patch.support.distributed import is_first_rank

logger = logging.getLogger("amp_patch")

LEVEL, DTYPE = "AMP_PATCH_OPT_LEVEL", "AMP_PATCH_DTYPE"
BANNED, METHODS = "AMP_PATCH_ALLOW_BANNED", "AMP_PATCH_METHODS"
KEEP_FP32, KEEP_HIGH = "AMP_PATCH_KEEP_FP32", "AMP_PATCH_KEEP_HIGH"
PER_PARAMETER = "AMP_PATCH_PER_PARAMETER"
NONE_KEPT = "()"  # AMP_PATCH_KEEP_HIGH="()" names no module; an empty value counts as not set
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in LOW_PRECISION}
_OF_EITHER_DTYPE = ("O1", "O2", "O3")

# The words that may follow a level's name after a "+": word -> (the option of `initialize` that it sets, its value).
RUNGS = {
    **{name: ("dtype", name) for name in PRODUCT_FORMATS},
    SPLIT: ("master_weights", SPLIT),
    STOCHASTIC: ("master_weights", STOCHASTIC),
    "8bit": ("optimizer_state", "8bit"),
    "act8": ("saved_activations", "8bit"),
    "offload": ("master_device", "cpu"),
}

Choice = TypeVar("Choice")


class NamedLevel(NamedTuple):
    """A level with the options that its rungs set. `str` gives its name, with the rungs in the order of `RUNGS`.

    Attributes:
        level: a key of `OPT_LEVELS`.
        options: the name of an option -> its value.
    """

    level: str
    options: dict[str, Any]

    def __str__(self) -> str:
        rungs = [rung for rung, (option, value) in RUNGS.items() if self.options.get(option) == value]
        return "+".join([self.level, *rungs])

    def arguments(self, dtype: str | None = None) -> str:
        """Return the arguments of `initialize` as source code: 'opt_level="O5", master_weights="split"'.

        With `dtype` "bfloat16" the result also has the type: 'opt_level="O2", dtype=torch.bfloat16'.
        """
        told = [f'{name}="{value}"' for name, value in {"opt_level": self.level, **self.options}.items()]
        return ", ".join([*told, f"dtype=torch.{dtype}"] if dtype else told)

    def policy(self, dtype: torch.dtype | None = None) -> Policy:
        """Return the level's policy: in `dtype` at O1, O2 and O3, which take both types; elsewhere in the level's type.

        Raises:
            ValueError: the level does not take the rung.
        """
        wanted = dtype if self.level in _OF_EITHER_DTYPE else None
        if "dtype" in self.options and OPT_LEVELS[self.level].product_format is None:
            levels = " or ".join(level for level, policy in OPT_LEVELS.items() if policy.product_format is not None)
            raise ValueError(
                f"level {str(self)!r} cannot be: {self.options['dtype']} is a format of the products of {levels}; take "
                f"{levels.partition(' ')[0]}+{self.options['dtype']}, or {self.level} as it is"
            )
        if "master_weights" in self.options and not OPT_LEVELS[self.level].master_weights:
            why = "keeps no masters of its weights" if OPT_LEVELS[self.level].loses_updates else "has FP32 weights"
            rung = self.options["master_weights"]
            raise ValueError(
                f"level {str(self)!r} cannot be: {self.level} {why}, and +{rung} says how masters of BF16 weights "
                f"are kept; take O5+{rung}, or {self.level} as it is"
            )
        try:
            return resolve(self.level, **{"dtype": wanted, **self.options})
        except (TypeError, ValueError) as error:
            raise ValueError(f"level {str(self)!r} cannot be: {error}") from error


def named_level(name: str) -> NamedLevel:
    """Return the level that a name such as "O5" or "O5+split" means.

    Raises:
        ValueError: the name has an unknown level or rung, or two rungs that set one option.
    """
    named = _parsed(name)
    if (own := OPT_LEVELS[named.level].product_format) is not None:
        named.options.setdefault("dtype", own)
    return named


def _parsed(name: Any) -> NamedLevel:
    """Return the level and the rungs' options in `name`; unlike `named_level`, add no default format."""
    level, *rungs = name.split("+") if isinstance(name, str) else [name]
    if not isinstance(level, str) or level not in OPT_LEVELS:
        raise ValueError(f"level {no_level(level)}")
    options: dict[str, Any] = {}
    for rung in rungs:
        if rung not in RUNGS:
            raise ValueError(f"level {name!r} has {rung!r} behind its +; wanted {', '.join(RUNGS)}, as in 'O5+split'")
        option, value = RUNGS[rung]
        if option in options:
            raise ValueError(f"level {name!r} has both {options[option]} and {rung}, which set {option}; give one")
        options[option] = value
    return NamedLevel(level, options)


def without_rungs(opt_level: str, options: Options) -> tuple[str, Options]:
    """Return (level, options): the plain level of `opt_level`, and `options` plus what its rungs set.

    Raises:
        ValueError: an unknown level, a rung that the level does not take, or one that contradicts an option.
    """
    try:
        named = _parsed(opt_level)
        if named.options:
            named.policy(torch.bfloat16)  # raises if no dtype allows the rungs; `resolve` checks the dtype itself
    except ValueError as error:
        raise ValueError(f"initialize: opt_{error}") from error  # "level 'O1+split' cannot be: ..."
    for option, value in named.options.items():
        if (given := getattr(options, option)) not in (None, "None", value):
            raise ValueError(
                f"initialize: opt_level {opt_level!r} means {option}={value!r} and got {option}={given!r}; give one"
            )
    return named.level, replace(options, **named.options) if named.options else options


def name_of(policy: Policy) -> str:
    """Return the name of a policy's level, with its rungs."""
    # The weights of an FP32 model have no masters, even if the option was passed.
    masters = None if policy.cast_model_type is None else policy.master_weights
    found = {
        "dtype": policy.product_format,
        "master_weights": masters,
        **{name: getattr(policy, name) for name in ("optimizer_state", "saved_activations", "master_device")},
    }
    return str(NamedLevel(policy.opt_level, {option: value for option, value in found.items() if value is not None}))


def asked_level() -> str | None:
    """Return the level that ``AMP_PATCH_OPT_LEVEL`` names, with its rungs; None if it is not set, or empty.

    Raises:
        ValueError: the variable names no level.
    """
    named = _asked_level()
    return None if named is None else str(named)


def _asked_level() -> NamedLevel | None:
    name = os.environ.get(LEVEL, "")
    if not name:
        return None
    try:
        named = _parsed(name)
        named.policy(torch.bfloat16)  # O2's type may be the script's, which `overridden` checks
    except ValueError as error:
        raise ValueError(f"initialize: the environment variable {LEVEL}: {error}") from error
    return named


def with_asked_methods(methods: Iterable[str], models: Iterable[Any]) -> tuple[str, ...]:
    """Return `methods`, extended by the names in ``AMP_PATCH_METHODS`` ("encode,decode") that one of `models` has."""
    methods, models = tuple(methods), list(models)
    found = _names_in(METHODS, models, lambda name: any(callable(getattr(model, name, None)) for model in models))
    return (*methods, *(name for name in found if name not in methods))


def with_asked_modules(keep_fp32: Any, keep_high: Any, models: Iterable[Any]) -> tuple[Any, Any]:
    """Return (`keep_fp32`, `keep_high`) of a script, changed by the modules that the environment names.

    The modules of ``AMP_PATCH_KEEP_FP32`` ("encoder,head.norm") that one of `models` has are added. The modules of
    ``AMP_PATCH_KEEP_HIGH`` replace `keep_high` ("()": none). A name that none of `models` has is logged and not an
    error, because a script may call `initialize` for several models.
    """
    models = list(models)
    asked = _modules_in(KEEP_FP32, models)
    if asked:
        one = isinstance(keep_fp32, str | type) or callable(keep_fp32)
        keep_fp32 = [*([keep_fp32] if one else keep_fp32), *asked]
    high = _modules_in(KEEP_HIGH, models)
    return keep_fp32, high if high or os.environ.get(KEEP_HIGH) == NONE_KEPT else keep_high


def _modules_in(variable: str, models: list[Any]) -> list[str]:
    has = {name for model in models for name, _ in model.named_modules()} if os.environ.get(variable) else set()
    if variable == KEEP_FP32:
        has.add("buffers")  # a word of `keep_fp32`
    return [] if os.environ.get(variable) == NONE_KEPT else _names_in(variable, models, has.__contains__)


def _names_in(variable: str, models: list[Any], has: Callable[[str], bool]) -> list[str]:
    """Return the names in an environment variable that one of `models` has; log the others."""
    asked = [name for each in os.environ.get(variable, "").split(",") if (name := each.strip())]
    found = [name for name in asked if has(name)]
    if (missing := [name for name in asked if name not in found]) and is_first_rank():
        kinds = ", ".join(type(model).__name__ for model in models)
        logger.info("amp_patch: %s names %s, which %s does not have", variable, ", ".join(missing), kinds)
    return found


def per_parameter_optimizers() -> dict[str, list[str]]:
    """Return {name of a class: names of its state that stays FP32}, the optimizers in ``AMP_PATCH_PER_PARAMETER``.

    "Lion,AdamWScheduleFree:z,ADOPT" names three classes; each name of state follows a colon.
    """
    asked = (entry.strip() for entry in os.environ.get(PER_PARAMETER, "").split(","))
    return {name: state for name, *state in (entry.split(":") for entry in asked if entry)}


def overridden(opt_level: str, options: Options) -> tuple[str, Options]:
    """Return (plain level, options) of a script after the environment's overrides.

    ``AMP_PATCH_OPT_LEVEL`` replaces the level, and its rungs ("O5+split") replace the options that they set.
    ``AMP_PATCH_DTYPE`` replaces the dtype at O1, O2 and O3 ("float16", "bfloat16") and the format at O6 and O7 ("fp8",
    "mxfp8", ...). ``AMP_PATCH_ALLOW_BANNED`` ("1", "0") replaces `allow_banned`.

    The variables are read at each call; an empty one is treated as not set. If the environment sets O0, all options of
    the script are dropped. If it sets another level than the script's, an option of the script is dropped if `resolve`
    refuses it at that level, or if it would undo the level's casts (patch_torch_functions=False at O1,
    cast_model_type=torch.float32 at O2, torch.float16 at O5). Dropped options are logged.

    Raises:
        ValueError, TypeError: a variable has an unknown value, variables contradict each other, or `resolve` refuses
            the script's options at the script's level.
    """
    asked, (opt_level, options) = opt_level, without_rungs(opt_level, options)
    named, dtype = _asked_level(), _read(DTYPE, _DTYPES | {name: name for name in PRODUCT_FORMATS})
    wanted = None if named is None else named.level
    if (banned := _read(BANNED, {"1": True, "0": False})) is not None:
        options = replace(options, allow_banned=banned)
    level = opt_level if wanted is None else wanted
    takes = _DTYPES.values() if level in _OF_EITHER_DTYPE else PRODUCT_FORMATS if _has_formats(level) else ()
    if dtype not in takes or (named is not None and "dtype" in named.options):
        dtype = None
    if wanted is None and dtype is None:
        return opt_level, options
    resolve(opt_level, options)  # raises for mistakes of the script, before the environment's
    given = options.given()
    kept: dict[str, Any] = {} if named is None else dict(named.options)
    kept.update({} if dtype is None else {"dtype": dtype})
    if level != "O0":
        for name, value in given.items():
            if name not in kept and _accepts(level, {**kept, name: value}, may_undo=level == opt_level):
                kept[name] = value
    dropped = [f"{name}={value!r}" for name, value in given.items() if kept.get(name) is not value]
    if is_first_rank() and (dropped or asked != str(named) or dtype is not None):
        logger.info(
            "amp_patch: asked for %s, by %s it is %s%s; dropped: %s",
            asked,
            " and ".join(name for name, value in {LEVEL: named, DTYPE: dtype}.items() if value is not None),
            level if named is None else named,
            "" if dtype is None else f" in {dtype}",
            ", ".join(dropped) or "nothing",
        )
    options = replace(options, **{name: getattr(Options, name) for name in given} | kept)
    try:
        resolve(level, options)
    except ValueError as error:  # the rung of AMP_PATCH_OPT_LEVEL needs BF16, and the script asks for FP16
        raise ValueError(
            f"initialize: the environment variable {LEVEL}={named}: {str(error).removeprefix('initialize: ')}; or set "
            f"{DTYPE}=bfloat16"
        ) from error
    return level, options


def _has_formats(level: str) -> bool:
    return level in OPT_LEVELS and OPT_LEVELS[level].product_format is not None


def _accepts(level: str, options: dict[str, Any], may_undo: bool) -> bool:
    """Tell whether `resolve` accepts `options` at `level`.

    If `may_undo` is False, options that change the level's casts, or the dtype of a level that has a fixed one, are not
    accepted either.
    """
    try:
        policy = resolve(level, **options)
    except (TypeError, ValueError):
        return False
    if may_undo:
        return True
    if level not in _OF_EITHER_DTYPE and policy.dtype is not OPT_LEVELS[level].dtype:
        return False
    own, unchanged = OPT_LEVELS[level], options.get("cast_model_type") is not False  # False: FP32 weights, as in Apex
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
