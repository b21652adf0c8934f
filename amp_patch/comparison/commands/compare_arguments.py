"""The arguments of `python -m amp_patch compare`, and the plan that they describe."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from amp_patch.comparison.commands import batch_search, compare_baseline
from amp_patch.comparison.plan import LEVELS, MARGIN, MEMORY, MIN_GAIN, SEEDS, SMALL, SPEED, Plan, levels_for
from amp_patch.environment import RUNGS
from amp_patch.policy import OPT_LEVELS
from amp_patch.run import no_cuda
from amp_patch.run.run import add_cast_arguments, notebook_advice

_OF_PLAN = ("steps", "dtype", "metric", "maximize", "min_gain", "margin")
_OF_ONE_CALL = ("out", "levels", "seeds", "quick", "resume", "module", "script", "arguments", "baseline")
# Environment variables of launchers: the numbers of ranks, and the mark of torchrun.
_RANKS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
_TORCHRUN = "TORCHELASTIC_RUN_ID"
_EPILOG = """
The script is not changed. AMP_PATCH_OPT_LEVEL (and with --dtype AMP_PATCH_DTYPE) overrides its arguments of
amp.initialize; it can read the seed from AMP_PATCH_SEED. Its loss, times, memory and loss scale are recorded by
amp.scale_loss and optimizer.step, and it may add figures of its own with amp.log(held_out_loss=...).

Seeds: all levels of a seed start from the same random state. At seed 0 the script's own seeds stay as they are. At seed
n, 1,000,003 n is added to its arguments of torch.manual_seed, random.seed and numpy.random.seed, but not to those of
Generator.manual_seed and numpy.random.default_rng. With --seed-flag --seed the script is given `--seed n` instead.

Each run ends before the next begins. If other work takes more than a tenth of a CPU's cores meanwhile, speeds are
judged by the CPU time of the runs. If a script resumes from a checkpoint in the working directory, tell it not to. Its
output goes to runs/LEVEL-seedN.log in the folder of --out. When a run ends, the processes that it started are ended.

Ctrl-C, SIGTERM and SIGHUP end the runs, and the finished ones are reported; a second signal does not wait for the
script. `compare --resume FOLDER` makes the missing runs, `python -m amp_patch report FOLDER` reports the present ones.
The exit status is 0 if two levels can be compared, 1 if not, if the script fails before its first step or if nothing
can be compared with --baseline, 2 for invalid arguments, 3 if a level has become worse since --baseline, and 130, 143
or 129 if Ctrl-C, SIGTERM or SIGHUP has ended runs.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `compare`."""
    parser.usage = "python -m amp_patch compare [options] [-m] script [options] [-- the script's own arguments]"
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add(
        "--levels",
        help=f"of {', '.join(OPT_LEVELS)}, each with {', '.join(f'+{rung}' for rung in RUNGS)} if wanted (O5+split); "
        f"O0 is always added (default {','.join(LEVELS)})",
    )
    add(
        "--quick",
        action="store_true",
        help="a first answer from three runs: one seed of O0, O4 and O5, or with --dtype float16 of O0, O1 and O2",
    )
    add("--dtype", help="float16 or bfloat16 at O1, O2 and O3; O4 and O5 are bfloat16 (default: as the script has it)")
    add("--steps", type=int, help="end each run after so many optimizer steps, before an evaluation that follows them")
    add("--seeds", type=int, help=f"repetitions; the verdict needs several (default {SEEDS})")
    add_judging_arguments(parser)
    add(
        "--min-gain",
        type=float,
        default=100 * MIN_GAIN,
        metavar="PERCENT",
        help="recommend a level for its memory only if it saves more than this of the training's (default %(default)g)",
    )
    add(
        "--for",
        choices=(SPEED, MEMORY),
        default=SPEED,
        help="of the levels as good as O0, recommend the fastest (speed, the default), or the smallest (memory), with "
        f"{' and '.join(SMALL)} among them; a script with BF16 weights gets these in any case",
    )
    batch_search.add_arguments(parser)
    compare_baseline.add_arguments(parser)
    add("--out", type=Path, default=Path("amp_compare"), help="folder of the report (default %(default)s)")
    add("--resume", type=Path, metavar="FOLDER", help="make the runs that a comparison in this folder lacks")
    add_cast_arguments(parser)
    add_script_arguments(parser)


def add_judging_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments for judging the runs of a level: the seed flag, the metric, its direction, the margin."""
    add = parser.add_argument
    add("--seed-flag", metavar="FLAG", help="the script's own option for a seed")
    add("--metric", default="loss", help="compare by this name of amp.log's (default: the training loss)")
    add("--maximize", action="store_true", help="more of the metric is better")
    add(
        "--margin",
        type=float,
        default=100 * MARGIN,
        metavar="PERCENT",
        help="a level is as good as O0 if its result is worse by at most this share (default %(default)g)",
    )


