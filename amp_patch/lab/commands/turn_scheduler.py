"""The scheduler of compared runs: it decides which run trains.

The levels of a seed train in turns of half a second, or of one step if that is longer, so that changes of the machine's
load affect all levels alike. One run trains at a time. The other levels begin after the first turn of the first level.
By then a script that cannot be compared is refused, and a script with an error of its own has failed.

On a GPU, or if the memory is too small for all levels, each run ends before the next begins. On a GPU the free memory
decides which algorithms cuDNN chooses, and some scripts choose their batch by it, so other runs would change results.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from amp_patch.lab.commands.compare_child import Child, was_out_of_memory
from amp_patch.lab.commands.compare_folder import is_finished
from amp_patch.lab.commands.compare_progress import Progress
from amp_patch.lab.commands.interrupts import Ended, Interrupts
from amp_patch.lab.commands.turn_client import LAST, TURN
from amp_patch.lab.comparison.lost_without_masters import with_masters
from amp_patch.lab.comparison.other_work import OtherWork
from amp_patch.lab.comparison.plan import Plan
from amp_patch.lab.comparison.processes import free_bytes, private_bytes
from amp_patch.lab.recording.run import EXITED, INTERRUPTED, NATIVE, OVERDUE, Run

_PATIENCE = 5.0  # seconds for interrupted scripts to end
_FILLED = 0.8  # the share of the free memory that the levels' first steps may take; later steps can take more


class ComparisonRefused(Exception):
    """The script cannot be trained at another level unedited; the message names the lines to add."""


class ScriptFailed(Exception):
    """The script failed at the first level before its first step; the message has the error and its place."""


@contextmanager
def ended_by_failures(command: str, script: str) -> Iterator[None]:
    """End the process with a message if a `TurnScheduler` in the body raises: status 2 if it refuses, 1 if it fails."""
    try:
        yield
    except ComparisonRefused as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except ScriptFailed as error:
        print(f"{command}: {script} has failed {error}", file=sys.stderr)
        sys.exit(1)


class TurnScheduler:
    """A scheduler that makes the runs of a plan: all levels of a seed, then the next seed.

    Args:
        interrupts: the signals that end the runs.
        found: runs of an earlier `compare` in this folder; those that have finished are not made again.
        decided: called after each seed with the runs so far. If it returns True, the other seeds are not trained.
        tells_time: whether to print the expected times, of a step and of all runs. A search has a scheduler for each
            trial, and sets this for the first trial only.

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
        tells_time: bool = True,
    ) -> None:
        finished = {(run.level, run.seed): run for run in found if is_finished(run)}
        self._plan = plan
        self._added = {level for run in found for level in self._more_levels(run)}
        planned = plan.runs() + [Run(level, seed) for level in sorted(self._added) for seed in range(plan.seeds)]
        self.runs = sorted((finished.get((run.level, run.seed), run) for run in planned), key=lambda run: run.seed)
        self._to_make = [run for run in self.runs if all(run is not each for each in finished.values())]
        self.asked = len(self.runs)
        self.load = OtherWork()
        self._args = args
        self._interrupts = interrupts
        self._decided = decided
        self._progress = Progress(self._to_make, plan.steps, finished=len(finished), tells_time=tells_time)
        self._in_turns = not args.one_by_one and os.name == "posix"
        self._memory_checked = False  # whether the first run has shown what memory the levels need
        self._queue: deque[Run | Child] = deque()  # the next to train comes first
        self._rerun: list[Run] = []
        self._alive: list[Child] = []

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
            for child in self._alive:
                child.kill()
            self._progress.close()
        return 0

    def _interrupt(self) -> None:
        self._progress.say(f"interrupted: what trains has {_PATIENCE:.0f} seconds to end; again, and it is ended now")
        until = time.monotonic() + _PATIENCE
        for child in self._alive:
            child.signal_interrupt()
        for child in self._alive:
            child.interrupt(until, lambda: self._interrupts.hurried)
            child.keep_outcome()
        told = [run for run in self.runs if run.steps or (run.error is not None and run.error_kind != INTERRUPTED)]
        self.runs = told or self.runs[:1]
        ended, self._alive = self._alive, []
        for child in ended:
            if any(child.run is run for run in self.runs):
                self._progress.end(child.run)

    def _look(self, run: Run) -> str | None:
        self._progress.show(run)
        self._interrupts.check()
        return self._progress.overdue(run)

    def _train_seed(self, seed: int) -> None:
        self._queue.extend(run for run in self._to_make if run.seed == seed)
        while self._queue:
            if not self._in_turns:  # begun runs come first, so each ends before another begins
                self._queue = deque(sorted(self._queue, key=lambda each: isinstance(each, Run)))
            child = self._child_of(self._queue.popleft(), self._in_turns)
            message = child.train(self._look, TURN if self._in_turns else LAST)
            if message is None:
                self._end(child)
            else:
                self._use_message(message, child)
                self._queue.append(child)
        while self._rerun:
            run = self._rerun.pop(0)
            child = self._child_of(run, False)
            child.train(self._look)
            run.notes.append("the memory did not do for all levels at once: this run was made again by itself")
            self._end(child)

    def _child_of(self, of: Run | Child, in_turns: bool) -> Child:
        if isinstance(of, Child):
            return of
        child = Child(self._plan, self._args, of, in_turns, self.load)
        self._alive.append(child)
        return child

    def _use_message(self, message: dict[str, Any], child: Child) -> None:
        """Add the runs that a message requires, by which the process of `child` hands its turn on (`_more_levels`).

        The first message also decides whether the runs take turns. If the script uses CUDA, or if the memory is too
        small for all levels of a seed at once, each run ends before the next begins.
        """
        self._add_runs(child.run, native=message["native"])
        if not self._memory_checked:
            self._memory_checked = True
            waiting = sum(run.seed == child.run.seed for run in self.runs) - 1
            free = free_bytes()
            fits = free is None or waiting * private_bytes(child.pid) < _FILLED * free
            self._in_turns = fits and not message["cuda"]

    def _end(self, child: Child) -> None:
        run = child.run
        self._alive.remove(child)
        if self._alive and was_out_of_memory(run):
            fresh = Run(run.level, run.seed)
            for runs in (self.runs, self._to_make):
                runs[next(i for i, each in enumerate(runs) if each is run)] = fresh
            self._rerun.append(fresh)
            self._in_turns = False  # memory would run out at the next seed too
            return
        child.keep_outcome()
        if run is self.runs[0] and not run.steps and not run.refused and _failed_by_itself(run):
            raise ScriptFailed(f"at {run.level}, before its first step: {run.error_in_full}")
        self._progress.end(run)
        if run.error_kind == OVERDUE:  # the level's other seeds would take as long
            for runs in (self.runs, self._to_make):
                runs[:] = [each for each in runs if each.level != run.level or each.seed <= run.seed]
            self.asked = len(self.runs)
        self._add_runs(run)
        if run.refused and (run is self.runs[0] or not any(each.steps for each in self.runs)):
            raise ComparisonRefused(run.error)  # any other level and seed would be refused alike

    def _add_runs(self, run: Run, native: bool = False) -> None:
        """Add runs of each level in `_more_levels` that was not added yet, with the seed of `run` and later seeds."""
        for level in self._more_levels(run, native=native) - self._added:
            self._added.add(level)
            added = [Run(level, seed) for seed in range(run.seed, self._plan.seeds)]
            for runs in (self.runs, self._to_make):
                runs += added
                runs.sort(key=lambda each: each.seed)
            self.asked = len(self.runs)
            self._queue.append(added[0])

    def _more_levels(self, run: Run, native: bool = False) -> set[str]:
        """Return the names of the levels that the plan lacks, as the events of `run` show; an empty set in a search.

        The set has NATIVE, if the script uses torch's mixed precision (`native`, or as the run recorded). It has a
        level with masters, if the script's weights are in low precision and no level of the plan has masters for them.
        """
        if self._plan.keep is not None:
            return set()
        more = {NATIVE} if native or run.native or run.level == NATIVE else set()
        return more if self._plan.has_masters(run.weights_type) else {*more, with_masters(run.weights_type)}


def _failed_by_itself(run: Run) -> bool:
    """Return whether an error of the script ended the run: not lack of memory, and no signal. It would fail again."""
    return run.error is not None and run.error_kind in ("", EXITED)
