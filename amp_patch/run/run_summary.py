"""The last line of `run`: the level, the models and optimizers trained, the steps skipped, and the peak of the memory.

It is printed to stderr, in a distributed job by the first rank only. A child process of the script that trains prints
its own line when it exits; a child that is killed prints none.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from amp_patch.diagnose import wording
from amp_patch.diagnose.recording.peak_memory import PeakMemory, process_peak
from amp_patch.diagnose.recording.sizes import alive
from amp_patch.environment import name_of
from amp_patch.run.unedited.processes import tell
from amp_patch.support.distributed import is_first_rank
from amp_patch.support.generated_class import base_class
from amp_patch.training import observers
from amp_patch.training.training import Training
from amp_patch.watch import questions

_NAMES = 3  # the line names at most this many models, and as many optimizers
_EXIT_PRIORITY = 10  # from 0 on, a finalizer runs before multiprocessing ends the children of this process


class RunSummary(observers.Observer):
    """Observer of the trainings of a process. It builds the summary line when the process ends."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._trainings: list[Training] = []
        self._levels: list[str] = []
        self._models: Counter[str] = Counter()
        self._optimizers: Counter[str] = Counter()
        self._scalers: dict[int, Any] = {}
        self._steps = 0
        self._first_rank = True
        self._peak: PeakMemory | None = None

    def training_begun(self, training: Training | None) -> None:
        if training is None:
            return
        self._take_over_fork()
        # A model that joins an optimizer later is initialized together with the earlier models: count only new ones.
        known = {id(model) for earlier in self._trainings for model in alive(earlier.models)}
        steppers = {id(optimizer) for earlier in self._trainings for optimizer in alive(earlier.optimizers)}
        self._models.update(_name(model) for model in alive(training.models) if id(model) not in known)
        self._optimizers.update(_name(each) for each in alive(training.optimizers) if id(each) not in steppers)
        policy = training.policy
        dtype = None if policy.changes_nothing else str(policy.dtype).removeprefix("torch.")
        level = wording.level_name(name_of(policy), dtype)
        self._levels += [level] if level not in self._levels else []
        self._scalers.update({id(scaler): scaler for scaler in training.scalers})
        self._trainings.append(training)
        self._first_rank = is_first_rank()
        if self._peak is None and any(p.is_cuda for model in alive(training.models) for p in model.parameters()):
            self._peak = PeakMemory()

    def step_ends(self, optimizer: Any) -> None:
        if questions.policy_of(optimizer) is None or not questions.has_stepped(optimizer):
            return
        self._take_over_fork()
        self._steps += 1
        if self._steps == 1 and multiprocessing.parent_process() is not None:
            multiprocessing.util.Finalize(None, self.tell, exitpriority=_EXIT_PRIORITY)

    def _take_over_fork(self) -> None:
        """If this process is a fork, clear what was recorded before the fork: it describes the parent's training."""
        if os.getpid() != self._process:
            self._begin()

    def tell(self) -> None:
        """Print the line, if there was a step."""
        line = self.line()
        if line is not None and self._first_rank and os.getpid() == self._process:
            who = f" process {self._process}:" if multiprocessing.parent_process() is not None else ""
            tell(f"amp_patch:{who} {line}")

    def line(self) -> str | None:
        """Return the summary line without its prefix "amp_patch:"; None if no step was made."""
        if not self._steps:
            return None
        for training in self._trainings:
            for optimizer in alive(training.optimizers):
                questions.count_skips(optimizer)
        skipped = sum(scaler.skips for scaler in self._scalers.values())
        steps = f"{wording.counted(self._steps, 'step')}, {skipped} skipped"
        trained = f"{_listed(self._models)} by {_listed(self._optimizers)}" if self._models else "nothing"
        return "; ".join(filter(None, [f"{', '.join(self._levels)} trained {trained}: {steps}", self._memory()]))

    def _memory(self) -> str:
        peak = None if self._peak is None else self._peak.read("cuda")
        if peak is not None:
            return f"peak memory of the GPU {_size(peak)}"
        whole = process_peak()
        return "" if whole is None else f"peak of the process {_size(whole)}"


@contextmanager
def told() -> Iterator[None]:
    """Print the line of `RunSummary` after the body, unless the body ends with an error."""
    summary = RunSummary()
    observers.add(summary)
    try:
        yield
    except SystemExit as error:
        if error.code in (None, 0):
            summary.tell()
        raise
    else:
        summary.tell()
    finally:
        observers.remove(summary)


def _size(count: int) -> str:
    unit, (figure,) = wording.sizes([count])
    return f"{figure} {unit}"


def _name(value: Any) -> str:
    return base_class(value).__name__


def _listed(names: Counter[str]) -> str:
    """Format names and their counts: "Net, Head (2) and 3 others"."""
    shown = [name if count == 1 else f"{name} ({count})" for name, count in names.most_common(_NAMES)]
    others = len(names) - len(shown)
    return ", ".join(shown) + (f" and {others} others" if others else "")