def add_script_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that name the script and its device."""
    add = parser.add_argument
    add("--device", type=no_cuda.here, help="cpu, mps or xpu: where the script says CUDA, take this device")
    add("-m", dest="module", action="store_true", help="script is a module, as in python -m")
    add("script", nargs="?", help="a script, or a folder or zip file with a __main__.py, or with -m a module")


def defaults(declare: Callable[[argparse.ArgumentParser], None] = add_arguments) -> dict[str, Any]:
    """Return {name: default value} of the arguments of `compare`, or of the command whose `declare` is passed."""
    parser = argparse.ArgumentParser()
    declare(parser)
    return {**vars(parser.parse_args([])), "arguments": []}


def again(args: argparse.Namespace) -> str:
    """Return the shell arguments of a `compare` of the same script: options, script, the script's arguments.

    Levels, seeds and options with their default value are left out: the caller puts levels and seeds in front.
    """
    options = []
    for name, usual in defaults().items():
        value = getattr(args, name, usual)
        if value != usual and name not in _OF_ONE_CALL:
            option = f"--{name.replace('_', '-')}"
            options.append(option if value is True else f"{option}={value}")
    script = ["-m", args.script] if args.module else [args.script]
    return shlex.join([*options, *script, *(["--", *args.arguments] if args.arguments else [])])


def refuse_ranks(environment: Mapping[str, str] = os.environ) -> None:
    """Raise in a process that is one of several ranks, or that torchrun has started: each would compare by itself.

    Raises:
        ValueError: this is such a process; the message names the environment variable.
    """
    several = [name for name in _RANKS if (size := environment.get(name, "")).isdecimal() and int(size) > 1]
    several += [_TORCHRUN] if environment.get(_TORCHRUN) else []
    if several:
        told = f"{several[0]}={environment[several[0]]}"
        raise ValueError(
            f"compare: a launcher has started this process ({told}), and each rank would compare "
            "by itself. Start compare in one process, without a launcher. To train several ranks at a level: "
            "AMP_PATCH_OPT_LEVEL=O2 torchrun --nproc-per-node 2 -m amp_patch run train.py"
        )


def check_script(args: argparse.Namespace, command: str, resumes: str) -> None:
    """Check that the arguments name a script, and that its file exists and is no notebook.

    Args:
        resumes: the name of the work that `--resume` continues, such as "a comparison's", for the message.

    Raises:
        ValueError: there is no script to run.
    """
    if args.script is None:
        raise ValueError(f"{command}: there is no script to run: add its name, or --resume with {resumes} folder")
    if not args.module and not os.path.exists(args.script):
        raise ValueError(f"{command}: there is no {args.script!r} here")
    if not args.module and (advice := notebook_advice(args.script)):
        inside = "; or call amp.compare(train) in it, train being a function" if command == "compare" else ""
        raise ValueError(f"{command}: {advice}{inside}")


def split(given: list[str]) -> tuple[list[str], list[str]]:
    """Split a command line at `--`. Return (arguments of `compare`, arguments of the script)."""
    end = given.index("--") if "--" in given else len(given)
    own = given[:end]
    for flag in ("--seed-flag", "--batch-flag"):
        if flag in own[:-1]:  # argparse would parse `--seed` as an option, not as the value
            at = own.index(flag)
            own[at : at + 2] = ["=".join(own[at : at + 2])]
    return own, given[end + 1 :]


def plan_of(args: argparse.Namespace) -> Plan:
    """Return the plan of a comparison.

    Raises:
        ValueError: the arguments describe no valid comparison, or contradict --quick.
    """
    own = {"--levels": args.levels, "--seeds": args.seeds, "--batch-search": args.batch_search}
    for flag, value in own.items():
        if args.quick and value is not None:
            raise ValueError(f"compare: --quick has levels and seeds of its own, and {flag} contradicts it; give one")
    goal = getattr(args, "for", SPEED)
    named = None if args.levels is None else tuple(level.strip() for level in args.levels.split(","))
    levels = levels_for(goal, args.dtype, args.quick) if named is None else named
    return Plan(
        levels=levels,
        seeds=1 if args.quick else SEEDS if args.seeds is None else args.seeds,
        goal=goal,
        **{name: getattr(args, name) for name in _OF_PLAN},
    )
