"""The order of compared runs: all levels of a seed one after the other, then the next seed.

The first run shows whether the script can be compared, or has an error of its own.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from amp_patch.comparison.commands.compare_child import Child, note_caught
from amp_patch.comparison.commands.compare_folder import is_finished
from amp_patch.comparison.commands.compare_progress import Progress
from amp_patch.comparison.commands.interrupts import Ended, Interrupts
from amp_patch.comparison.commands.long_steps import LongSteps
from amp_patch.comparison.lost_without_masters import with_masters
from amp_patch.comparison.other_work import OtherWork
from amp_patch.comparison.plan import BASELINE, SMALL, Plan
from amp_patch.diagnose.recording.run import EXITED, INTERRUPTED, NATIVE, OVERDUE, UNTRAINED, Run

_PATIENCE = 5.0  # seconds for interrupted scripts to end


class ComparisonRefused(Exception):
    """The script cannot be trained at another level unedited; the message names the lines to add."""


class ScriptFailed(Exception):
    """The script failed at the first level before its first step; the message has the error and its place."""


@contextmanager
def ended_by_failures(command: str, script: str) -> Iterator[None]:
    """End the process with a message if a `RunSequence` in the body raises: status 2 if it refuses, 1 if it fails."""
    try:
        yield
    except ComparisonRefused as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except ScriptFailed as error:
        print(f"{command}: {script} has failed {error}", file=sys.stderr)
        sys.exit(1)


class RunSequence:
    """The runs of a plan, made one after the other.

    Args:
        interrupts: the signals that end the runs.
        found: runs of an earlier `compare` in this folder; those that have finished are not made again.
        decided: called after each seed with the runs so far. If it returns True, the other seeds are not trained.

    Attributes:
        runs: the runs of the plan. If the script uses torch's mixed precision, a run of it as it is (NATIVE) is added
            for each seed. If its weights are in low precision and no level of the plan has masters for that type, runs
            of a level with masters are added.
        asked: the planned number of runs.
        load: the other work on the machine during the runs.
    """

    def __init__(
        self,
        plan: Plan,
        args: argparse.Namespace,
        interrupts: Interrupts,
        found: Sequence[Run] = (),
        *,
        decided: Callable[[list[Run]], bool] = lambda runs: False,
    ) -> None:
        finished = {(run.level, run.seed): run for run in found if is_finished(run)}
        self._plan = plan
        self._args = args
        self._added = {level for run in found for level in {run.level, *self._more_levels(run)} - {*plan.levels}}
        planned = plan.runs() + [Run(level, seed) for level in sorted(self._added) for seed in range(plan.seeds)]
        self.runs = sorted((finished.get((run.level, run.seed), run) for run in planned), key=lambda run: run.seed)
        self._to_make = [run for run in self.runs if all(run is not each for each in finished.values())]
        self.asked = len(self.runs)
        self.load = OtherWork()
        self._interrupts = interrupts
        self._decided = decided
        self._progress = Progress(self._to_make, plan.steps, finished=len(finished))
        self._long_steps = LongSteps()
        self._begun: set[int] = set()  # ids of runs in `_to_make`
        self._child: Child | None = None  # the run that trains

    def train(self) -> int:
        """Train the runs of the plan that are not finished.

        Return 0; if a signal interrupted the runs, the exit status for that signal. `runs` then has only the runs that
        failed or took a step.

        Raises:
            ComparisonRefused: the script cannot be compared.
            ScriptFailed: the script has an error of its own.
        """
        self._progress.begin(len(self._plan.levels), self._plan.seeds)
        try:
            for seed in range(self._plan.seeds):
                self._train_seed(seed)
                # If the script fails with the first seed at each level, it would fail with the others too.
                failed = seed == 0 and all(_failed_by_itself(run) for run in self.runs if run.seed == seed)
                later = {id(run) for run in self._to_make if run.seed > seed}
                so_far = [run for run in self.runs if id(run) not in later]
                if later and (failed or self._decided(so_far)):
                    why = "every level has failed" if failed else "every level is decided"
                    self._progress.say(f"{why} with seed {seed}: other seeds are not tried")
                    self.runs = so_far
                    self.asked = len(self.runs)
                    break
        except Ended as interrupt:
            self._interrupt()
            return interrupt.status
        finally:
            if self._child is not None:
                self._child.kill()
            self._progress.close()
        return 0

    def _interrupt(self) -> None:
        self._progress.say(f"interrupted: what trains has {_PATIENCE:.0f} seconds to end; again, and it is ended now")
        if (child := self._child) is not None:
            child.interrupt(time.monotonic() + _PATIENCE, lambda: self._interrupts.hurried)
            child.keep_outcome()
        told = [run for run in self.runs if run.steps or (run.error is not None and run.error_kind != INTERRUPTED)]
        self.runs = told or self.runs[:1]
        ended, self._child = self._child, None
        if ended is not None and any(ended.run is run for run in self.runs):
            self._progress.end(ended.run)

    def _look(self, run: Run) -> str | None:
        self._progress.show(run)
        self._interrupts.check()
        return self._long_steps.overdue(run)

    def _next(self, seed: int) -> Run | None:
        """Return the next run of the seed; None after the last. `_end` may have added or removed runs."""
        return next((run for run in self._to_make if run.seed == seed and id(run) not in self._begun), None)

    def _train_seed(self, seed: int) -> None:
        while (run := self._next(seed)) is not None:
            self._begun.add(id(run))
            self._child = Child(self._plan, self._args, run, self.load)
            self._child.train(self._look)
            child, self._child = self._child, None
            known = [each for each in self.runs if each.level == BASELINE and each.steps and each.seed in (0, seed)]
            if known and (run.error is None or run.error_kind == UNTRAINED):
                note_caught(run, known[-1])
            child.keep_outcome()
            self._end(run)

    def _end(self, run: Run) -> None:
        if run is self.runs[0] and not run.steps and not run.refused and _failed_by_itself(run):
            raise ScriptFailed(f"at {run.level}, before its first step: {run.error_in_full}")
        self._progress.end(run)
        if run.error_kind == OVERDUE:  # the level's other seeds would take as long
            for runs in (self.runs, self._to_make):
                runs[:] = [each for each in runs if each.level != run.level or each.seed <= run.seed]
        for level in sorted(self._more_levels(run) - self._added):
            self._added.add(level)
            added = [Run(level, seed) for seed in range(run.seed, self._plan.seeds)]
            for runs in (self.runs, self._to_make):
                runs += added
                runs.sort(key=lambda each: each.seed)
        self.asked = len(self.runs)
        if run.refused and (run is self.runs[0] or not any(each.steps for each in self.runs)):
            raise ComparisonRefused(run.error)  # any other level and seed would be refused alike

    def _more_levels(self, run: Run) -> set[str]:
        """Return the names of the levels that the plan lacks, as the events of `run` show; an empty set in a search.

        The set has NATIVE, if the script uses torch's mixed precision. If the script's weights are in low precision, it
        has a level with masters for them, and the rungs with BF16 weights, unless the levels were named.
        """
        if self._plan.keep is not None:
            return set()
        more = {NATIVE} if run.native or run.level == NATIVE else set()
        if not self._plan.has_masters(run.weights_type):
            more.add(with_masters(run.weights_type))
        if run.weights_type == "bfloat16" and self._args.levels is None:
            more.update(SMALL)
        return more - {*self._plan.levels}


def _failed_by_itself(run: Run) -> bool:
    """Return whether an error of the script ended the run: not lack of memory, and no signal. It would fail again."""
    return run.error is not None and run.error_kind in ("", EXITED, UNTRAINED)
