"""`compare --baseline report.json`: fail if a training has become worse since an earlier comparison."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from amp_patch.comparison.comparison import Comparison
from amp_patch.comparison.measures import LOSS
from amp_patch.comparison.regression import answers, regressions
from amp_patch.diagnose.recording.run import NATIVE, loads
from amp_patch.diagnose.wording import level_name

STATUS = 3  # the exit status after a regression


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare --baseline."""
    parser.add_argument(
        "--baseline",
        type=Path,
        metavar="FILE",
        help=f"the report.json of an earlier comparison of this script: exit with {STATUS} if a level has become "
        "worse, as soon as that is sure. Levels, seeds, steps and metric are the earlier ones, unless they are given",
    )


def read(args: argparse.Namespace) -> Comparison | None:
    """Return the comparison that --baseline names, and give `args` its levels, seeds, steps and metric; else None.

    Arguments that the caller has given stay.

    Raises:
        ValueError: the file has no comparison, or an argument contradicts --baseline.
    """
    if args.baseline is None:
        return None
    if args.quick:
        raise ValueError("compare: --baseline takes the levels and seeds of its file, and --quick contradicts it")
    try:
        before = Comparison.from_dict(loads(args.baseline.read_text(encoding="utf-8")))
        regressions(before, before)  # computes every figure that is compared later
    except Exception as error:  # figures of numbers that no training records may end in any error
        raise ValueError(
            f"compare: --baseline {args.baseline} has no comparison ({error!r}); wanted the report.json that `compare` "
            "wrote into its --out"
        ) from None
    if before.baseline is None:
        raise ValueError(f"compare: in --baseline {args.baseline} no level has a result; wanted one that went well")
    if args.resume is not None:  # the folder has its own levels, seeds, steps and metric
        return before
    if args.levels is None:
        args.levels = ",".join(level.level for level in before.levels if level.level != NATIVE)
    if args.seeds is None:
        args.seeds = len({run.seed for run in before.runs})
    if args.steps is None:
        args.steps = before.asked_steps
    if args.metric == LOSS:
        args.metric, args.maximize = before.metric, before.maximize
    return before


def tell(before: Comparison, now: Comparison, args: argparse.Namespace) -> int:
    """Print what has become worse, what is not decided, what was not compared, and what is as good.

    Return the exit status: STATUS if a level is worse, 1 if no level was compared, else 0.
    """
    found = answers(before, now, str(args.baseline))
    for words in _differences(before, now):
        print(f"Note: {args.baseline} {words}")
    for level, what in found.worse:
        print(f"worse than in {args.baseline}: {level_name(level, None)}: {what}")
    for level, what in found.undecided:
        print(f"not decided: {level_name(level, None)} {what}; take a larger margin, more steps or more seeds")
    for level, what in found.missing:
        print(f"not compared: {level_name(level, None)}: {what}")
    if found.as_good:
        print(f"no worse than in {args.baseline}: {', '.join(level_name(each, None) for each in found.as_good)}")
    return STATUS if found.worse else int(not (found.as_good or found.undecided))


def _differences(before: Comparison, now: Comparison) -> Iterator[str]:
    """Yield in words how the script, its arguments or the machine differ from the earlier ones."""
    scripts = [each.command or each.title for each in (before, now)]
    if scripts[0] != scripts[1]:
        yield f"is of {scripts[0]}, this is {scripts[1]}"
    for name in ("cpu", "gpu", "torch"):
        was, found = before.machine.get(name, ""), now.machine.get(name, "")
        if was and found and was != found:
            yield f"has the {name} {was}, this has {found}"
