"""`python -m amp_patch compare`: train a script in one process for each opt level and seed, and report the results."""

from __future__ import annotations

import argparse
import sys

from amp_patch.comparison import headline
from amp_patch.comparison.commands import batch_search, compare_baseline, compare_folder
from amp_patch.comparison.commands.compare_arguments import check_script, defaults, plan_of, refuse_ranks
from amp_patch.comparison.commands.compare_child import survey_script
from amp_patch.comparison.commands.interrupts import Ended, Interrupts
from amp_patch.comparison.commands.report import comparison_of, print_any_letter, show
from amp_patch.comparison.commands.run_sequence import RunSequence, ended_by_failures
from amp_patch.comparison.comparison import Comparison
from amp_patch.comparison.named_lines import known_as
from amp_patch.comparison.other_work import OtherWork
from amp_patch.comparison.plan import Plan
from amp_patch.comparison.regression import are_decided
from amp_patch.diagnose.recording.run import Run
from amp_patch.diagnose.wording import listed
from amp_patch.run.machine import machine
from amp_patch.run.run import set_casts


def compare(args: argparse.Namespace) -> None:
    """run a script at several opt levels, compare speed, memory and loss, and write a report"""
    print_any_letter()
    try:
        refuse_ranks()
        if args.resume is not None:
            args = compare_folder.resumed(args, defaults())
        set_casts(args)
        before = compare_baseline.read(args)
        plan = plan_of(args)
        check_script(args, "compare", "a comparison's")
        found = [] if args.resume is None else compare_folder.runs_in(args.out, plan)
        compare_folder.prepare(args.out)
        if args.resume is None and args.batch_search is None:
            compare_folder.begin(args)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    with Interrupts() as interrupts:
        if args.batch_search is not None:
            sys.exit(batch_search.run(args, plan, interrupts))
        print(f"starting {', '.join(plan.levels)}", flush=True)
        with ended_by_failures("compare", args.script):
            runs, asked, cut, load = _measure(plan, args, interrupts, found, before)
        told = compare_folder.keep_machine(args.out, machine(load.words()))
        comparison = comparison_of(args, plan, runs, asked, told)
        if (comparison.unexplained or headline.is_served(comparison)) and comparison.survey is None and not cut:
            cut = _survey(plan, args, interrupts, comparison)
            comparison = comparison_of(args, plan, runs, asked, told)
        shown = show(comparison, args.out)
        if status := cut or shown or (0 if before is None else compare_baseline.tell(before, comparison, args)):
            sys.exit(status)


def _measure(
    plan: Plan, args: argparse.Namespace, interrupts: Interrupts, found: list[Run], before: Comparison | None
) -> tuple[list[Run], int, int, OtherWork]:
    """Train the runs of the plan that are not in `found` as finished, until --baseline's answer is sure.

    Returns:
        runs: `RunSequence.runs`, the runs in `found` included.
        planned: the planned number of runs.
        status: the exit status if a signal interrupted the runs; else 0.
        load: the readings of other work on the machine.
    """

    def decided(runs: list[Run]) -> bool:
        return before is not None and are_decided(before, comparison_of(args, plan, runs, len(runs), {}))

    sequence = RunSequence(plan, args, interrupts, found, decided=decided)
    cut = sequence.train()
    return sequence.runs, sequence.asked, cut, sequence.load


def _survey(plan: Plan, args: argparse.Namespace, interrupts: Interrupts, comparison: Comparison) -> int:
    """Survey the script's first step, for the reasons of levels that ended badly and for lines to change by hand.

    Returns:
        The exit status of an interrupt; 0 if there was none.
    """
    levels = listed([level.name for level in comparison.unexplained])
    what = f"that break {levels}" if levels else "to change before the level's own can be pasted"
    print(f"surveying the first step for lines {what}", flush=True)
    try:
        survey_script(plan, args, interrupts.check, known_as(comparison.unexplained))
    except Ended as interrupt:
        return interrupt.status
    return 0
