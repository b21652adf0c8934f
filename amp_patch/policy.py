"""Policies of opt levels: one frozen value per level, and the overrides that a caller may pass.

To add a level, follow "How to add" of docs/architecture.md.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import torch

LOW_PRECISION = (torch.float16, torch.bfloat16)
# Arguments of `initialize` that are strings. Command lines pass booleans as words.
OptLevel = Literal["O0", "O1", "O2", "O3", "O4", "O5", "O6", "O7"]
LowName = Literal["float16", "bfloat16"]
ProductFormat = Literal["fp8", "fp8_tensorwise", "mxfp8", "mxfp8_floor", "nvfp4", "nvfp4_naive"]
CpuHalf = Literal["auto", "emulate", "native"]
Closed = Literal["split", "stochastic"]
State = Literal["8bit"]
Flag = bool | Literal["True", "False"]
CPU_HALF = get_args(CpuHalf)
PRODUCT_FORMATS: tuple[str, ...] = get_args(ProductFormat)  # described in `FORMATS` of casts/formats.py
EMULATING = ("emulate", "convolutions")  # values of `cpu_half` that emulate on a CPU
SPLIT, STOCHASTIC = "split", "stochastic"  # values of master_weights
# Option -> its one value, and the levels that take it.
_TAKEN_AT = {"saved_activations": ("8bit", ("O1", "O2", "O4", "O5")), "master_device": ("cpu", ("O2", "O5"))}
CLOSED = (SPLIT, STOCHASTIC)  # masters without FP32 memory

# A scale and its FP32 inverse must both be normal numbers: gradients are multiplied by the inverse.
_SMALLEST_SCALE, _LARGEST_SCALE = 2.0**-126, 2.0**126


@dataclass(frozen=True)
class Policy:
    """All that `initialize` decides for one training, as a value.

    Attributes:
        opt_level: the name that the user chose, "O0" to "O7".
        dtype: the low-precision type, float16 or bfloat16. Unused at O0.
        cast_model_type: dtype of the model's weights and inputs; None leaves them FP32.
        patch_torch_functions: whether torch's functions cast their arguments, by the op lists (O1, O4).
        keep_batchnorm_fp32: whether batch norms stay FP32 in a cast model; None if the model is not cast.
        master_weights: whether the optimizer updates FP32 copies of low-precision weights. "split" stores only the half
            of each copy that the bfloat16 weight does not hold, "stochastic" stores no copy. None if the model is not
            cast. master_device: "cpu" keeps these copies, and the optimizer's state, in the host's memory.
        loss_scale: "dynamic", or a positive static scale.
        cast_model_outputs: dtype for floating outputs of the model. None: FP32 if the model is cast, else unchanged.
        min_loss_scale, max_loss_scale: the range of a dynamic scale.
        init_scale, growth_factor, backoff_factor, growth_interval: of a dynamic scale; see `LossScaler`.
        allow_banned: whether functions without a safe low-precision form run in FP32 instead of being refused.
        cpu_half: how FP16 and BF16 tensors on a CPU are multiplied (casts/cpu_half.py): "native", "emulate", or one of
            the results of `decide_cpu_half`; "auto" until that has decided.
        op_lists: the lists whose rules the patched functions follow: "torch" or "apex" (oplists.py).
        skip_nonfinite: whether steps with non-finite gradients are skipped even if no loss is scaled.
        low_precision_norms: whether layer, RMS and group norms under patched functions return their low input's type.
        product_format: the format that the operands of products are rounded to, from `PRODUCT_FORMATS`
            (casts/low_bit.py); None for none.
        optimizer_state, saved_activations: "8bit" quantizes FP32 state, and what autograd saves; None leaves it.
        keep_buffers_fp32: whether the buffers of a cast model stay FP32.
        mixes_types: whether calls in a cast model that get FP32 and low precision are cast as at O1.
    """

    opt_level: str
    dtype: torch.dtype = torch.float16
    cast_model_type: torch.dtype | None = None
    patch_torch_functions: bool = False
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | str | None = None
    loss_scale: float | str = 1.0
    cast_model_outputs: torch.dtype | None = None
    min_loss_scale: float = 2.0**-24  # the inverse of the default cap
    max_loss_scale: float = 2.0**24
    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    allow_banned: bool = False
    cpu_half: str = "auto"
    op_lists: str = "torch"
    skip_nonfinite: bool = False
    low_precision_norms: bool = False
    product_format: str | None = None
    optimizer_state: str | None = None
    saved_activations: str | None = None
    master_device: str | None = None
    keep_buffers_fp32: bool = False
    mixes_types: bool = False

    def __str__(self) -> str:
        fields = ("cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights", "loss_scale")
        more = ["cpu_half"] * self.makes_low_tensors
        told = ("skip_nonfinite", "low_precision_norms", "optimizer_state", *_TAKEN_AT, "product_format")
        more += [name for name in told if getattr(self, name)]
        described = ", ".join(f"{name}={getattr(self, name)}" for name in (*fields, *more))
        return f"{self.opt_level} ({self.dtype}): {described}"

    @property
    def makes_low_tensors(self) -> bool:
        """True if this training casts the model, or arguments of torch's functions, to `dtype`."""
        return self.cast_model_type is not None or self.patch_torch_functions

    @property
    def casts_calls(self) -> bool:
        """True if calls of torch's functions are cast: of all functions on the op lists, or only of products."""
        return self.patch_torch_functions or self.product_format is not None

    @property
    def closes_masters(self) -> bool:
        """True if masters are stored in compressed form, split or stochastic, without FP32 memory."""
        return self.master_weights in CLOSED

    @property
    def keeps_fp32_weights(self) -> bool:
        """True if memory holds an FP32 value of each weight: the weight itself, or a master."""
        return self.cast_model_type is None or (bool(self.master_weights) and self.master_weights != STOCHASTIC)

    @property
    def loses_updates(self) -> bool:
        """True if steps are rounded to nearest into low-precision weights, so that small updates change nothing."""
        return self.cast_model_type is not None and not self.master_weights

    @property
    def emulated(self) -> torch.dtype | None:
        """The low-precision type whose products are emulated on a CPU, in FP32 with rounding; None: no type."""
        return self.dtype if self.cpu_half in EMULATING else None

    @property
    def changes_nothing(self) -> bool:
        """True if the training is the script without amp_patch: O0 without another option."""
        casts = self.patch_torch_functions or self.cast_model_type or self.cast_model_outputs
        return not (casts or self.checks_gradients or self.optimizer_state is not None)

    @property
    def checks_gradients(self) -> bool:
        """True if steps with non-finite gradients are skipped: if the loss is scaled, or with `skip_nonfinite`."""
        return self.loss_scale != 1.0 or self.skip_nonfinite


