"""What `explain` found: the calls of one forward with their types, and the table that shows them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from amp_patch.policy import Policy

UNDECIDED = "none: torch's own promotion"
EMULATED = "emulated FP16"
_SHORT = {
    torch.float16: "FP16",
    torch.bfloat16: "BF16",
    torch.float32: "FP32",
    torch.float64: "FP64",
}
_WIDTH = 100

Types = tuple[torch.dtype, ...]


@dataclass(frozen=True)
class OpCall:
    """One call of a function of torch's, or of one that was registered, that takes or gives floating tensors.

    Attributes:
        module: qualified name of the module whose forward made it; "" is the model itself.
        op: where the function stands: "torch.nn.functional.linear", "torch.Tensor.__matmul__"; "cast" for what a cast
            model does with its inputs and outputs, and a `keep_fp32` module with its own.
        got: the dtypes of the tensors that were passed, in order.
        ran: the dtypes of the tensors that the function was called with, after amp's casts.
        gave: the dtypes of the tensors that came back.
        decided: why. The rule of the op lists (oplists.py): "lower", "fp32", "widest", "match_self", "banned" (allowed,
            it is fp32), with their special cases in brackets; "your register_half_function", or a sibling of it;
            "keep_fp32", "keep_batchnorm_fp32" or "buffers alone" in modules that are kept; for a "cast" the argument of
            `initialize` that wants it; else "none: torch's own promotion". "emulated FP16", alone or behind a rule: a
            CPU multiplied the FP16 values in FP32, and rounded the result.
    """

    module: str
    op: str
    got: Types
    ran: Types
    gave: Types
    decided: str


@dataclass
class Explanation:
    """What `explain` found. As a string it is a table of at most 100 columns, in which equal calls are one row.

    Attributes:
        policy: what `initialize` resolved for the model; None for a model that never went through it.
        kept: name of a module that stays FP32, with its children -> "keep_fp32" (what shares a weight with such a
            module too), "keep_batchnorm_fp32", or "buffers alone" (it has no parameters). At O1 and O4 all weights are
            FP32: no batch norm is here.
        calls: in the order in which they began. Functions that torch calls inside of one on the lists are left out.
    """

    policy: Policy | None
    kept: dict[str, str] = field(default_factory=dict)
    calls: list[OpCall] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join([*_policy_lines(self.policy), *_kept_lines(self.kept), *_table(self.calls)])


def _policy_lines(policy: Policy | None) -> list[str]:
    if policy is None:
        return ["no policy: the model never went through amp.initialize()"]
    rows = [f"  {entry.name:<22}{_short(getattr(policy, entry.name))}" for entry in fields(policy)]
    return ["policy", *rows]


def _short(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return _SHORT.get(value, str(value).removeprefix("torch."))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _kept_lines(kept: dict[str, str]) -> list[str]:
    if not kept:
        return []
    return ["", "stay FP32", *(f"  {_cut(name or '(model)', 48)}: {why}"[:_WIDTH] for name, why in kept.items())]


def _table(calls: list[OpCall]) -> list[str]:
    if not calls:
        return ["", "no function of torch's took or gave a floating tensor"]
    header = ("module", "op", "got", "ran", "gave", "decided by", "times")
    rows = [
        (
            call.module or "(model)",
            call.op.replace("torch.nn.functional.", "F.").replace("torch.Tensor.", "Tensor."),
            *map(_shorts, (call.got, call.ran, call.gave)),
            call.decided,
            str(times),
        )
        for call, times in Counter(calls).items()
    ]
    table = [header, *rows] if len(rows) < len(calls) else [row[:-1] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    room = _WIDTH - sum(widths[2:]) - 2 * (len(widths) - 1)
    widths[1] = max(min(widths[1], room - min(widths[0], room // 2)), 4)
    widths[0] = max(min(widths[0], room - widths[1]), 4)
    lines = [
        "  ".join(_cut(cell, width).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
    if any(EMULATED in call.decided for call in calls):
        lines += ["", f"{EMULATED}: multiplied in FP32 on this CPU, and each result rounded to FP16 once"]
    return ["", *lines]


def _shorts(types: Types) -> str:
    """The floating types among these, each once."""
    shorts = dict.fromkeys(_short(dtype) for dtype in types if dtype.is_floating_point)
    return ",".join(shorts) or "-"


def _cut(text: str, width: int) -> str:
    """The end of it, which says most of a qualified name."""
    return text if len(text) <= width else f"...{text[len(text) - width + 3 :]}"[:width]
