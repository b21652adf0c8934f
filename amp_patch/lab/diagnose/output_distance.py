"""compare_outputs: how far the outputs of a model at one level lie from those at another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.environment import NamedLevel, named_level
from amp_patch.frontend import initialize, restored
from amp_patch.lab import wording
from amp_patch.lab.diagnose.module_error import floats
from amp_patch.lab.diagnose.tables import Part, Table, as_html, as_text
from amp_patch.model.forward import policy_of
from amp_patch.model.fp32_copies import fp32_copy
from amp_patch.support import distributed

BASELINE = "O0"
COMPILED = " compiled"  # behind a level: through torch.compile


@dataclass(frozen=True)
class OutputDistance:
    """How far the outputs at one level, `second`, lie from those at another, `first`, for the same inputs.

    Attributes:
        first, second: the levels: "O0", "O5 BF16", "O5 BF16 compiled".
        output: the distance of the outputs in the Euclidean norm, over the norm of `first`'s. NaN where a number of
            either is not finite.
        modules: qualified name -> the same of the outputs of that module, of all its calls. What came in differs
            already: it is the distance gathered so far, and no error of the module alone. Without compiled levels.
        nats: the mean difference of log-probabilities, without its sign: of the targets, or without them of all
            classes, weighted by their probability under `first`. None for outputs that are no logits.
        largest_nats: the largest such difference; without targets, of a row's weighted means.
        outside: the share of targets, or of `first`'s probability, whose ratio of probabilities, second over first,
            lies outside of [1 - band, 1 + band].
    """

    first: str
    second: str
    output: float
    modules: dict[str, float]
    nats: float | None = None
    largest_nats: float | None = None
    outside: float | None = None


@dataclass
class OutputComparison:
    """What `compare_outputs` found. As a string it is tables; a notebook shows them as HTML.

    Attributes:
        distances: in the order of the pairs.
        band: of `OutputDistance.outside`.
    """

    distances: list[OutputDistance] = field(default_factory=list)
    band: float = 0.1

    def __getitem__(self, pair: tuple[str, str]) -> OutputDistance:
        """The distance of a pair (first, second), by levels as they were asked for: `found["O0", "O5"]`."""
        for each in self.distances:
            if pair == (_asked(each.first), _asked(each.second)):
                return each
        known = ", ".join(str((_asked(each.first), _asked(each.second))) for each in self.distances)
        raise KeyError(f"compare_outputs: {pair} was not compared; there are {known}")

    def __str__(self) -> str:
        return as_text(self._parts())

    def _repr_html_(self) -> str:
        return as_html(self._parts())

    def _parts(self) -> Iterator[Part]:
        header = ("from, to", "output", "nats", "largest", f"outside 1 ± {self.band:g}")
        logits = any(each.nats is not None for each in self.distances)
        rows = []
        for each in self.distances:
            figures = [_two(each.output), _two(each.nats), _two(each.largest_nats)]
            outside = "" if each.outside is None else wording.percent(each.outside)
            rows.append((f"{each.first}, {each.second}", *figures, outside)[: len(header) if logits else 2])
        yield Table(rows, (header if logits else header[:2],), numbers=True)
        with_modules = [each for each in self.distances if each.modules]
        names = list(dict.fromkeys(name for each in with_modules for name in each.modules))
        if names:
            yield ""
            yield Table(
                [(name or "(model)", *(_two(each.modules.get(name)) for each in with_modules)) for name in names],
                (("module", *(f"{each.first}, {each.second}" for each in with_modules)),),
                title="distance gathered so far",
                numbers=True,
            )


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
    """Forward the same inputs at several levels, and measure how far the outputs lie apart::

        print(amp.compare_outputs(model, (tokens,), ["O2", "O5"], pairs=[("O2", "O5")]))

    For who trains in one precision and samples in another: whether the probabilities that the sampler drew by are those
    that the trainer sees. Each forward is that of an FP32 copy of `model`, initialized at the level, without gradients
    and from the same state of the random generators; dropout drops the same numbers, save in a compiled model. The
    model, its training and the process are as before, except that beside other trainings O1's wrappers stay installed,
    and cast nothing. Holds one copy of the model and, for the figures by module, the outputs of all its modules. Syncs
    with the device.

    Args:
        model: any module, FP32 or not, in a training or not. It is compared in the mode that it is in: call `eval()`
            first for that of a sampler.
        inputs: a tuple of positional arguments, a dict of keyword arguments, or the one argument.
        levels: those that are compared with FP32 ("O0"), each with a format of products if wanted ("O6+mxfp8").
            " compiled" behind one runs it through torch.compile, which has no figures by module:
            `pairs=[("O5", "O5 compiled")]`.
        pairs: (first, second) levels that are compared beside that: the sampler's and the trainer's.
        targets: classes, int64, of the shape of the logits without their last dimension. Negative ones do not count.
        band: half the width around 1 of the ratio of two probabilities, beyond which it is counted in `outside`.
        logits: from the model's output to its logits, [..., classes]. By default the output's `logits`, or else the
            output if it is one floating tensor with at least two dimensions.
        options: more arguments of `initialize` for all levels but O0, such as `keep_fp32`. What stands behind a
            level's name goes before them.

    Raises:
        TypeError: `model` is no module; `levels` is a string; `pairs` holds no pairs.
        ValueError: a level that is none; targets of another shape or beyond the classes; the model is sharded; what
            `initialize` refuses.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"compare_outputs: model is a {type(model).__name__}; wanted a torch.nn.Module")
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
        found.distances.append(_distance(first, run(end, beside=first), targets, band))
    return found


