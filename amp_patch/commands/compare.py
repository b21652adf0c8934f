"""`python -m amp_patch compare`: a script once per opt level and seed, each in a process of its own, and the report."""

from __future__ import annotations

import argparse
import copy
import importlib.util
import io
import json
import os
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from amp_patch.commands import batch_search
from amp_patch.commands.run import wanted_cuda
from amp_patch.comparison.comparison import Comparison
from amp_patch.comparison.level_result import went_well
from amp_patch.comparison.machine import SLOW, machine, products_in_words, time_of_products
from amp_patch.comparison.plan import LEVELS, NATIVE, Plan, name_as_asked
from amp_patch.policy import OPT_LEVELS
from amp_patch.recording.run import Run, loads

if TYPE_CHECKING:
    from rich.console import Console

_POLL = 0.2  # seconds between two looks at what a run has recorded
_PATIENCE = 5.0  # seconds that an interrupted script has to end by itself

_EPILOG = """
The script is not changed: AMP_PATCH_OPT_LEVEL (and with --dtype AMP_PATCH_DTYPE) overrides what it gives to
amp.initialize, and AMP_PATCH_SEED tells it the seed, should it ask. Its loss, times, memory and loss scale are recorded
from amp.scale_loss and optimizer.step; it may add figures of its own with amp.log(held_out_loss=...).

Seeds: all levels of a seed start from the same random state. Seed 0 leaves the seeds that the script sets as they are;
for seed n, 1,000,003 n is added to what it gives to torch.manual_seed, random.seed and numpy.random.seed, and not to
Generator.manual_seed or numpy.random.default_rng. With --seed-flag --seed the script is given `--seed n` instead.

The runs follow each other in the working directory: a script that resumes from a checkpoint it finds there has to be
told not to. What it prints goes to runs/LEVEL-seedN.log in the folder of --out. Ctrl-C keeps what has finished. The
exit status is 0 if two levels can be compared, 1 if not, 130 if Ctrl-C is why, and 2 for arguments that cannot be.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "python -m amp_patch compare [options] [-m] script [options] [-- the script's own arguments]"
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--levels", default=",".join(LEVELS), help=f"of {', '.join(OPT_LEVELS)}, two or more (default %(default)s)")
    add("--dtype", help="float16 or bfloat16 at O1, O2 and O3; O4 and O5 are bfloat16 (default: as the script has it)")
    add("--steps", type=int, help="end each run after so many optimizer steps, before an evaluation that follows them")
    add("--seeds", type=int, default=3, help="repetitions; the verdict needs several (default %(default)s)")
    add("--seed-flag", metavar="FLAG", help="the script's own option for a seed")
    add("--metric", default="loss", help="compare by this name of amp.log's (default: the training loss)")
    add("--maximize", action="store_true", help="more of the metric is better")
    add("--inspect", action="store_true", help="look at exponents, overflows and errors with amp.inspect; costs time")
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
        if flag in own[:-1]:  # argparse does not take `--seed` for its value
            at = own.index(flag)
            own[at : at + 2] = ["=".join(own[at : at + 2])]
    return own, given[end + 1 :]


def compare(args: argparse.Namespace) -> None:
    """run a script at several opt levels, compare speed, memory and loss, and write a report"""
    try:
        plan = Plan(
            levels=tuple(level.strip() for level in args.levels.split(",")),
            seeds=args.seeds,
            steps=args.steps,
            dtype=args.dtype,
            metric=args.metric,
            maximize=args.maximize,
            inspect=args.inspect,
        )
        if not args.module and not os.path.exists(args.script):
            raise ValueError(f"compare: there is no {args.script!r} here")
        if args.batch_search is not None:
            (args.out / "runs").mkdir(parents=True, exist_ok=True)
            sys.exit(batch_search.run(args, plan))
        absent = [name for name in ("rich", "matplotlib") if importlib.util.find_spec(name) is None]
        if absent:
            raise ValueError(
                f"compare: {' and '.join(absent)} not found; pip install rich matplotlib, or the extra report"
            )
        (args.out / "runs").mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    from rich.console import Console

    from amp_patch.comparison import page, table

    if isinstance(sys.stdout, io.TextIOWrapper):  # what it has no letter for is not worth a comparison
        sys.stdout.reconfigure(errors="replace")
    console = Console()
    _warn_of_slow_products(plan)
    try:
        runs, interrupted = _measure(plan, args, console)
    except _Refused as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    script = ["-m", args.script] if args.module else [Path(args.script).name]
    title = shlex.join([*script, *args.arguments])
    comparison = Comparison(title, runs, plan.metric, plan.maximize, plan.steps, machine())
    failure = None
    try:
        where = str(page.write(comparison, args.out))  # first: whoever reads the table may hang up
    except OSError as error:
        failure, where = error, f"not written: {error}"
    for renderable in table.tables(comparison):
        console.print(renderable)
    console.print(f"report: {where}", soft_wrap=True, highlight=False, markup=False)
    if failure is not None or not comparison.comparable:
        sys.exit(130 if interrupted else 1)


def _warn_of_slow_products(plan: Plan) -> None:
    """Say before the run where BF16 is slower than FP32, on a machine without a GPU."""
    with_bf16 = any(OPT_LEVELS[level].dtype is torch.bfloat16 for level in plan.levels) or plan.dtype == "bfloat16"
    if with_bf16 and not torch.cuda.is_available() and (ratio := time_of_products(torch.bfloat16)) > SLOW:
        print(f"BF16: {products_in_words(ratio)}", flush=True)


class _Refused(Exception):
    """The script cannot be trained at another level unedited; the message names the lines to add."""


def _measure(plan: Plan, args: argparse.Namespace, console: Console) -> tuple[list[Run], bool]:
    """The runs that were begun, and whether Ctrl-C ended them."""
    from amp_patch.commands.compare_progress import Progress

    runs = plan.runs()
    with Progress(console, runs, plan.steps).shown() as progress:
        for index, run in enumerate(runs):  # which may grow meanwhile
            progress.begin(index)
            try:
                _run(plan, args, run)
            except KeyboardInterrupt:
                run.error = f"interrupted after {run.steps} steps"
                return runs[: index + 1], True
            finally:
                progress.end(index)
            if index == 0 and run.native:
                progress.grow(plan.runs(native=True)[1:])
            if run.refused and not any(map(went_well, runs[:index])):
                raise _Refused(run.error)  # the other levels and seeds would say the same
    return runs, False


def _run(plan: Plan, args: argparse.Namespace, run: Run) -> None:
    """Run the script at the level and seed of `run`, which fills up meanwhile, and says at the end what went wrong."""
    asked = copy.deepcopy(run)
    log = Path("runs") / f"{run.level}-seed{run.seed}.log"
    record = (args.out / log).with_suffix(".jsonl").absolute()  # the script may change directory
    record.write_bytes(b"")  # instead of an earlier comparison's
    # A set of strings has another order with each seed of their hashes: let the levels agree on that, too.
    environment = {"PYTHONHASHSEED": "0", **os.environ, **plan.environment(run)}
    with open(args.out / log, "wb") as output, open(record, "rb") as lines:
        child = subprocess.Popen(
            _command(plan, args, record, asked),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        rest = b""
        try:
            while not _has_ended(child, _POLL):
                rest = _take(run, rest + lines.read())
        except KeyboardInterrupt:
            # The terminal has sent it to the child, too.
            if not _has_ended(child, _PATIENCE):
                child.terminate()
                _has_ended(child, _PATIENCE)
            raise
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
            _take(run, rest + lines.read())
            name_as_asked(run, asked)
    if run.error is None and child.returncode:
        run.error = _died(child.returncode, args.out / log)
    elif run.error is None and not _is_whole(record):
        run.error = (
            f"the recording breaks off after {run.steps} steps: by os._exit or exec in the script, or a full disk"
        )
    if run.error is not None and not run.refused:
        hint = "; --device cpu takes the CPU instead" if args.device is None and wanted_cuda(run.error) else ""
        run.error += f"{hint} (see {log})"


def _take(run: Run, recorded: bytes) -> bytes:
    """Add the events of the lines that are complete, and return the rest."""
    *lines, rest = recorded.split(b"\n")
    for line in lines:
        with suppress(json.JSONDecodeError):  # the disk was full in the middle of it
            run.add(loads(line.decode()))
    return rest


def _is_whole(record: Path) -> bool:
    *_, last = [b"", *record.read_bytes().splitlines()]
    return last.startswith(b'{"event": "end"')


def _has_ended(child: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _command(plan: Plan, args: argparse.Namespace, record: Path, run: Run) -> list[str]:
    python = [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]
    options = ["--record", str(record)]
    if plan.steps is not None:
        options += ["--steps", str(plan.steps)]
    if run.level == NATIVE:
        options += ["--native"]
    elif plan.inspect:
        options += ["--inspect"]
    if args.seed_flag is None:
        options += ["--shift"]
    if args.device is not None:
        options += ["--device", args.device]
    if args.module:
        options += ["-m"]
    own = [args.seed_flag, str(run.seed)] if args.seed_flag is not None else []
    return [*python, "-m", "amp_patch.commands.compare_worker", *options, args.script, *args.arguments, *own]


def _died(code: int, log: Path) -> str:
    """What can be said of a process that could not say itself why it ended."""
    if code < 0:
        name = signal.Signals(-code).name if -code in list(signal.Signals) else ""
        perhaps = ", perhaps for memory" if -code == signal.SIGKILL else ""
        return f"killed by signal {-code} ({name}){perhaps}"
    printed = log.read_text(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(printed) if line.strip()), "")
    return f"exit status {code}: {last}"[:300]
