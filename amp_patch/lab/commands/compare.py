"""`python -m amp_patch compare`: a script once per opt level and seed, each in a process of its own, and the report."""

from __future__ import annotations

import argparse
import io
import os
import shlex
import sys
from pathlib import Path

import torch

from amp_patch.casts.cpu_half import has_arithmetic
from amp_patch.lab.commands import batch_search, compare_launcher
from amp_patch.lab.commands.interrupts import as_interrupts
from amp_patch.lab.commands.turn_scheduler import ComparisonRefused, TurnScheduler
from amp_patch.lab.comparison import page, table
from amp_patch.lab.comparison.comparison import Comparison
from amp_patch.lab.comparison.machine import machine, products_in_words
from amp_patch.lab.comparison.other_work import OtherWork
from amp_patch.lab.comparison.plan import BASELINE, LEVELS, Plan, quick_levels
from amp_patch.lab.recording.run import Run
from amp_patch.policy import OPT_LEVELS

_EPILOG = """
The script is not changed: AMP_PATCH_OPT_LEVEL (and with --dtype AMP_PATCH_DTYPE) overrides what it gives to
amp.initialize, and AMP_PATCH_SEED tells it the seed, should it ask. Its loss, times, memory and loss scale are recorded
from amp.scale_loss and optimizer.step; it may add figures of its own with amp.log(held_out_loss=...).

Seeds: all levels of a seed start from the same random state. Seed 0 leaves the seeds that the script sets as they are;
for seed n, 1,000,003 n is added to what it gives to torch.manual_seed, random.seed and numpy.random.seed, and not to
Generator.manual_seed or numpy.random.default_rng. With --seed-flag --seed the script is given `--seed n` instead.

The levels of a seed train in turns of half a second, one at a time, so that other work on the machine falls on all of
them alike; on a GPU the runs follow each other. From the first file that the script writes, or process that it starts,
a run goes on to its end by itself: what it reads back is its own. A script that ends by the clock wants --one-by-one,
and one that resumes from a checkpoint it finds in the working directory has to be told not to. What it prints goes to
runs/LEVEL-seedN.log in the folder of --out. What a run has started ends with it. Ctrl-C keeps what has finished, as
do SIGTERM and SIGHUP. The exit status is 0 if two levels can be compared, 1 if not, 130 if Ctrl-C is why (143 and 129:
the others), and 2 for arguments that cannot be.
"""


_SEEDS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `compare`."""
    parser.usage = "python -m amp_patch compare [options] [-m] script [options] [-- the script's own arguments]"
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add(
        "--levels",
        help=f"of {', '.join(OPT_LEVELS)}; O0 is always there (default {','.join(LEVELS)})",
    )
    add(
        "--quick",
        action="store_true",
        help="a first answer from three runs: one seed of O0, O4 and O5, or with --dtype float16 of O0, O1 and O2",
    )
    add("--dtype", help="float16 or bfloat16 at O1, O2 and O3; O4 and O5 are bfloat16 (default: as the script has it)")
    add("--steps", type=int, help="end each run after so many optimizer steps, before an evaluation that follows them")
    add("--seeds", type=int, help=f"repetitions; the verdict needs several (default {_SEEDS})")
    add("--seed-flag", metavar="FLAG", help="the script's own option for a seed")
    add("--metric", default="loss", help="compare by this name of amp.log's (default: the training loss)")
    add("--maximize", action="store_true", help="more of the metric is better")
    add("--inspect", action="store_true", help="look at exponents, overflows and errors with amp.inspect; costs time")
    add("--one-by-one", action="store_true", help="let each run end before the next begins")
    batch_search.add_arguments(parser)
    add("--device", choices=["cpu"], help="cpu: where the script says CUDA, take the CPU")
    add("--out", type=Path, default=Path("amp_compare"), help="folder of the report (default %(default)s)")
    add("-m", dest="module", action="store_true", help="script is a module, as in python -m")
    add("script", help="a script, or a folder or zip file with a __main__.py, or with -m a module")


def split(given: list[str]) -> tuple[list[str], list[str]]:
    """The arguments that are ours, and those after `--`, the script's."""
    end = given.index("--") if "--" in given else len(given)
    own = given[:end]
    for flag in ("--seed-flag", "--batch-flag"):
        if flag in own[:-1]:  # argparse would take `--seed` for an option of ours, not for the value
            at = own.index(flag)
            own[at : at + 2] = ["=".join(own[at : at + 2])]
    return own, given[end + 1 :]


