"""The survey of a script's first step, in a process of its own.

A survey inside of O0's run would change the run: compiled code would run eagerly, and on a GPU the survey would take
memory, by whose free amount cuDNN chooses algorithms. O0's numbers, times and memory therefore come from a process
without a survey.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress

from amp_patch.comparison.commands.compare_child import Child
from amp_patch.comparison.commands.compare_folder import survey_path
from amp_patch.comparison.commands.interrupts import Interrupts
from amp_patch.comparison.other_work import OtherWork
from amp_patch.comparison.plan import BASELINE, Plan
from amp_patch.diagnose.recording.run import Run, dumps
from amp_patch.support.files import write_whole


def survey_script(plan: Plan, args: argparse.Namespace, interrupts: Interrupts, levels: Sequence[str]) -> None:
    """Run the script at O0 until its first step is over, and store the survey of that step in the folder `args.out`.

    The step is measured at `levels`.

    If the script fails, or makes no step, {"failed": the reason} is stored in place of the survey.

    Raises:
        Ended: a signal was received.
    """
    path, run = survey_path(args.out), Run(BASELINE)
    Child(plan, args, run, OtherWork(), ("survey", ()), (path, levels)).train_alone(interrupts.check)
    if not path.exists():
        with suppress(OSError):  # a full disk: the report has no survey
            write_whole(path, dumps({"failed": run.error or "it made no step"}) + "\n")
