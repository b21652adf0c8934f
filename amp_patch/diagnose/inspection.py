"""Inspection, the result of `inspect`: statistics of a model's numbers, problems, and the modules to keep in FP32."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from amp_patch.diagnose.histogram import Histogram
from amp_patch.diagnose.tables import Part, Printed, Table
from amp_patch.diagnose.wording import percent, power_in_ascii, short, two

_OFF = 0.05  # an error of the model's output that is told
_WAY_OUT = "amp.survey names lines that round it"  # if the search has found no line


@dataclass(frozen=True)
class NotFinite:
    """The call that made the first number that is not finite.

    Attributes:
        module: qualified name of the module that made the call; "" is the model itself; None if outside of its forward.
        op: the function's name: "linear", "pow", or the name of a custom autograd function.
        direction: "forward", or "backward" if the op's backward made the number.
        step: the number of optimizer steps in the block before it.
        input_range: the lowest and the highest number among the inputs of the op, weights included, or among the
            gradients that its backward received.
        remedy: the modules to keep in FP32 so that the number is finite, as far as this step shows: the modules that
            make it or use it, without those already kept. Empty if only the whole model would do; BF16, or for
            "backward" a smaller loss scale, then helps. Also empty if all was FP32.
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
class Inspection(Printed):
    """The result of `inspect`. Reading a histogram syncs with the device.

    Attributes:
        weights: name of a parameter -> its values at the beginning of the block.
        activations: name of a module -> the values of its outputs.
        gradients: name of a parameter -> its gradients in each backward, unscaled. At O1 to O3 the values that FP16 has
            flushed to 0 count as zeros; only O0 shows them.
        activation_gradients: name of a module -> the gradients of its outputs, scaled by the loss scale.
        errors: name of a module that calls no other -> the relative error of its output against the FP32 output for
            the same input, in the 2-norm; the largest of all calls. Infinite if the FP32 output is finite and the
            output is not. Updated at the end of each step. A module is left out if it draws random numbers, writes to
            its input, or cannot be computed in FP32.
        output_error: the relative error of the model's output against that of an FP32 copy for the same inputs, the
            largest of all calls. 0 for a model without `initialize`, with hooks of user code, or that draws random
            numbers.
        cause: the line that this error comes from, with its figures; "" if it is small, or if no line was found.
        not_finite: the call that made the first number that is not finite; None if all were finite. Infinities that
            user code asks for (`masked_fill(mask, -inf)`), or passes in, do not count.
        scale: the loss scale of the last backward in the block; if there was no backward, the scale for the next one.
        step: the number of optimizer steps in the block.
        too_large: modules whose FP32 output exceeds the range of the low-precision type.
        low: the low-precision types among the tensors.
        high: at O6 and O7 the modules that `keep_high` keeps; None at other levels.
    """

    weights: dict[str, Histogram] = field(default_factory=dict)
    activations: dict[str, Histogram] = field(default_factory=dict)
    gradients: dict[str, Histogram] = field(default_factory=dict)
    activation_gradients: dict[str, Histogram] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    output_error: float = 0.0
    cause: str = ""
    not_finite: NotFinite | None = None
    scale: float = 1.0
    step: int = 0
    too_large: set[str] = field(default_factory=set)
    low: set[torch.dtype] = field(default_factory=set, repr=False)
    high: list[str] | None = field(default=None, repr=False)

    @property
    def all_fp32(self) -> bool:
        """Whether no tensor had a low-precision type."""
        return not self.low

    @property
    def for_fp16(self) -> bool:
        """Whether FP16's range matters: a tensor was FP16, or all were FP32 and may become FP16."""
        return self.all_fp32 or torch.float16 in self.low

    @property
    def is_off(self) -> bool:
        """Whether the model's output has an error above 5 %, and no number that is not finite explains it."""
        return self.output_error > _OFF and self.not_finite is None

    def keep_fp32(self, error: float = 0.05, flushed: float = 0.5) -> list[str]:
        """Return the names of the modules to pass to `initialize(keep_fp32=...)`, the most important first:

        - the remedy for the first number that was not finite;
        - modules whose output has a relative error above `error`, unless its type cannot hold the FP32 output at all;
        - modules with a parameter whose gradient FP16 flushes to 0 by more than the share `flushed`, even at the best
          loss scale (only if FP16's range matters, `for_fp16`), or whose gradient is lost completely.

        Inspect again with these modules kept: the first overflow hides later ones. At O6 and O7 pass them to
        `keep_high`, together with `high`.
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
        """Return the largest power of two as loss scale at which no parameter's gradient overflows FP16.

        Gradients that were infinite already are not considered; `not_finite` reports them.
        """
        return min((seen.best_scale() for seen in self.gradients.values() if seen.counts), default=1.0)

    def parts(self, rows: int | None) -> Iterator[Part]:
        best = self.best_scale()
        of_fp16 = f", the best one {power_in_ascii(best)}" if self.for_fp16 else ""
        yield f"{self.step} steps; loss scale {power_in_ascii(self.scale)}{of_fp16}"
        yield f"not finite: {self.not_finite or 'nothing'}"
        worst = sorted(self.errors.items(), key=lambda item: -item[1])[:rows]
        errors = [(name, two(error)) for name, error in worst]
        yield Table(errors, (("module", "error"),), "relative error against FP32", numbers=True)
        if self.is_off:
            yield f"the output is off from an FP32 copy's by {two(self.output_error)}: {self.cause or _WAY_OUT}"
        if self.for_fp16:
            yield self._losses(best, rows)
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
        """Return the advice against a non-finite number for which no module can be kept in FP32 (an empty `remedy`).

        `direction` is that of `NotFinite`.
        """
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
        kept = "no module has to stay FP32" if self.high is None else "no other module has to stay BF16"
        return f"{kept}: every number is finite, every output that was compared is within 5% of FP32's, and {gradients}"

    def _losses(self, best: float, rows: int | None) -> Table:
        """Return the table of the parameters of whose gradients FP16 would lose numbers, the worst first.

        Its columns are the shares of numbers that flush to 0, and that overflow: at the loss scale in use, at 1, and at
        `best`.
        """
        scales = (self.scale, 1.0, best)
        shares = {
            name: [seen.flushed(scale) for scale in scales] + [seen.overflowed(scale) for scale in scales]
            for name, seen in self.gradients.items()
        }
        worst = sorted((name for name in shares if any(shares[name])), key=lambda n: [-s for s in shares[n][2::-1]])
        header = (("gradient of", "flushed:", "", "", "overflowed:"), ("", *["now", "at 1", "best"] * 2))
        title = "share of gradients that FP16 loses, at the loss scale now, at 1 and at the best"
        return Table([(n, *(percent(s) for s in shares[n])) for n in worst[:rows]], header, title, numbers=True)

    def _lost(self, name: str) -> bool:
        """Return whether all numbers of a parameter's gradient were 0, and the gradient of its module's output was not.

        The gradient was then lost between the two.
        """
        seen, output = self.gradients[name], self.activation_gradients.get(name.rpartition(".")[0])
        return output is not None and bool(output.counts) and 0 < seen.zeros == seen.total