_O1 = Policy("O1", patch_torch_functions=True, loss_scale="dynamic")
_O2 = Policy("O2", cast_model_type=torch.float16, keep_batchnorm_fp32=True, master_weights=True, loss_scale="dynamic")
# A new level is an entry here. The other places that it concerns are in docs/architecture.md, "A level".
OPT_LEVELS: dict[str, Policy] = {
    "O0": Policy("O0"),
    "O1": _O1,
    "O2": _O2,
    "O3": Policy("O3", cast_model_type=torch.float16, keep_batchnorm_fp32=False, master_weights=False),
    "O4": replace(_O1, opt_level="O4", dtype=torch.bfloat16, loss_scale=1.0),
    "O5": replace(_O2, opt_level="O5", dtype=torch.bfloat16, cast_model_type=torch.bfloat16, loss_scale=1.0),
}
# The 16-bit levels with products of fewer bits.
OPT_LEVELS |= {
    level: replace(OPT_LEVELS[base], opt_level=level, product_format=PRODUCT_FORMATS[0])
    for level, base in (("O6", "O4"), ("O7", "O5"))
}

# Other words for a level, for the hint in an error. A type -> the levels of that type that keep FP32 weights; a format
# of products -> the levels with such products.
_LEVELS_MEANT: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("fp32", "float32"), ("O0",)),
    **dict.fromkeys(("fp16", "float16", "half", "16"), ("O1", "O2")),
    **dict.fromkeys(("bf16", "bfloat16"), ("O4", "O5")),
    **dict.fromkeys(PRODUCT_FORMATS, ("O6", "O7")),
}

_OF_ANY_LEVEL = ("min_loss_scale", "max_loss_scale", "allow_banned", "cpu_half")  # options that every level accepts


