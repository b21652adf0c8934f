"""amp.compare: `python -m amp_patch compare` for a function instead of a script, inside this process."""

from __future__ import annotations

import functools
import gc
import html
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amp_patch.comparison import page, table
from amp_patch.comparison.agreement import FirstBatch
from amp_patch.comparison.comparison import Comparison
from amp_patch.comparison.finding import Finding
from amp_patch.comparison.measures import LOSS
from amp_patch.comparison.named_lines import known_as
from amp_patch.comparison.other_work import OtherWork
from amp_patch.comparison.outcome import failure
from amp_patch.comparison.plan import (
    BASELINE,
    MARGIN,
    MIN_GAIN,
    SMALL,
    SPEED,
    Plan,
    levels_for,
    name_as_asked,
    progress_line,
)
from amp_patch.comparison.seeds import seeded
from amp_patch.diagnose.recording.recorder import Enough, Recorder, log
from amp_patch.diagnose.recording.run import INTERRUPTED, Failure, Run
from amp_patch.diagnose.survey.first_step import FirstStep, FirstStepOver
from amp_patch.diagnose.survey.steps import in_force
from amp_patch.diagnose.wording import listed
from amp_patch.frontend import initialize, restored
from amp_patch.run.machine import machine
from amp_patch.support.patches import Patches
from amp_patch.support.words import of_class
from amp_patch.training.scale_loss import scale_loss

_EVALUATION = "evaluation"


class Compared(Comparison):
    """A comparison that a notebook shows as its report, and a terminal as its table."""

    def __repr__(self) -> str:
        return "\n".join(table.lines(self))

    def _repr_html_(self) -> str:
        # An iframe: the page's style would change the notebook's.
        return f'<iframe srcdoc="{html.escape(page.html(self))}" style="width:100%;height:48em;border:0"></iframe>'


def compare(
    build_fn: Callable[[], Any],
    levels: Sequence[str] | None = None,
    *,
    seeds: int = 3,
    steps: int | None = None,
    dtype: torch.dtype | None = None,
    metric: str | None = None,
    maximize: bool = False,
    goal: str = SPEED,
    min_gain: float = 100 * MIN_GAIN,
    margin: float = 100 * MARGIN,
    evaluate: Callable[[nn.Module], Any] | None = None,
    verbosity: int = 1,
) -> Comparison:
    """Train once per opt level and seed, and compare speed, memory and loss::

        def build():
            model = Net()
            return model, torch.optim.Adam(model.parameters()), torch.nn.functional.cross_entropy, loader

        amp.compare(build, ["O2", "O4"], steps=200)

    A notebook shows the result as a report; `.summary` and `.levels` have its words and figures. All levels of a
    seed are trained one after the other, then all levels of the next seed. All levels of a seed start from the same
    random state. For seed n, 1,000,003 n is added to each seed that `build_fn` passes to `torch.manual_seed`,
    `random.seed` or `numpy.random.seed`. At the end, random states, torch's namespace and all earlier trainings are
    restored. If a run raises, the report shows its error. After an interrupt the result has the runs so far. On a CPU
    the peak memory is unknown, since one process makes all runs.

    Args:
        build_fn: called once per run, to build everything new. If it returns (model, optimizer, loss_fn, batches),
            they are trained here with `loss_fn(model(*inputs), targets)` for each (inputs, ..., targets) of `batches`,
            once through, or repeatedly until `steps`. If it returns None, it has trained the model with
            `amp.initialize`, whose level is overridden, and `amp.scale_loss`.
        levels: levels from "O0" to "O7". O0 is the baseline, and is added if it is not named. Default: O0, O1, O2, O4
            and O5, and for a BF16 model or the goal "memory" O5+split and O5+split+8bit.
        seeds: the number of repetitions; the verdicts need three or more.
        steps: the number of optimizer steps after which a run ends, even inside `build_fn`.
        dtype: torch.float16 or torch.bfloat16 at O1 to O3.
        metric: the figure that is compared: "loss" of the training, or a name given to `amp.log`. Default: the number
            of `evaluate`, or else "loss".
        maximize: whether more of the metric is better.
        goal: "speed" or "memory": recommend the fastest, or the smallest, of the levels that are as good.
        min_gain: recommend a level for its memory only if it saves more than this, in per cent of the training's.
        margin: a level counts as good if it is worse by at most this at the same seeds, in per cent of O0's result.
        evaluate: called with the trained model, in eval mode, under no_grad. It returns a number, which is logged as
            "evaluation", or a dict of numbers, which are logged by their names; `metric` names the one that decides, if
            there are several. Only for models that are trained here.
        verbosity: if 0, no line is printed at the end of a run.

    Raises:
        ValueError, TypeError: an argument is invalid, or `build_fn` returns something else or the same model twice.
    """
    named = str(dtype).removeprefix("torch.") if dtype is not None else None
    if isinstance(levels, str):
        raise TypeError(f"compare: levels is {levels!r}; wanted a list, as ['O0', 'O2']")
    asked = levels_for(goal, named, False) if levels is None else tuple(levels)
    plan = Plan(asked, seeds, steps, named, metric or "loss", maximize, min_gain, margin, goal=goal)
    load, first = OtherWork(), FirstBatch()
    job = _Job(build_fn, plan, evaluate, levels is None, metric is None, first)
    runs = _train_all(job, verbosity, load)
    compared = replace(_compared(build_fn, plan, metric, runs), machine=machine(load.words()))
    if any(run.error_kind == INTERRUPTED for run in runs):
        return compared
    compared = replace(compared, agreement=first.in_words(compared.levels))
    if compared.unexplained:
        compared = replace(compared, survey=_surveyed(_Job(build_fn, plan), known_as(compared.unexplained)))
    return compared


