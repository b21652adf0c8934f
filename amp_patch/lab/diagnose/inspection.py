"""Inspection: what `inspect` saw of a model's numbers, what stands out among them, and what would mend it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from amp_patch.lab.diagnose.histogram import Histogram
from amp_patch.lab.diagnose.lost_updates import Updates
from amp_patch.lab.diagnose.tables import Part, Table, as_html, as_text
from amp_patch.lab.wording import percent, power_in_ascii, short, two


@dataclass(frozen=True)
class NotFinite:
    """Where the first number that is not finite appeared.

    Attributes:
        module: qualified name of the module whose op it was; "" is the model itself, None outside of its forward.
        op: name of torch's function: "linear", "pow"; of an autograd function that is none of torch's, its name.
        direction: "forward"; "backward" if the op's backward made it.
        step: how many optimizer steps the block had seen before.
        input_range: the lowest and the highest number that went in: into the op, weights included, or as gradients into
            its backward.
        remedy: the modules that would have to compute in FP32 for it to be finite, as far as this step tells: those
            that make the number and those that use it, but for what is kept already. Empty if there are none but the
            whole model: then BF16 helps, or for "backward" a smaller loss scale. Empty, too, where all was FP32.
    """

    module: str | None
    op: str
    direction: str
    step: int
    input_range: tuple[float, float]
    remedy: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = "outside of the model" if self.module is None else f"in {self.module or 'the model itself'}"
        lowest, highest = map(short, self.input_range)
        return (
            f"{self.direction} of {self.op} {where}, step {self.step}: from inputs of {lowest} to {highest} it "
            "made a number that is not finite"
        )


@dataclass
class Inspection:
    """What `inspect` saw. Reading a histogram syncs with the device.

    Attributes:
        weights: name of a parameter -> its values when the block began.
        activations: name of a module -> what it returned.
        gradients: name of a parameter -> its gradients, of each backward, the loss scale divided out. What FP16 has
            lost already, at O1 to O3, is among their zeros: O0 shows all that there is to lose.
        activation_gradients: name of a module -> the gradients of what it returned, as they flowed, multiplied by the
            loss scale.
        errors: name of a module that calls no other -> how much its output differs from what it gives in FP32 on the
            same input: the 2-norm of the difference over that of the FP32 output, the largest of all calls; infinite
            where FP32's is finite and it is not. Known at the end of each step. Modules that draw random numbers,
            write to their input, or cannot be computed in FP32, are left out.
        not_finite: where the first number that is not finite appeared; None if all were finite. Infinities that are
            asked for, as in `masked_fill(mask, -inf)`, do not count, nor do those that come in from outside.
        updates: what the optimizers' steps changed in FP32 weights or masters, and what of that would be lost without:
            `updates.lost()`, or of a module `updates.lost("blocks.0")`.
        scale: the loss scale of the last backward; without one, the one that the next would have.
        step: how many optimizer steps it saw.
        too_large: modules whose output FP16 cannot hold, however it is computed.
        low: the types of low precision that tensors were of.
        high: at O6 and O7 the modules that `keep_high` keeps there; None at other levels.
    """

    weights: dict[str, Histogram] = field(default_factory=dict)
    activations: dict[str, Histogram] = field(default_factory=dict)
    gradients: dict[str, Histogram] = field(default_factory=dict)
    activation_gradients: dict[str, Histogram] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    not_finite: NotFinite | None = None
    updates: Updates = field(default_factory=Updates)
    scale: float = 1.0
    step: int = 0
    too_large: set[str] = field(default_factory=set)
    low: set[torch.dtype] = field(default_factory=set, repr=False)
    high: list[str] | None = field(default=None, repr=False)

    @property
    def all_fp32(self) -> bool:
        """Whether no tensor was of a type of low precision."""
        return not self.low

    @property
    def for_fp16(self) -> bool:
        """Whether FP16's range matters: something was FP16, or all FP32, which may become FP16."""
        return self.all_fp32 or torch.float16 in self.low

    def keep_fp32(self, error: float = 0.05, flushed: float = 0.5) -> list[str]:
        """The modules that `initialize(keep_fp32=...)` would best keep in FP32, by name, the first one first.

        The remedy for the first number that was not finite; modules whose output in FP16 differs from FP32's by more
        than `error`, relatively; those with a parameter of whose gradients FP16 loses more than the share `flushed`,
        even at the best loss scale (where all was BF16 or FP32 that does not count), or has lost all. Look again with
        them in place: behind the first overflow nothing can be seen. At O6 and O7 they are for `keep_high`, beside
        those that it has (`high`).
        """
        found = [] if self.not_finite is None else [*self.not_finite.remedy]
        worst = sorted((-e, name) for name, e in self.errors.items() if e > error)
        found += [name for e, name in worst if name not in self.too_large or e > -math.inf]
        best = self.best_scale()
        for name, seen in self.gradients.items():
            owner = name.rpartition(".")[0]
            if (self.for_fp16 and seen.flushed(best) > flushed) or self._lost(name):
                found.append(owner)
        found = list(dict.fromkeys(name for name in found if name))
        return [name for name in found if not any(name.startswith(f"{outer}.") for outer in found)]

    def best_scale(self) -> float:
        """The largest power of two by which the loss can be multiplied before a parameter's gradient overflows FP16.

        Of gradients that were infinite already it knows nothing; `not_finite` does.
        """
        return min((seen.best_scale() for seen in self.gradients.values() if seen.counts), default=1.0)

    def summary(self, rows: int = 5) -> str:
        """What stands out, as text: `print(seen)`. `rows` of each table, the worst ones; names are whole."""
        return as_text(self._parts(rows))

    __str__ = summary

    def _repr_html_(self) -> str:
        """All rows of all tables, for a notebook."""
        return as_html(self._parts(None))

    def _parts(self, rows: int | None) -> Iterator[Part]:
        best = self.best_scale()
        of_fp16 = f", the best one {power_in_ascii(best)}" if self.for_fp16 else ""
        yield f"{self.step} steps; loss scale {power_in_ascii(self.scale)}{of_fp16}"
        yield f"not finite: {self.not_finite or 'nothing'}"
        errors = sorted(self.errors.items(), key=lambda item: -item[1])
        cells = [(name, two(error)) for name, error in errors]
        yield Table(cells[:rows], (("module", "error"),), "relative error against FP32", numbers=True)
        if self.for_fp16:
            yield self._losses(best, rows)
        if (share := self.updates.lost()) is not None:
            low = f"without FP32 weights or masters, in {self.updates.dtype}"
            yield f"{low}, {percent(share)} of the updates would be lost"
            yield self._lost_updates(rows)
        lost = [name for name in self.gradients if self._lost(name)]
        if lost:
            more = "" if rows is None else " ..." * (len(lost) > rows)
            yield f"gradients that are 0 throughout: {', '.join(lost[:rows])}{more}"
        if self.not_finite is not None and not self.not_finite.remedy and self.not_finite.module is not None:
            yield self._advice(self.not_finite.direction)
        kept = self.keep_fp32()
        why = "" if kept else f": {self._why_nothing_is_kept()}"
        yield (
            f"keep_fp32={kept}{why}" if self.high is None else f"keep_high={list(dict.fromkeys(self.high + kept))}{why}"
        )

    def _advice(self, direction: str) -> str:
        """What to try against a number that is not finite where no module by itself would help."""
        if self.all_fp32:
            return "FP32 made it: no other type helps"
        if self.for_fp16:
            smaller = direction == "backward" and self.scale > 1
            advice = f"try {'a smaller loss scale' if smaller else 'dtype=torch.bfloat16'}"
        else:
            advice = "BF16 has FP32's range, so look whether O0 makes it too"
        return f"no module by itself would have to be FP32 for what is not finite: {advice}"

    def _why_nothing_is_kept(self) -> str:
        if self.not_finite is not None:
            return "no module by itself is to stay FP32, see above"
        if not (self.errors or self.gradients):
            return "nothing is known: no step of the model was seen"
        gradients = "FP16 loses less than half of each gradient" if self.for_fp16 else "no gradient is 0 throughout"
        what = "no module has to stay FP32" if self.high is None else "no other module has to stay BF16"
        return f"{what}: every number is finite, every output that was compared is within 5% of FP32's, and {gradients}"

    def _losses(self, best: float, rows: int | None) -> Table:
        """The gradients of which FP16 loses something, with their shares."""
        scales = (self.scale, 1.0, best)
        shares = {
            name: [seen.flushed(scale) for scale in scales] + [seen.overflowed(scale) for scale in scales]
            for name, seen in self.gradients.items()
        }
        worst = sorted((name for name in shares if any(shares[name])), key=lambda n: [-s for s in shares[n][2::-1]])
        header = (("gradient of", "flushed:", "", "", "overflowed:"), ("", *["now", "at 1", "best"] * 2))
        title = "share of gradients that FP16 loses, at the loss scale now, at 1 and at the best"
        return Table([(n, *(percent(s) for s in shares[n])) for n in worst[:rows]], header, title, numbers=True)

    def _lost_updates(self, rows: int | None) -> Table:
        """The modules by the share of updates that low precision would lose, the most first."""
        modules = dict.fromkeys(name.rpartition(".")[0] for name in self.updates.counts)
        shares = [(name, lost) for name in modules if (lost := self.updates.lost(name)) is not None]
        cells = [(name, percent(lost)) for name, lost in sorted(shares, key=lambda item: -item[1])]
        title = f"share of updates that weights in {self.updates.dtype} would lose"
        return Table(cells[:rows], (("module", "lost"),), title, numbers=True)

    def _lost(self, name: str) -> bool:
        """Whether a parameter's gradient is 0 throughout though that of its module's output is not."""
        seen, output = self.gradients[name], self.activation_gradients.get(name.rpartition(".")[0])
        return output is not None and bool(output.counts) and 0 < seen.zeros == seen.total