@dataclass(frozen=True)
class Options:
    """A caller's overrides of a level, unchecked; `initialize` documents each. None: the level's own value.

    Booleans may be the strings "True" and "False", and the loss scale a number in a string, as argparse gives them.
    """

    dtype: torch.dtype | str | None = None  # the first field: environment.py checks the other options with it
    cast_model_type: torch.dtype | str | bool | None = None  # False means None, as in Apex
    patch_torch_functions: bool | str | None = None
    keep_batchnorm_fp32: bool | str | None = None
    master_weights: bool | str | None = None
    loss_scale: float | str | None = None
    cast_model_outputs: torch.dtype | None = None
    skip_nonfinite: bool | str | None = None
    low_precision_norms: bool | str | None = None
    optimizer_state: str | None = None
    saved_activations: str | None = None
    master_device: str | None = None
    fp32_state: bool = False  # whether the caller names parameters for it
    min_loss_scale: float | None = None
    max_loss_scale: float | None = None
    allow_banned: bool | None = None
    cpu_half: str | None = None

    @classmethod
    def of(cls, given: dict[str, Any]) -> Options:
        """Return the options among `given`, {name of an argument of `initialize`: value}."""
        return cls(**{f.name: given[f.name] for f in fields(cls) if f.name in given})

    def given(self) -> dict[str, Any]:
        """Return {name: value} of the options that differ from their defaults and may contradict a level."""
        names = [f.name for f in fields(self) if f.name not in _OF_ANY_LEVEL]
        return {name: value for name in names if (value := getattr(self, name)) is not getattr(Options, name)}


def resolve(opt_level: str = "O1", options: Options | None = None, **overrides: Any) -> Policy:
    """Return the policy of a level with a caller's `options`, or with `overrides` as their fields.

    Raises:
        ValueError: an unknown level or value, or overrides that contradict the level or each other.
        TypeError: a value of the wrong kind.
    """
    given = Options(**overrides) if options is None else replace(options, **overrides)
    policy = _level(opt_level)
    low = None
    if policy.product_format is not None:
        policy = _with_product_format(policy, given.dtype)
    elif (low := _low_precision("dtype", given.dtype)) is not None:
        if policy.opt_level in ("O4", "O5") and low is not torch.bfloat16:
            partner = {"O4": "O1", "O5": "O2"}[policy.opt_level]
            raise ValueError(
                f"initialize: opt_level {opt_level!r} is {partner} with dtype=torch.bfloat16 and got dtype={low}; "
                f"use opt_level={partner!r} with dtype={low}"
            )
        policy = _with_dtype(policy, low)

    policy = _cast_model_type(policy, given.cast_model_type, explicit_dtype=low)
    policy = _with_patching(policy, opt_level, boolean("patch_torch_functions", given.patch_torch_functions))
    keep = boolean("keep_batchnorm_fp32", given.keep_batchnorm_fp32)
    masters: Any = given.master_weights
    masters = masters if masters in CLOSED else boolean("master_weights", masters, f"{SPLIT!r}, {STOCHASTIC!r}, ")
    _refuse_where_weights_stay_fp32(policy, opt_level, keep, masters)
    if keep is not None:
        policy = replace(policy, keep_batchnorm_fp32=keep)
    if masters is not None:
        policy = _with_masters(policy, masters)

    if given.loss_scale is not None:
        policy = replace(policy, loss_scale=parse_loss_scale(given.loss_scale))
    if (outputs := given.cast_model_outputs) is not None:
        if not isinstance(outputs, torch.dtype) or not outputs.is_floating_point:
            raise TypeError(
                f"initialize: cast_model_outputs is {outputs!r}, not a floating dtype such as torch.float32"
            )
        policy = replace(policy, cast_model_outputs=outputs)
    if given.cpu_half not in (None, *CPU_HALF):
        raise ValueError(f"initialize: cpu_half is {given.cpu_half!r}; wanted {' or '.join(map(repr, CPU_HALF))}")
    policy = _with_scale_range(policy, given.min_loss_scale, given.max_loss_scale)
    if (norms := boolean("low_precision_norms", given.low_precision_norms)) is not None:
        policy = _with_low_precision_norms(policy, opt_level) if norms else replace(policy, low_precision_norms=False)
    state = policy.optimizer_state if given.optimizer_state is None else given.optimizer_state
    policy = _with_optimizer_state(policy, opt_level, state)
    for name in _TAKEN_AT:
        policy = _with_choice(policy, opt_level, name, getattr(given, name) or getattr(policy, name))
    if given.fp32_state and policy.optimizer_state is None:
        raise ValueError(
            "initialize: fp32_state names parameters whose optimizer state is to stay FP32, and optimizer_state is "
            "None, with which all state is FP32; add optimizer_state='8bit', or leave fp32_state out"
        )
    banned = None if given.allow_banned is None else bool(given.allow_banned)
    skips = boolean("skip_nonfinite", given.skip_nonfinite)
    rest: dict[str, Any] = {"cpu_half": given.cpu_half, "skip_nonfinite": skips, "allow_banned": banned}
    return replace(policy, **{name: value for name, value in rest.items() if value is not None})