def assert_level(
    build_fn: Callable[[], Any],
    level: str,
    *,
    margin: float = 100 * MARGIN,
    seeds: int = 8,
    steps: int | None = None,
    dtype: torch.dtype | None = None,
    metric: str | None = None,
    maximize: bool = False,
    evaluate: Callable[[nn.Module], Any] | None = None,
) -> Comparison:
    """Assert that a training at a level ends as well as at O0, as a regression test of precision::

        def test_o5_trains_as_fp32():
            amp.assert_level(build, "O5", margin=0.2, steps=100)

    O0 and the level train from one seed after the other, until Student's interval of their gap at 95 % is within the
    margin or beyond it: the test ends as soon as it is sure. In simulations with normal gaps and at most 8 seeds, it
    fails for at most 3 % of the levels without a gap, and passes for at most 3 % of those with a gap of two margins.

    Args:
        level: a level from "O1" to "O7", with rungs if wanted: "O5+split".
        margin: the level passes if it is worse by at most this, in per cent of O0's result.
        seeds: the largest number of seeds. If they decide nothing, the test passes with a warning.
        build_fn, steps, dtype, metric, maximize, evaluate: as for `compare`.

    Returns:
        The comparison.

    Raises:
        AssertionError: the level is worse, diverges, stops, fails, skips more than a tenth of its steps, or its loss
            scale falls below 1; or O0 has no result; or the results measure no quality (`Finding.unjudged`).
        ValueError, TypeError: as `compare`.
    """
    named = str(dtype).removeprefix("torch.") if dtype is not None else None
    plan = Plan((level,), seeds, steps, named, metric or "loss", maximize, margin=margin)
    known = functools.partial(_compared, build_fn, plan, metric)
    job = _Job(build_fn, plan, evaluate, by_evaluation=metric is None)
    compared = known(_train_all(job, 0, OtherWork(), lambda runs: _decided(known(runs))))
    tested = compared.levels[-1]
    found = tested.finding
    if len(compared.levels) < 2 or compared.baseline is None or compared.baseline.level != BASELINE:
        raise AssertionError(f"assert_level: O0 has no result beside {level}: {compared.why_nothing()}")
    if found.rejected or _is_bad(found) or (found.gap is not None and found.gap.told == "worse"):
        raise AssertionError(f"assert_level: {tested.name}: {tested.verdict.text}")
    if found.unjudged:
        raise AssertionError(f"assert_level: {tested.name} is not judged: {tested.verdict.text}")
    if not _decided(compared):
        warnings.warn(
            f"assert_level: {tested.name} is not decided after {len(tested.runs)} seeds: {tested.verdict.text}. Take a "
            "larger margin, more steps or more seeds",
            stacklevel=2,
        )
    return compared


