"""`python -m amp_patch report amp_compare`: the table and the page of the records of a comparison."""

from __future__ import annotations

import argparse
import io
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from amp_patch.comparison import page, table, what_next
from amp_patch.comparison.commands import compare_folder
from amp_patch.comparison.commands.compare_arguments import again, defaults, plan_of
from amp_patch.comparison.comparison import Comparison
from amp_patch.comparison.plan import Plan
from amp_patch.diagnose.recording.run import Run
from amp_patch.run.machine import machine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `report`."""
    parser.add_argument("folder", type=Path, help="the folder of a comparison (compare's --out)")


def report(args: argparse.Namespace) -> None:
    """make the table and the page of a comparison again from its folder, also while it runs, or after a cut"""
    print_any_letter()
    try:
        asked = compare_folder.asked_in(args.folder, defaults())
        plan = plan_of(asked)
        runs = compare_folder.runs_in(args.folder, plan)
        told = compare_folder.machine_in(args.folder) or machine()
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    wanted = plan.seeds * len({*plan.levels, *(run.level for run in runs)})
    if status := show(comparison_of(asked, plan, runs, wanted, told), args.folder):
        sys.exit(status)


def comparison_of(
    args: argparse.Namespace, plan: Plan, runs: Sequence[Run], asked: int, told: dict[str, str]
) -> Comparison:
    """Make a `Comparison` of the runs that `compare` has made, or read from its folder.

    Args:
        args: the arguments of `compare`, for the commands that the report prints.
        runs: the runs, finished or not.
        asked: the planned number of runs; a larger number than that of `runs` is reported as missing runs.
        told: the description of the machine from `machine()`.
    """
    script = ["-m", args.script] if args.module else [args.script]
    title = shlex.join([*script[:-1], script[-1] if args.module else Path(args.script).name, *args.arguments])
    device = [] if args.device is None else ["--device", args.device]
    return Comparison(
        title,
        list(runs),
        plan.metric,
        plan.maximize,
        plan.steps,
        told,
        again=again(args),
        asked_runs=asked,
        min_gain=plan.min_gain / 100,
        margin=plan.margin / 100,
        command=shlex.join([*device, *script, *args.arguments]),
        folder=str(args.out),
        survey=compare_folder.survey_in(args.out),
        goal=plan.goal,
    )


def show(comparison: Comparison, folder: Path) -> int:
    """Write the report and print the table; return 1 if writing failed, or if nothing can be compared, else 0."""
    failure, where = _write(comparison, folder)  # first, because the reader of the table may close the pipe
    lines = table.lines(comparison, colours=sys.stdout.isatty() and "NO_COLOR" not in os.environ)
    lines += [f"To {purpose}: {command}" for purpose, command in what_next.commands(comparison)]
    try:
        print("\n".join([*lines, f"report: {where}"]), flush=True)
    except OSError:  # the terminal was closed, or the pipe's reader has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # without this, Python's flush at exit fails
    return int(failure is not None or not comparison.comparable)


def print_any_letter() -> None:
    """Let `print` write "?" for a character that the encoding of sys.stdout lacks. Otherwise `print` would raise."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _write(comparison: Comparison, folder: Path) -> tuple[OSError | None, str]:
    """Write the report into `folder`. Return (None, path of the page); if writing failed, (error, its message)."""
    try:
        return None, str(page.write(comparison, folder))
    except OSError as error:
        return error, f"not written: {error}"
