"""compare_outputs: the distance between the outputs of a model at two levels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.diagnose import wording
from amp_patch.diagnose.module_error import floats
from amp_patch.diagnose.tables import Part, Printed, Table
from amp_patch.environment import NamedLevel, named_level
from amp_patch.frontend import initialize, restored
from amp_patch.model.forward import policy_of
from amp_patch.model.fp32_copies import fp32_copy
from amp_patch.support import distributed
from amp_patch.support.devices import widest
from amp_patch.support.words import of_class

BASELINE = "O0"
COMPILED = " compiled"  # suffix of a level that runs through torch.compile


@dataclass(frozen=True)
class OutputDistance:
    """The distance between the outputs at two levels, `first` and `second`, for the same inputs.

    Attributes:
        first, second: the levels: "O0", "O5 BF16", "O5 BF16 compiled".
        output: the 2-norm of the difference of the outputs, divided by the norm of `first`'s. Equal
            infinities count as equal; other elements that are not finite make it infinite or NaN.
        nats: the mean absolute difference of log-probabilities: of the targets, or without targets of all classes,
            weighted by their probability under `first`. None if the outputs are no logits.
        largest_nats: the largest absolute difference of a target's log-probability, or without targets the largest
            weighted mean of one row of logits.
        outside: the share of the targets, or without targets of `first`'s probability, for which the ratio of the
            probabilities (second over first) is not in [1 - band, 1 + band].
        sequence: the largest deviation from 1 of the ratio for a whole sequence of targets (the targets' last
            dimension), the product of its tokens' ratios. None without targets of two dimensions or more.
    """

    first: str
    second: str
    output: float
    nats: float | None = None
    largest_nats: float | None = None
    outside: float | None = None
    sequence: float | None = None


@dataclass
class OutputComparison(Printed):
    """The result of `compare_outputs`. `str` gives tables; notebooks show them as HTML.

    Attributes:
        distances: one for each compared pair of levels, in the order of the comparison.
        band: the band of `OutputDistance.outside`.
    """

    distances: list[OutputDistance] = field(default_factory=list)
    band: float = 0.1

    def __getitem__(self, pair: tuple[str, str]) -> OutputDistance:
        """Return the distance of a pair of levels, named as in the call of `compare_outputs`: `found["O0", "O5"]`."""
        for each in self.distances:
            if pair == (_asked(each.first), _asked(each.second)):
                return each
        known = ", ".join(str((_asked(each.first), _asked(each.second))) for each in self.distances)
        raise KeyError(f"compare_outputs: {pair} was not compared; the compared pairs are {known}")

    def parts(self, rows: int | None) -> Iterator[Part]:
        header = ("from, to", "output", "nats", "largest", f"outside 1 ± {self.band:g}", "sequence - 1")
        logits = any(each.nats is not None for each in self.distances)
        lines = []
        for each in self.distances:
            figures = [_two(each.output), _two(each.nats), _two(each.largest_nats)]
            outside = "" if each.outside is None else wording.percent(each.outside)
            row = f"{each.first}, {each.second}", *figures, outside, _two(each.sequence)
            lines.append(row[: len(header) if logits else 2])
        yield Table(lines, (header if logits else header[:2],), numbers=True)


def compare_outputs(
    model: nn.Module,
    inputs: Any,
    levels: Sequence[str] = ("O1", "O2", "O4", "O5"),
    *,
    pairs: Iterable[tuple[str, str]] = (),
    targets: Tensor | None = None,
    band: float = 0.1,
    logits: Callable[[Any], Tensor] | None = None,
    **options: Any,
) -> OutputComparison:
    """Run the same inputs through a model at several levels, and measure the distances of the outputs::

        print(amp.compare_outputs(model, (tokens,), ["O2", "O5"], pairs=[("O2", "O5")]))

    Use it if you train in one precision and sample in another: it shows whether the sampler's probabilities differ from
    the trainer's. Each forward runs on an FP32 copy of `model`, initialized at the level, without gradients, from the
    same state of the random generators. So dropout drops the same elements, except in a compiled model. Afterwards the
    model, its training and the process are unchanged; if there are other trainings, O1's wrappers stay installed, but
    cast nothing. Memory: one copy of the model. Syncs with the device.

    Args:
        model: any module, in FP32 or not, initialized or not. It keeps its mode: call `eval()` first to compare a
            sampler.
        inputs: a tuple of positional arguments, a dict of keyword arguments, or a single argument.
        levels: the levels to compare with "O0" (FP32), each with options if wanted ("O6+mxfp8"). With " compiled"
            after it, a level runs through torch.compile: `pairs=[("O5", "O5 compiled")]`.
        pairs: (first, second) levels to compare in addition: the sampler's and the trainer's.
        targets: classes, int64, of the shape of the logits without the last dimension. Negative targets are ignored.
        band: the allowed deviation from 1 of the ratio of two probabilities; `outside` counts larger ones.
        logits: takes the model's output and returns its logits, [..., classes]. By default the output's attribute
            `logits`, or else the output itself if it is a floating tensor with at least two dimensions.
        options: arguments of `initialize` for all levels but O0, such as `keep_fp32`. The options in a level's name
            override them.

    Raises:
        TypeError: `model` is no module; `levels` is a string; an element of `pairs` is no pair.
        ValueError: an unknown level; targets of another shape or type, or beyond the classes; a sharded model; any
            argument that `initialize` refuses.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"compare_outputs: model is {of_class(model)}; wanted a torch.nn.Module")
    if isinstance(levels, str):
        raise TypeError(f"compare_outputs: levels is the string {levels!r}; wanted a list: levels=[{levels!r}]")
    pairs = list(pairs)
    for pair in pairs:
        if isinstance(pair, str) or len(pair) != 2:
            raise TypeError(f"compare_outputs: pairs holds {pair!r}; wanted pairs of levels: pairs=[('O2', 'O5')]")
    distributed.refuse(model, "compare_outputs")
    wanted = [*((BASELINE, level) for level in levels), *pairs]
    for level in dict.fromkeys(level for pair in wanted for level in pair):
        _named(level)
    run = partial(_Forward, model, inputs, options, logits)
    found = OutputComparison(band=band)
    first: _Forward | None = None
    for begin, end in wanted:
        if first is None or first.asked != begin:
            first = run(begin)
        found.distances.append(_distance(first, run(end), targets, band))
    return found


