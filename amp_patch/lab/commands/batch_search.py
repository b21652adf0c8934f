"""`python -m amp_patch compare --batch-search 8GiB`: the largest batch of a script that fits, at each level."""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import replace
from typing import Any

from amp_patch.lab.commands.compare_child import Child, was_out_of_memory
from amp_patch.lab.commands.interrupts import Ended, Interrupts
from amp_patch.lab.comparison import batch_search, measures
from amp_patch.lab.comparison.batch_search import Search, Trial
from amp_patch.lab.comparison.machine import machine
from amp_patch.lab.comparison.other_work import OtherWork
from amp_patch.lab.comparison.plan import Plan
from amp_patch.lab.recording.run import Run, dumps
from amp_patch.support.files import write_whole

_STEPS = 4  # of a trial: step 1 warms up, 2 and 4 are timed, 3 counts the activations
_FREE = "import torch; print(torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else '')"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--batch-search`, `--batch-flag` and `--batch-dim`."""
    parser.add_argument(
        "--batch-search",
        metavar="SIZE",
        help="do not compare; find the largest batch that fits into this memory (8GiB, or free: the GPU's free memory)",
    )
    parser.add_argument(
        "--batch-dim",
        type=int,
        metavar="N",
        help="the dimension of the model's first tensor that counts samples, from 0: for example 1 of (time, batch) "
        "(default: 0; in a search the dimension that changes with --batch-flag)",
    )
    words = "the script's own option for its batch size, for example --batch-size"
    parser.add_argument("--batch-flag", metavar="FLAG", help=words)


def run(args: argparse.Namespace, plan: Plan, interrupts: Interrupts) -> int:
    """Search each level of the plan, print the table, write batch_search.json, and return the exit status.

    A signal that `interrupts` received ends the search.
    """
    try:
        limit = _limit(args)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    searches: list[Search] = []
    status = 0
    try:
        for level in plan.levels:
            trials = _Trials(args, plan, level, limit, interrupts)
            found = batch_search.search(level, limit, trials.run, searches[0] if searches else None)
            if trials.refusal is not None or (not searches and found.best is None and trials.failed):
                print(trials.refusal or f"compare: {found.name} {found.problem}", file=sys.stderr)
                return 2
            searches.append(found)
    except Ended as interrupt:
        status = interrupt.status
    if searches:
        _report(searches, args)
    return status or (0 if all(each.best is not None for each in searches) else 1)


def _limit(args: argparse.Namespace) -> int:
    """Return the memory limit of a batch in bytes: the size given as --batch-search; for "free" a GPU's free memory.

    Raises:
        ValueError: --batch-flag is missing, or --batch-search is no size, or is "free" without a GPU.
    """
    if not args.batch_flag:
        raise ValueError(
            "compare: --batch-search needs the script's own option for its batch: add --batch-flag=--batch-size (the "
            "script is then given `--batch-size 8`; --batch-flag=batch_size= gives `batch_size=8`)"
        )
    if args.batch_search != "free":
        return batch_search.size_in_bytes(args.batch_search)
    # In a child process: a CUDA context of this process would take some of the free memory.
    asked = subprocess.run([sys.executable, "-c", _FREE], capture_output=True, text=True)
    if args.device is not None or not asked.stdout.strip().isdigit():
        raise ValueError("compare: --batch-search is free, and there is no GPU: give a size, as --batch-search 8GiB")
    return int(asked.stdout)


def _report(searches: list[Search], args: argparse.Namespace) -> None:
    for line in ["", *batch_search.lines(searches, args.batch_flag.rstrip("="))]:
        print(line)
    report: dict[str, Any] = {
        "script": args.script,
        "arguments": args.arguments,
        "flag": args.batch_flag,
        "limit_bytes": searches[0].limit,
        "steps": _STEPS,
        "machine": machine(),
        "levels": [search.to_dict() for search in searches],
    }
    path = args.out / "batch_search.json"
    write_whole(path, dumps(report, indent=1) + "\n")
    print(f"report: {path}")


class _Trials:
    """Short runs of the script at one level, each with another batch.

    Attributes:
        failed: whether a run failed for another reason than lack of memory.
        refusal: the message for a script that needs an edit; None without a refusal.
    """

    def __init__(self, args: argparse.Namespace, plan: Plan, level: str, limit: int, interrupts: Interrupts) -> None:
        self._args, self._plan, self._level, self._limit = args, plan, level, limit
        self._interrupts = interrupts
        self.failed = False
        self.refusal: str | None = None

    def run(self, batch: int) -> tuple[Trial, str | None]:
        """Train for a few steps with this batch.

        Returns:
            trial: the run's memory and speed, or its error.
            dtype: the level's low-precision type as the run recorded it, such as "bfloat16"; None at O0.
        """
        run = self._train(batch)
        memory = measures.memory_bytes(run) if run.error is None else None
        error = None if run.error is None else run.error_in_full
        if error is None and memory is None:
            error = (
                "its activations could not be counted: it has saved-tensor hooks around its loop, calls torch.func in "
                "a step, takes fewer than two steps, or torch is older than 2.8"
            )
        ran_out = was_out_of_memory(run)
        if error is not None and not ran_out:
            self.failed = True
            self.refusal = error if run.refused else None
        samples = max(run.samples, default=0)
        given = tuple(run.given) if self._args.batch_dim is None else ()
        trial = Trial(batch, memory, samples, measures.samples_per_second(run), error, ran_out, given)
        if memory is not None or ran_out:
            took = "out of memory" if memory is None else batch_search.in_unit_of(self._limit, memory)
            print(f"{self._level} {self._args.batch_flag.rstrip('=')} {batch}: {took}", flush=True)
        return trial, run.dtype

    def _train(self, batch: int) -> Run:
        flag, run = self._args.batch_flag, Run(self._level)
        own = [f"{flag}{batch}"] if flag.endswith("=") else [flag, str(batch)]
        plan = replace(self._plan, steps=_STEPS)
        child = Child(plan, self._args, run, OtherWork(), (f"batch-{self._level}-{batch}", own))
        try:
            child.train(lambda _: self._interrupts.check())
        except BaseException:  # among them Ctrl-C
            child.kill()
            raise
        return run