def parse_loss_scale(loss_scale: Any) -> float | str:
    """Return `"dynamic"`, or a positive number whose inverse FP32 can hold; the number may be in a string.

    Raises:
        ValueError: another value.
    """
    if isinstance(loss_scale, str) and loss_scale == "dynamic":
        return loss_scale
    return scale_number("initialize: loss_scale", loss_scale, or_else='"dynamic" or ')


def scale_number(name: str, value: Any, or_else: str = "") -> float:
    """Return `value` as a positive number whose inverse FP32 can hold.

    Raises:
        ValueError: another value. The message begins with `name`.
    """
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not _SMALLEST_SCALE <= number <= _LARGEST_SCALE:
        raise ValueError(
            f"{name} is {value!r}; wanted {or_else}a number between 2**-126 and 2**126 "
            "(the scale and its inverse must be positive and finite in FP32)"
        )
    return number


def _level(opt_level: Any) -> Policy:
    if isinstance(opt_level, str) and opt_level in OPT_LEVELS:
        return OPT_LEVELS[opt_level]
    raise ValueError(f"initialize: opt_level {no_level(opt_level)}")


def no_level(given: Any) -> str:
    """Return an error text: `given` is no level. Other spellings ("o2", "fp16", "bf16-mixed") get a hint."""
    word = str(given).strip().lower().removeprefix("torch.").removesuffix("-mixed")
    meant = (f"O{word[-1]}",) if re.fullmatch("[o0]?[0-7]", word) else _LEVELS_MEANT.get(word, ())
    hint = f"; did you mean {' or '.join(map(repr, meant))}?" if meant else ""
    return f"{given!r} is none of {', '.join(OPT_LEVELS)} (the letter O, not zero){hint}"


def _low_precision(name: str, value: Any) -> torch.dtype | None:
    """Return the low-precision type that `value` is or names ("bfloat16", as on a command line); else raise."""
    if isinstance(value, str):
        value = {str(dtype).removeprefix("torch."): dtype for dtype in LOW_PRECISION}.get(value, value)
    if value is not None and value not in LOW_PRECISION:
        formats = str(value) in PRODUCT_FORMATS or str(value).startswith(("torch.float8", "torch.float4"))
        levels = " and ".join(level for level, policy in OPT_LEVELS.items() if policy.product_format is not None)
        hint = f"; formats of products ({', '.join(PRODUCT_FORMATS)}) are for {levels}" if formats else ""
        raise ValueError(f"initialize: {name} is {value!r}; wanted {' or '.join(map(str, LOW_PRECISION))}{hint}")
    return value


def _with_product_format(policy: Policy, wanted: Any) -> Policy:
    if wanted is None:
        return policy
    if wanted not in PRODUCT_FORMATS:
        raise ValueError(
            f"initialize: dtype is {wanted!r} at opt_level {policy.opt_level!r}; wanted the format of its products, "
            f"{' or '.join(map(repr, PRODUCT_FORMATS))}; all else is torch.bfloat16 there"
        )
    return replace(policy, product_format=wanted)


def _with_dtype(policy: Policy, dtype: torch.dtype) -> Policy:
    cast = dtype if policy.cast_model_type is not None else None
    scale = 1.0 if dtype is torch.bfloat16 else policy.loss_scale  # BF16 has FP32's range: gradients do not underflow
    return replace(policy, dtype=dtype, cast_model_type=cast, loss_scale=scale)


def _cast_model_type(policy: Policy, wanted: Any, explicit_dtype: torch.dtype | None) -> Policy:
    if wanted is None or wanted is False:
        return policy
    if wanted is torch.float32:
        # The script says explicitly that the weights stay FP32. Then they need no masters either.
        return replace(policy, cast_model_type=None, keep_batchnorm_fp32=None, master_weights=None)
    wanted = _low_precision("cast_model_type", wanted)
    if policy.cast_model_type is None:
        around = "which casts around torch's functions and leaves the weights in FP32"
        raise ValueError(
            f"initialize: cast_model_type={wanted} contradicts opt_level {policy.opt_level!r}, "
            f"{around if policy.patch_torch_functions else 'the FP32 baseline'}; cast it by opt_level='O2' or 'O3'"
        )
    if explicit_dtype is not None and explicit_dtype is not wanted:
        raise ValueError(f"initialize: cast_model_type={wanted} contradicts dtype={explicit_dtype}")
    return _with_dtype(policy, wanted)


