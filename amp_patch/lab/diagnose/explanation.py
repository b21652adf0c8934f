"""What `explain` found: the calls of one forward with their types, and the table that shows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from amp_patch.lab.diagnose import native_autocast, shapes
from amp_patch.lab.diagnose.shapes import Product
from amp_patch.lab.diagnose.tables import Part, Table, as_html, as_text
from amp_patch.lab.wording import type_name
from amp_patch.policy import Policy

UNDECIDED = "none: torch's own promotion"
EMULATED = "emulated"

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
            it is fp32), with their special cases in brackets; "low_precision_norms" for a norm that gives its input's
            type by that option; "your register_half_function", or a sibling of it;
            "keep_fp32", "keep_batchnorm_fp32" or "buffers alone" in modules that are kept; for a "cast" the argument of
            `initialize` that wants it; "torch.autocast"; else "none: torch's own promotion". "emulated FP16", alone or
            behind a rule: a CPU multiplied the FP16 values in FP32, and rounded the result.
    """

    module: str
    op: str
    got: Types
    ran: Types
    gave: Types
    decided: str


@dataclass
class Explanation:
    """What `explain` found. As a string it is tables, in which equal calls are one row; a notebook shows them as HTML.

    Attributes:
        policy: what `initialize` resolved for the model; None for a model that never went through it.
        kept: name of a module that stays FP32, with its children -> "keep_fp32" (what shares a weight with such a
            module too), "keep_batchnorm_fp32", or "buffers alone" (it has no parameters). At O1 and O4 all weights are
            FP32: no batch norm is here.
        calls: in the order in which they began. Functions that torch calls inside of one on the lists are left out.
        autocast: torch's own autocasts that were on around the forward, in words; "" for none.
        products: the matrix products and convolutions among the calls.
        on_gpu: whether any of it ran on a GPU.
    """

    policy: Policy | None
    kept: dict[str, str] = field(default_factory=dict)
    calls: list[OpCall] = field(default_factory=list)
    autocast: str = ""
    products: list[Product] = field(default_factory=list, repr=False)
    on_gpu: bool = field(default=False, repr=False)

    @property
    def advice(self) -> list[str]:
        """Sizes of layers that would better be other ones on a GPU, a line each; see `shapes.advice`."""
        return shapes.advice(self.products)

    def __str__(self) -> str:
        return as_text(self._parts())

    def _repr_html_(self) -> str:
        return as_html(self._parts())

    def _parts(self) -> Iterator[Part]:
        yield from _policy_parts(self.policy, self.autocast)
        if self.kept:
            yield ""
            yield Table([(name or "(model)", why) for name, why in self.kept.items()], title="stay FP32")
        yield ""
        yield from _call_parts(self.calls)
        if advice := self.advice:
            yield ""
            hardly = "" if self.on_gpu else "; this forward ran on a CPU, which gains little by them"
            yield f"sizes: in FP16 and BF16 a GPU is fastest at multiples of {shapes.MULTIPLE}{hardly}"
            yield from advice


def _policy_parts(policy: Policy | None, autocast: str) -> Iterator[Part]:
    if policy is not None:
        yield Table([(entry.name, _short(getattr(policy, entry.name))) for entry in fields(policy)], title="policy")
    elif not autocast:
        yield "no policy: the model never went through amp.initialize()"
    if autocast:
        yield f"{native_autocast.AUTOCAST}: {autocast}"


def _short(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return type_name(str(value).removeprefix("torch."))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _call_parts(calls: list[OpCall]) -> Iterator[Part]:
    if not calls:
        yield "no function of torch's took or gave a floating tensor"
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
    if len(rows) == len(calls):  # no call came twice
        header, rows = header[:-1], [row[:-1] for row in rows]
    yield Table(rows, (header,))
    if any(EMULATED in call.decided for call in calls):
        yield ""
        yield f"{EMULATED}: multiplied in FP32 on this CPU, and each result rounded once"


def _shorts(types: Types) -> str:
    """The floating types among these, each once."""
    shorts = dict.fromkeys(_short(dtype) for dtype in types if dtype.is_floating_point)
    return ",".join(shorts) or "-"