def _decided(compared: Comparison) -> bool:
    """Return whether further seeds cannot change the answer of `assert_level`: the gap is decided, or a run is bad."""
    found = compared.levels[-1].finding
    return _is_bad(found) or found.to_the_bit or (found.gap is not None and found.gap.told is not None)


def _is_bad(found: Finding) -> bool:
    """Return whether a run failed, diverged or skipped too many steps, or its loss scale fell below 1."""
    failed = found.kind == "failed" or bool(found.faults or found.diverged or found.skips)
    return failed or found.fallen_scale is not None


def _compared(build_fn: Callable[[], Any], plan: Plan, metric: str | None, runs: list[Run]) -> Compared:
    if metric is None and any(_EVALUATION in run.logged for run in runs):
        metric = _EVALUATION
    return Compared(
        getattr(build_fn, "__name__", type(build_fn).__name__),
        runs,
        metric or "loss",
        plan.maximize,
        plan.steps,
        min_gain=plan.min_gain / 100,
        margin=plan.margin / 100,
        goal=plan.goal,
    )


class _Job(NamedTuple):
    """The arguments of `compare`: what to train, who decides, and who sees a batch."""

    build_fn: Callable[[], Any]
    plan: Plan
    evaluate: Callable[[nn.Module], Any] | None = None
    adds: bool = False
    by_evaluation: bool = False
    first: FirstBatch | None = None

    def train(self, run: Run, known: list[weakref.ref[nn.Module]], around: AbstractContextManager[Any]) -> None:
        """Train once at the level and seed of `run`, inside of `around`; `known` gets the model.

        `run.edited` becomes true if `build_fn` trains by itself.
        """
        gc.collect()  # free the previous run's model, which reference cycles may hold
        environment = Patches()
        try:
            for name, value in self.plan.environment(run).items():
                environment.set_item(os.environ, name, value)
            with seeded(run.seed), restored(), around, suppress(FirstStepOver):
                built = None
                with suppress(Enough):
                    built = self.build_fn()
                run.edited = built is None
                if built is not None:
                    model, optimizer, loss_fn, batches = _checked(built, known)
                    _train(model, optimizer, loss_fn, batches, self)
                elif self.evaluate is not None:
                    raise _Misuse("evaluate has no model: build_fn trained it by itself; call amp.log there")
        finally:
            environment.remove()


def _surveyed(job: _Job, levels: Sequence[str]) -> dict[str, Any] | None:
    """Survey the first step of a training at O0, measured at `levels`.

    Return the survey (`named_lines.Survey`); None after an interrupt.
    """
    first = FirstStep()
    try:
        job.train(Run(BASELINE), [], first)
    except KeyboardInterrupt:
        return None
    except (Exception, SystemExit) as error:
        return {"failed": f"{type(error).__name__}: {error}"}
    if not first.stepped:
        return {"failed": "it made no step"}
    first.measure(levels)
    return first.report.to_json()


def _train_all(
    job: _Job, verbosity: int, load: OtherWork, decided: Callable[[list[Run]], bool] | None = None
) -> list[Run]:
    """Make the runs of the plan. After an interrupt, return the runs that had begun.

    If `decided` returns True for the runs so far, at the end of a seed, no further seed is trained. With `decided`, an
    interrupt is raised: the runs so far are no answer.
    """
    runs = job.plan.runs()
    known: list[weakref.ref[nn.Module]] = []
    for index, run in enumerate(runs):
        of_run = OtherWork(load)
        of_run.watch(os.getpid())
        try:
            _train_once(job, run, known)
        except KeyboardInterrupt:
            if decided is not None:
                raise
            runs = runs[: index + 1]
        of_run.read()
        run.other_work = of_run.share
        if verbosity:
            print(progress_line(run, job.plan.steps))
        if index == 0 and job.adds and run.weights_type == "bfloat16":
            levels = dict.fromkeys((*job.plan.levels, *SMALL))
            runs[1:] = replace(job.plan, levels=tuple(levels)).runs()[1:]
        if run is runs[-1]:
            break
        if decided is not None and runs[index + 1].seed != run.seed and decided(runs[: index + 1]):
            return runs[: index + 1]
    return runs