def _with_patching(policy: Policy, opt_level: str, patch: bool | None) -> Policy:
    if patch and not policy.patch_torch_functions:
        raise ValueError(
            f"initialize: patch_torch_functions=True contradicts opt_level {opt_level!r}, whose model runs in one "
            "type already; choose opt_level='O1' to patch torch's functions"
        )
    return replace(policy, patch_torch_functions=False) if patch is False else policy


def _with_scale_range(policy: Policy, smallest: float | None, largest: float | None) -> Policy:
    high = policy.max_loss_scale if largest is None else scale_number("initialize: max_loss_scale", largest)
    low = min(policy.min_loss_scale, high) if smallest is None else scale_number("initialize: min_loss_scale", smallest)
    if low > high:
        raise ValueError(f"initialize: min_loss_scale {low:g} is above max_loss_scale {high:g}")
    return replace(policy, min_loss_scale=low, max_loss_scale=high)


def _with_masters(policy: Policy, masters: bool | str) -> Policy:
    if masters in CLOSED and policy.cast_model_type is torch.float16:
        why = {
            SPLIT: "a bfloat16 weight is the high half of its FP32 master, a float16 one is no part of it",
            STOCHASTIC: "a bfloat16 weight has FP32's range, a float16 one would overflow and underflow in training",
        }[str(masters)]
        raise ValueError(
            f"initialize: master_weights={masters!r} contradicts float16 weights, the type of opt_level "
            f"{policy.opt_level!r} here: {why}; use opt_level='O5' (or dtype=torch.bfloat16), or leave master_weights "
            "at None"
        )
    return replace(policy, master_weights=masters)


def _with_optimizer_state(policy: Policy, opt_level: str, state: Any) -> Policy:
    if state not in (None, *get_args(State)):
        raise ValueError(f"initialize: optimizer_state is {state!r}; wanted '8bit' or None")
    if state is not None and policy.cast_model_type is not None and not policy.master_weights:
        raise ValueError(
            f"initialize: optimizer_state={state!r} contradicts opt_level {opt_level!r} without masters, whose "
            f"state is {policy.cast_model_type}, not FP32; use opt_level='O5' with "
            "master_weights='stochastic', which has no masters in memory either"
        )
    return replace(policy, optimizer_state=state)


def _with_choice(policy: Policy, level: str, name: str, value: Any) -> Policy:
    taken, levels = _TAKEN_AT[name]
    if value not in (None, taken) or (value and policy.opt_level not in levels):
        at = f"{', '.join(levels[:-1])} or {levels[-1]}"
        raise ValueError(f"initialize: {name} is {value!r} at opt_level {level!r}; wanted None, or {taken!r} at {at}")
    return replace(policy, **{name: value})


def _with_low_precision_norms(policy: Policy, opt_level: str) -> Policy:
    if policy.patch_torch_functions:
        return replace(policy, low_precision_norms=True)
    if policy.cast_model_type is not None:
        why = f"whose model is cast, so that its norms return {policy.cast_model_type} without it"
    elif OPT_LEVELS[opt_level].patch_torch_functions:
        why = "with patch_torch_functions=False, under which the norms are as in FP32"
    else:
        why = "whose whole model is FP32"
    raise ValueError(
        f"initialize: low_precision_norms=True contradicts opt_level {opt_level!r}, {why}; leave it at False, or use "
        "opt_level='O1' or 'O4', where norms give FP32 without it"
    )


def _refuse_where_weights_stay_fp32(
    policy: Policy, opt_level: str, keep: bool | None, masters: bool | str | None
) -> None:
    # On an FP32 model Apex accepts and ignores both options; only at O1 they are an error.
    if policy.cast_model_type is not None or not policy.patch_torch_functions:
        return
    norms = "batch norms have FP32 weights and statistics there, and their input's type"
    weights = "the model's weights are FP32 there and are the masters themselves"
    for name, value, why in (("keep_batchnorm_fp32", keep, norms), ("master_weights", masters, weights)):
        if value is not None:
            raise ValueError(
                f"initialize: {name}={value} contradicts opt_level {opt_level!r}: {why}; leave {name} at None"
            )


def boolean(name: str, value: Any, or_else: str = "") -> bool | None:
    """Return `value` if it is True, False or None; if it is one of these words as a string, return what the word means.

    Raises:
        TypeError: another value. The message has the argument's `name`, and `or_else`, further values that it takes.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str) and value in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[value]
    raise TypeError(
        f"initialize: {name} is {value!r}; wanted {or_else}True, False, None or one of these words as a string"
    )
