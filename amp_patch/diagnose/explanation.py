"""The result of `explain`: the calls of one forward with their types, and the tables that show them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from amp_patch.diagnose.tables import Part, Printed, Table
from amp_patch.diagnose.wording import type_name
from amp_patch.policy import Policy

UNDECIDED = "none: torch's own promotion"
EMULATED = "emulated"

Types = tuple[torch.dtype, ...]


@dataclass(frozen=True)
class OpCall:
    """One call of a function of torch, or of a registered function, with floating tensors.

    Attributes:
        module: qualified name of the module whose forward made the call; "" is the model itself.
        op: the path of the function: "torch.nn.functional.linear", "torch.Tensor.__matmul__"; "cast" for the casts of
            inputs and outputs, by a cast model or a `keep_fp32` module.
        got: the dtypes of the tensors passed, in order.
        ran: the dtypes of the tensors that the function received, after amp's casts.
        gave: the dtypes of the tensors returned.
        decided: the reason for the types:
            - the rule of the op lists (oplists.py): "lower", "fp32", "widest", "match_self", or "banned", which is FP32
              if allowed; special cases in brackets;
            - "low_precision_norms": a norm returns its input's type, by that option;
            - "your register_half_function" and the like;
            - "keep_fp32", "keep_batchnorm_fp32", "buffers alone": the module stays FP32;
            - "cast_model_type", "cast_model_outputs": the argument of `initialize` behind a "cast";
            - "none: torch's own promotion": nothing else.
            "emulated FP16", alone or after a rule, means that a CPU computed in FP32 and rounded the result to FP16.
    """

    module: str
    op: str
    got: Types
    ran: Types
    gave: Types
    decided: str


@dataclass
class Explanation(Printed):
    """The result of `explain`. `str` gives tables, with one row for equal calls; notebooks show them as HTML.

    Attributes:
        policy: the model's policy; None for a model that was never initialized.
        kept: name of a module that stays FP32 with its children -> the reason: "keep_fp32" (also for a module that
            shares a weight with one), "keep_batchnorm_fp32", or "buffers alone" (it has no parameters). At O1 and O4
            all weights are FP32, so batch norms are not listed.
        calls: in the order of their beginning. Functions that a function of the op lists calls are left out.
    """

    policy: Policy | None
    kept: dict[str, str] = field(default_factory=dict)
    calls: list[OpCall] = field(default_factory=list)

    def parts(self, rows: int | None) -> Iterator[Part]:
        if self.policy is None:
            yield "no policy: the model never went through amp.initialize()"
        else:
            yield Table(
                [(each.name, _short(getattr(self.policy, each.name))) for each in fields(self.policy)], title="policy"
            )
        if self.kept:
            yield ""
            yield Table([(name or "(model)", why) for name, why in self.kept.items()], title="stay FP32")
        yield ""
        yield from _call_parts(self.calls)


def _short(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return type_name(str(value).removeprefix("torch."))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _call_parts(calls: list[OpCall]) -> Iterator[Part]:
    if not calls:
        yield "no function of torch received or returned a floating tensor"
        return
    header: tuple[str, ...] = ("module", "op", "got", "ran", "gave", "decided by", "times")
    rows: list[tuple[str, ...]] = [
        (
            call.module or "(model)",
            call.op.replace("torch.nn.functional.", "F.").replace("torch.Tensor.", "Tensor."),
            *map(_shorts, (call.got, call.ran, call.gave)),
            call.decided,
            str(times),
        )
        for call, times in Counter(calls).items()
    ]
    if len(rows) == len(calls):  # all calls differ
        header, rows = header[:-1], [row[:-1] for row in rows]
    yield Table(rows, (header,))
    if any(EMULATED in call.decided for call in calls):
        yield ""
        yield f"{EMULATED}: multiplied in FP32 on this CPU, and each result rounded once"


def _shorts(types: Types) -> str:
    """Return the short names of the floating types, each once."""
    shorts = dict.fromkeys(_short(dtype) for dtype in types if dtype.is_floating_point)
    return ",".join(shorts) or "-"