def _named(level: str) -> NamedLevel:
    """Parse a level without its suffix " compiled"."""
    try:
        named = named_level(level.removesuffix(COMPILED))
        named.policy()
    except ValueError as error:
        raise ValueError(
            f"compare_outputs: {error}; {COMPILED!r}, for torch.compile, is the last part of a level"
        ) from error
    return named


class _Forward:
    """One forward of a copy of the model at a level.

    Attributes:
        asked: the level as passed by the caller.
        level: the name of the level with its type.
        outputs: the floating tensors of the model's output, in FP32.
        logits: the logits in FP64, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        options: Mapping[str, Any],
        logits: Callable[[Any], Tensor] | None,
        asked: str,
    ) -> None:
        self.asked = asked
        eager, named = asked.removesuffix(COMPILED), _named(asked)
        devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
        with torch.random.fork_rng(devices), restored(), torch.no_grad():
            copy = fp32_copy(model)
            given = {**options, **(named.options if "+" in eager else {})} if eager != BASELINE else {}
            initialize(copy, opt_level=named.level, verbosity=0, **given)
            policy = policy_of(copy)
            low = policy is not None and policy.makes_low_tensors
            dtype = str(policy.dtype).removeprefix("torch.") if policy is not None and low else None
            self.level = wording.level_name(eager, dtype) + asked.removeprefix(eager)
            called = copy if asked == eager else torch.compile(copy)
            arguments = inputs if isinstance(inputs, tuple) else () if isinstance(inputs, dict) else (inputs,)
            output = called(*arguments, **(inputs if isinstance(inputs, dict) else {}))
            self.outputs = [each.float() for each in floats(output)]
            self.logits = _logits(output, logits)


def squares(first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    """Return (sum of (second - first)**2, sum of first**2) over two lists of tensors: FP64, shape [2], on the CPU.

    Equal infinities have the distance 0. Infinities and NaNs of `first` are left out of the second sum.
    """
    total = torch.zeros(2, dtype=torch.float64, device="cpu")
    for one, other in zip(first, second, strict=True):
        wide = widest(one.device)
        apart = other.to(wide) - one.to(wide)
        apart[(one == other).expand_as(apart)] = 0  # equal infinities: masked attention scores
        size = torch.where(one.isfinite(), one.to(wide), 0)
        total += torch.stack([apart.square().sum(), size.square().sum()]).cpu()
    return total


def _relative(squares: Tensor) -> float:
    distance, size = squares.sqrt().tolist()
    return 0.0 if distance == 0 else distance / size if size else math.inf


def _distance(first: _Forward, second: _Forward, targets: Tensor | None, band: float) -> OutputDistance:
    shapes = [[each.shape for each in run.outputs] for run in (first, second)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"compare_outputs: the outputs have shapes {[list(shape) for shape in shapes[0]]} at {first.level} and "
            f"{[list(shape) for shape in shapes[1]]} at {second.level}; wanted a model whose outputs have one shape"
        )
    output = _relative(squares(first.outputs, second.outputs))
    if first.logits is None or second.logits is None:
        if targets is not None:
            raise ValueError(
                "compare_outputs: targets were given, and the output is no logits; name them by logits=..."
            )
        return OutputDistance(first.level, second.level, output)
    nats = _nats(first.logits, second.logits, targets, band)
    return OutputDistance(first.level, second.level, output, *nats)


def _nats(first: Tensor, second: Tensor, targets: Tensor | None, band: float) -> tuple[float | None, ...]:
    """Return (`nats`, `largest_nats`, `outside`, `sequence`) of `OutputDistance`, from the logits at the two levels."""
    sequence: float | None = None
    logs = first.log_softmax(-1)
    change = second.log_softmax(-1) - logs
    weights = logs.exp()
    if targets is not None:
        shape, classes = list(first.shape[:-1]), first.shape[-1]
        if list(targets.shape) != shape or targets.dtype is not torch.int64 or bool((targets >= classes).any()):
            raise ValueError(
                f"compare_outputs: targets are {targets.dtype} of shape {list(targets.shape)}; wanted torch.int64 of "
                f"shape {shape}, below {classes}"
            )
        counted = targets >= 0
        index = targets.clamp(min=0).unsqueeze(-1).to(change.device)
        change = change.gather(-1, index)
        if targets.dim() > 1 and targets.numel():
            of_tokens = change.squeeze(-1).where(counted.to(change.device), 0)
            sequence = of_tokens.sum(-1).expm1().abs().max().item()
        change = change[counted]
        weights = torch.ones_like(change)
    change = torch.where(weights > 0, change, 0)  # a class that a mask excludes: -inf minus -inf is NaN
    rows = (weights * change.abs()).sum(-1)
    if not rows.numel():
        return 0.0, 0.0, 0.0, sequence
    beyond = (change.exp() - 1).abs() > band
    return rows.mean().item(), rows.max().item(), (weights * beyond).sum(-1).mean().item(), sequence


def _logits(output: Any, given: Callable[[Any], Tensor] | None) -> Tensor | None:
    found = given(output) if given is not None else getattr(output, "logits", output)
    if not isinstance(found, Tensor) or not found.is_floating_point() or found.dim() < 2 or not found.shape[-1]:
        return None
    return found.to(widest(found.device))


def _asked(level: str) -> str:
    """Return the level that the caller passed: "O5 compiled" for "O5 BF16 compiled"."""
    return level.partition(" ")[0] + (COMPILED if level.endswith(COMPILED) else "")


def _two(value: float | None) -> str:
    return "" if value is None else wording.two(value)