def _train_once(job: _Job, run: Run, known: list[weakref.ref[nn.Module]]) -> None:
    """Train once, and record it in `run`. An error becomes `run.error`; KeyboardInterrupt and `_Misuse` propagate."""
    asked, error = Run(run.level, run.seed), None
    recorder = Recorder([run], stop_after=job.plan.steps)
    try:
        job.train(asked, known, recorder)
    except _Misuse as misuse:
        raise misuse.kind(str(misuse)) from None
    except (Exception, SystemExit, KeyboardInterrupt) as raised:
        error = raised
    finally:
        if run.device == "cpu":
            run.peak_memory = None  # the peak of the process may come from an earlier run
    name_as_asked(run, asked)
    run.edited = asked.edited
    failed = Failure(str(error)) if isinstance(error, _NoFigure) else failure(recorder, run, error)
    if failed is not None:
        run.error, run.error_kind, run.error_where = failed
    if isinstance(error, KeyboardInterrupt):
        raise error


class _NoFigure(Exception):
    """The error of a run whose `evaluate` has raised, or returned no number: its training is not judged without it."""


class _Misuse(Exception):
    """An error of `build_fn` or `evaluate` that ends the comparison; `compare` raises it as a `kind`."""

    def __init__(self, words: str, kind: type[Exception] = ValueError) -> None:
        super().__init__(f"compare: {words}")
        self.kind = kind


def _checked(built: Any, known: list[weakref.ref[nn.Module]]) -> Any:
    if not isinstance(built, tuple | list) or len(built) != 4 or not isinstance(built[0], nn.Module):
        came = f"{len(built)} values" if isinstance(built, tuple | list) else of_class(built)
        wanted = "(model, optimizer, loss_fn, batches), or None after training by itself"
        raise _Misuse(f"build_fn returned {came}; wanted {wanted}", TypeError)
    if any(ref() is built[0] for ref in known):
        raise _Misuse("build_fn returned the same model twice; make a new one at each call")
    known.append(weakref.ref(built[0]))
    return built


def _train(
    model: nn.Module,
    optimizer: Any,
    loss_fn: Callable[..., Tensor],
    batches: Iterable[Any],
    job: _Job,
) -> None:
    steps, evaluate, first = job.plan.steps, job.evaluate, job.first
    model, optimizer = initialize(model, optimizer)  # the level comes from the environment variables
    loss_fn = in_force(loss_fn)  # `build_fn` returned torch's function before O1 installed its casts
    with suppress(Enough):
        passes = 0
        while not passes or steps is not None:
            if not _epoch(model, optimizer, loss_fn, batches, None if passes else first):
                words = "nothing: drop_last over fewer samples than a batch, or an iterator that an earlier run used up"
                if passes:
                    words = f"nothing after pass {passes}, and steps is {steps}; an iterator ends: return a list"
                raise _Misuse(f"the batches of build_fn gave {words}")
            passes += 1
    if evaluate is None:
        return
    model.eval()
    try:
        with torch.no_grad():
            found = evaluate(model)
    except (Exception, SystemExit) as error:
        raise _NoFigure(f"evaluate raised {type(error).__name__}: {error}") from error
    figures = found if isinstance(found, dict) and found else {_EVALUATION: found}
    if LOSS in figures:
        words = "a figure named 'loss', which is the training loss; name it otherwise, as held_out_loss"
        raise _Misuse(f"evaluate returned {words}")
    if job.by_evaluation and len(figures) > 1:
        words = f"{listed([*figures])}; name the one that decides, as metric={next(iter(figures))!r}"
        raise _Misuse(f"evaluate returned {words}")
    if job.by_evaluation:
        figures = {**figures, _EVALUATION: next(iter(figures.values()))}
    try:
        for name, value in figures.items():
            is_numpys = hasattr(value, "__array__") and not isinstance(value, Tensor)
            log(**{name: value.item() if is_numpys else value})
    except (TypeError, ValueError) as error:
        raise _NoFigure(f"evaluate returned no number: {error}") from error


def _epoch(
    model: nn.Module, optimizer: Any, loss_fn: Callable[..., Tensor], batches: Iterable[Any], first: FirstBatch | None
) -> bool:
    """Train over all batches. Return False if there was none, as from an iterator that an earlier run used up."""
    batch = None
    for batch in batches:
        *inputs, targets = batch
        if first is not None:
            first.see(model, inputs, targets)
        optimizer.zero_grad()
        loss = loss_fn(model(*inputs), targets)
        with scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    return batch is not None
