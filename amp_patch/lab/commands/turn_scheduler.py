"""Which run trains now, among those that are compared.

The levels of a seed train in turns of half a second, or a step where that takes longer: load that comes and goes falls
on all of them alike. One trains at a time. The first level begins, and the others when it has taken a step: a script
that cannot be compared is refused by then, and one that fails by itself has failed.

On a GPU, and where the memory would not do for all, each run ends before the next begins. What a GPU has left decides
how cuDNN computes and how large a batch some scripts take: beside others a run would not be what it is alone.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
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
from amp_patch.lab.recording.run import EXITED, INTERRUPTED, NATIVE, Run

_PATIENCE = 5.0  # seconds that interrupted scripts have to end by themselves
_FILLED = 0.8  # of the free memory, which first steps may fill: later steps can take more


class ComparisonRefused(Exception):
    """The script cannot be trained at another level unedited; the message names the lines to add."""


class ScriptFailed(Exception):
    """The script has failed by itself before its first step, at the first level; the message says why and where."""


@contextmanager
def ended_by_failures(command: str, script: str) -> Iterator[None]:
    """End the process, saying why, where a `TurnScheduler` in the body raises: 2 if it refuses the script, 1 if that
    has failed."""
    try:
        yield
    except ComparisonRefused as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except ScriptFailed as error:
        print(f"{command}: {script} has failed {error}", file=sys.stderr)
        sys.exit(1)


class TurnScheduler:
    """The runs of a plan, made: all levels of a seed, then the next seed.

    Args:
        interrupts: ends the runs by what it has noted.
        found: runs of an earlier call; those that have finished are not made again.
        tells_time: whether to print what a step takes, and what a number of them would: once is enough of a search.

    Attributes:
        runs: those of the plan, as far as it is known: a script with mixed precision of its own gets one more a seed.
            So does one whose weights come in low precision, if no level of the plan has masters of that type.
        asked: how many of them there should be.
        load: what other work took of the machine meanwhile.
    """

    def __init__(
        self,
        plan: Plan,
        args: argparse.Namespace,
        interrupts: Interrupts,
        found: Sequence[Run] = (),
        *,
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
        self._progress = Progress(self._to_make, plan.steps, finished=len(finished), tells_time=tells_time)
        self._in_turns = not args.one_by_one and os.name == "posix"
        self._memory_checked = False  # whether the first run has shown what memory the levels need
        self._queue: deque[Run | Child] = deque()  # the next to train comes first
        self._rerun: list[Run] = []
        self._alive: list[Child] = []

    def train(self) -> int:
        """Make the runs; the exit status of an interrupt that has ended them, else 0.

        After an interrupt `runs` has those that ended and those that took steps.

        Raises:
            ComparisonRefused: the script cannot be compared.
            ScriptFailed: the script fails by itself.
        """
        self._progress.begin(len(self._plan.levels), self._plan.seeds)
        try:
            for seed in range(self._plan.seeds):
                self._train_seed(seed)
                if self._all_failed(seed):
                    if self._plan.seeds > 1:
                        self._progress.say(f"every level has failed with seed {seed}: other seeds are not tried")
                    self.runs = [run for run in self.runs if run.seed <= seed]
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
        self.runs = [run for run in self.runs if run.steps or _has_failed(run)] or self.runs[:1]
        ended, self._alive = self._alive, []
        for child in ended:
            if any(child.run is run for run in self.runs):
                self._progress.end(child.run)

    def _all_failed(self, seed: int) -> bool:
        """Whether the first seed has shown that the script fails by itself at each level."""
        return seed == 0 and all(_failed_by_itself(run) for run in self.runs if run.seed == seed)

    def _look(self, run: Run) -> None:
        self._progress.show(run)
        self._interrupts.check()

    def _train_seed(self, seed: int) -> None:
        self._queue.extend(run for run in self._to_make if run.seed == seed)
        while self._queue:
            if not self._in_turns:  # begun runs first: each ends before another begins
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
        """Add the runs that a finished turn asks for; the first one decides if turns go on."""
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
        self._add_runs(run)
        if run.refused and (run is self.runs[0] or not any(each.steps for each in self.runs)):
            raise ComparisonRefused(run.error)  # any other level and seed would be refused alike

    def _add_runs(self, run: Run, native: bool = False) -> None:
        """Add runs of the levels beside the plan's that this run asks for, for each seed from its own on."""
        for level in self._more_levels(run, native=native) - self._added:
            self._added.add(level)
            added = [Run(level, seed) for seed in range(run.seed, self._plan.seeds)]
            for runs in (self.runs, self._to_make):
                runs += added
                runs.sort(key=lambda each: each.seed)
            self.asked = len(self.runs)
            self._queue.append(added[0])

    def _more_levels(self, run: Run, native: bool = False) -> set[str]:
        """NATIVE, of a script with mixed precision of its own; the level with masters, of one without FP32 weights."""
        if self._plan.keep is not None:
            return set()
        more = {NATIVE} if native or run.native or run.level == NATIVE else set()
        return more if self._plan.has_masters(run.weights_type) else {*more, with_masters(run.weights_type)}


def _has_failed(run: Run) -> bool:
    return run.error is not None and run.error_kind != INTERRUPTED


def _failed_by_itself(run: Run) -> bool:
    """Whether the run would fail again, whatever the machine has free."""
    return run.error is not None and run.error_kind in ("", EXITED)
