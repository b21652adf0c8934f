"""`compare --baseline report.json`: fail if a training has become worse since an earlier comparison."""

from __future__ import annotations

import argparse
from pathlib import Path

from amp_patch.comparison.comparison import Comparison
from amp_patch.comparison.measures import LOSS
from amp_patch.comparison.regression import regressions
from amp_patch.diagnose.recording.run import loads

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
        levels = before.levels
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"compare: --baseline {args.baseline} has no comparison ({error!r}); wanted the report.json that `compare` "
            "wrote into its --out"
        ) from None
    if before.baseline is None:
        raise ValueError(f"compare: in --baseline {args.baseline} no level has a result; wanted one that went well")
    if args.resume is not None:  # the folder has its own levels, seeds, steps and metric
        return before
    if args.levels is None:
        args.levels = ",".join(level.level for level in levels)
    if args.seeds is None:
        args.seeds = len({run.seed for run in before.runs})
    if args.steps is None:
        args.steps = before.asked_steps
    if args.metric == LOSS:
        args.metric, args.maximize = before.metric, before.maximize
    return before


def tell(before: Comparison, now: Comparison, args: argparse.Namespace) -> int:
    """Print what has become worse. Return the exit status: STATUS, or 0 if nothing."""
    found = regressions(before, now)
    for each in found:
        print(f"worse than in {args.baseline}: {each.level}: {each.what}")
    if not found:
        print(f"no level is worse than in {args.baseline}")
    return STATUS if found else 0