def _named(level: str) -> NamedLevel:
    """The level without what is not `initialize`'s."""
    try:
        named = named_level(level.removesuffix(COMPILED))
        named.policy()
    except ValueError as error:
        raise ValueError(
            f"compare_outputs: {error}; {COMPILED!r} stands behind all of it, for torch.compile"
        ) from error
    return named


class _Forward:
    """One forward of a copy at a level.

    Attributes:
        asked, level: the level, and its name with its type.
        outputs: the floating tensors of the model's output, in FP32.
        logits: of the output, in FP64, or None.
        kept: the outputs of the modules by name, in FP32, one list a call; of a run beside another none.
        apart: name -> squares of the distances to the other's outputs, and of those outputs' norms.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        options: Mapping[str, Any],
        logits: Callable[[Any], Tensor] | None,
        asked: str,
        beside: _Forward | None = None,
    ) -> None:
        self.asked = asked
        self.kept: dict[str, list[list[Tensor]]] = {}
        self.apart: dict[str, list[Tensor]] = {}
        self._calls: dict[str, int] = {}
        self._beside = beside
        eager, named = asked.removesuffix(COMPILED), _named(asked)
        devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
        with torch.random.fork_rng(devices), restored(), torch.no_grad(), ExitStack() as stack:
            copy = fp32_copy(model)
            given = {**options, **(named.options if "+" in eager else {})} if eager != BASELINE else {}
            initialize(copy, opt_level=named.level, verbosity=0, **given)
            policy = policy_of(copy)
            low = policy is not None and policy.makes_low_tensors
            dtype = str(policy.dtype).removeprefix("torch.") if policy is not None and low else None
            self.level = wording.level_name(eager, dtype) + asked.removeprefix(eager)
            if asked == eager:
                for name, module in copy.named_modules():
                    stack.callback(module.register_forward_hook(partial(self._hook, name)).remove)
            called = copy if asked == eager else torch.compile(copy)
            arguments = inputs if isinstance(inputs, tuple) else () if isinstance(inputs, dict) else (inputs,)
            output = called(*arguments, **(inputs if isinstance(inputs, dict) else {}))
            self.outputs = [each.float() for each in floats(output)]
            self.logits = _logits(output, logits)

    def _hook(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        outputs = [each.float() for each in floats(output)]
        if self._beside is None:
            self.kept.setdefault(name, []).append([each.clone() for each in outputs])  # the next may write in place
            return
        call = self._calls[name] = self._calls.get(name, -1) + 1
        others = self._beside.kept.get(name, [])
        if call < len(others) and [each.shape for each in outputs] == [each.shape for each in others[call]]:
            self.apart.setdefault(name, []).append(_squares(others[call], outputs))


def _squares(first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    """FP64, shape [2]: the squares of the distance, and of the norm of `first`."""
    total = torch.zeros(2, dtype=torch.float64, device="cpu")
    for one, other in zip(first, second, strict=True):
        apart = other.double() - one.double()
        apart[(one == other).expand_as(apart)] = 0  # equal infinities: masked attention scores
        size = torch.where(one.isfinite(), one.double(), 0)
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
    output = _relative(_squares(first.outputs, second.outputs))
    modules = {name: _relative(torch.stack(parts).sum(0)) for name, parts in second.apart.items()}
    if first.logits is None or second.logits is None:
        if targets is not None:
            raise ValueError(
                "compare_outputs: targets were given, and the output is no logits; name them by logits=..."
            )
        return OutputDistance(first.level, second.level, output, modules)
    nats = _nats(first.logits, second.logits, targets, band)
    return OutputDistance(first.level, second.level, output, modules, *nats)


def _nats(first: Tensor, second: Tensor, targets: Tensor | None, band: float) -> tuple[float, float, float]:
    """The mean and the largest difference of log-probabilities, and the share outside of the band."""
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
        change = change.gather(-1, index)[counted]
        weights = torch.ones_like(change)
    change = torch.where(weights > 0, change, 0)  # classes that a mask excludes: -inf less -inf
    rows = (weights * change.abs()).sum(-1)
    if not rows.numel():
        return 0.0, 0.0, 0.0
    beyond = (change.exp() - 1).abs() > band
    return rows.mean().item(), rows.max().item(), (weights * beyond).sum(-1).mean().item()


def _logits(output: Any, given: Callable[[Any], Tensor] | None) -> Tensor | None:
    found = given(output) if given is not None else getattr(output, "logits", output)
    if not isinstance(found, Tensor) or not found.is_floating_point() or found.dim() < 2 or not found.shape[-1]:
        return None
    return found.double()


def _asked(level: str) -> str:
    """ "O5 compiled", of "O5 BF16 compiled"."""
    return level.partition(" ")[0] + (COMPILED if level.endswith(COMPILED) else "")


def _two(value: float | None) -> str:
    return "" if value is None else wording.two(value)