def compare(args: argparse.Namespace) -> None:
    """run a script at several opt levels, compare speed, memory and loss, and write a report"""
    try:
        compare_launcher.refuse_ranks()
        plan = _plan(args)
        if not args.module and not os.path.exists(args.script):
            raise ValueError(f"compare: there is no {args.script!r} here")
        folder = args.out / "runs"
        if folder.is_symlink():  # never write through a link: its target is not ours
            folder.unlink()
        folder.mkdir(parents=True, exist_ok=True)
        if args.batch_search is not None:
            with as_interrupts():
                sys.exit(batch_search.run(args, plan))
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    if isinstance(sys.stdout, io.TextIOWrapper):  # else a letter that it lacks would raise
        sys.stdout.reconfigure(errors="replace")
    _tell_of_emulated_products(plan)
    if compare_launcher.shares_port() and not args.one_by_one:
        print("MASTER_PORT is set, on which one run at a time can listen: each ends before the next begins", flush=True)
        args.one_by_one = True
    try:
        runs, interrupted, load = _measure(plan, args)
    except ComparisonRefused as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    script = ["-m", args.script] if args.module else [Path(args.script).name]
    title = shlex.join([*script, *args.arguments])
    levels = ",".join(level for level in plan.levels if level != BASELINE)
    to_judge = f"--levels {levels} --seeds {_SEEDS}" if args.quick else ""
    comparison = Comparison(title, runs, plan.metric, plan.maximize, plan.steps, machine(load), to_judge)
    failure, where = _write(comparison, args.out)  # before the table: its reader may close the pipe
    for line in table.lines(comparison, colours=sys.stdout.isatty() and "NO_COLOR" not in os.environ):
        print(line)
    print(f"report: {where}")
    if failure is not None or not comparison.comparable:
        sys.exit(interrupted or 1)


def _plan(args: argparse.Namespace) -> Plan:
    """
    Raises:
        ValueError: what cannot be compared, or flags that contradict --quick.
    """
    own = {"--levels": args.levels, "--seeds": args.seeds, "--batch-search": args.batch_search}
    for flag, value in own.items():
        if args.quick and value is not None:
            raise ValueError(f"compare: --quick has levels and seeds of its own, and {flag} contradicts it; give one")
    levels = tuple(level.strip() for level in args.levels.split(",")) if args.levels is not None else LEVELS
    return Plan(
        levels=quick_levels(args.dtype) if args.quick else levels,
        seeds=1 if args.quick else _SEEDS if args.seeds is None else args.seeds,
        steps=args.steps,
        dtype=args.dtype,
        metric=args.metric,
        maximize=args.maximize,
        inspect=args.inspect,
    )


def _measure(plan: Plan, args: argparse.Namespace) -> tuple[list[Run], int, OtherWork]:
    """The runs that were begun, the exit status of what interrupted them, and what other work took of the machine."""
    scheduler = TurnScheduler(plan, args)
    with as_interrupts():
        interrupted = scheduler.train()
    return scheduler.runs, interrupted, scheduler.load


def _write(comparison: Comparison, folder: Path) -> tuple[OSError | None, str]:
    """Write the report: why that failed, and where it is or why it is not."""
    try:
        return None, str(page.write(comparison, folder))
    except OSError as error:
        return error, f"not written: {error}"


def _tell_of_emulated_products(plan: Plan) -> None:
    """Print a line where BF16 is emulated: its speed there is FP32's, and no property of the level."""
    with_bf16 = any(OPT_LEVELS[level].dtype is torch.bfloat16 for level in plan.levels) or plan.dtype == "bfloat16"
    if with_bf16 and not torch.cuda.is_available() and not has_arithmetic(torch.bfloat16):
        print(f"BF16: {products_in_words(torch.bfloat16)}", flush=True)
