"""`python -m amp_patch search`: find the modules that a level must keep in a higher precision to match FP32."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from amp_patch.comparison import module_search, named_lines
from amp_patch.comparison.commands import compare_arguments, compare_folder
from amp_patch.comparison.commands.compare_child import survey_script
from amp_patch.comparison.commands.interrupts import Ended, Interrupts
from amp_patch.comparison.commands.report import comparison_of, print_any_letter
from amp_patch.comparison.commands.run_sequence import RunSequence, ended_by_failures
from amp_patch.comparison.module_search import Found, Kept, Trial
from amp_patch.comparison.plan import BASELINE, SEEDS, Plan
from amp_patch.diagnose.recording.run import Run, dumps
from amp_patch.run.machine import machine
from amp_patch.support.files import write_whole

_LEVEL = "O5"
_EPILOG = """
A trial trains the level from each seed with some modules kept in FP32. At O6 and O7, whose products are FP8 or FP4,
they are kept in BF16. A trial is judged by its gap to O0 at the same seeds, as in compare. Halving the set of modules
finds those to keep, in at most 2 log2(modules) + 3 trials, O0's included. If the survey (check --run) names lines at
the level, their modules are tried first: one trial more, or few in all. The script is not edited: its runs read
AMP_PATCH_KEEP_FP32 and AMP_PATCH_KEEP_HIGH. `search --resume FOLDER` continues an interrupted search.

The search ends at the first trial that fails for a reason which no kept module can mend, for example an optimizer's eps
that rounds to 0 in FP16. If all modules would have to be kept, there is no answer.

The exit status is 0 if there is an answer, 1 if there is none or the script fails, 2 for invalid arguments, and 130
after Ctrl-C.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `search`."""
    parser.usage = "python -m amp_patch search [options] [-m] script [options] [-- the script's own arguments]"
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--level", default=_LEVEL, help="one level, for example O2 or O6+nvfp4 (default %(default)s)")
    add("--dtype", help="float16 or bfloat16 at O1, O2 and O3 (default: the script's)")
    add("--steps", type=int, help="end each run after this many optimizer steps")
    add("--seeds", type=int, help=f"repetitions of each trial (default {SEEDS})")
    compare_arguments.add_judging_arguments(parser)
    add("--trials", type=int, metavar="N", help="make at most N trials, O0's included")
    add("--out", type=Path, default=Path("amp_search"), help="folder of the runs (default %(default)s)")
    add("--resume", type=Path, metavar="FOLDER", help="continue the search in this folder")
    compare_arguments.add_script_arguments(parser)


def search(args: argparse.Namespace) -> None:
    """find which modules of a script must be kept in a higher precision for a level to be as good as FP32"""
    print_any_letter()
    try:
        compare_arguments.refuse_ranks()
        if args.resume is not None:
            resumed = compare_folder.resumed(args, compare_arguments.defaults(add_arguments))
            args = argparse.Namespace(**{**vars(resumed), "trials": args.trials})
        else:
            compare_arguments.check_script(args, "search", "a search's")
        if args.trials is not None and args.trials < 3:
            raise ValueError(f"search: trials is {args.trials}; wanted 3 or more: O0's, the level's, and one more")
        trials = _Trials(args)
        if args.resume is None:
            compare_folder.prepare(args.out)
            compare_folder.begin(args)
    except (ValueError, OSError) as error:  # code shared with `compare` signs its errors "compare: "
        print(f"search: {str(error).removeprefix('compare: ').removeprefix('search: ')}", file=sys.stderr)
        sys.exit(2)
    with Interrupts() as interrupts:
        trials.interrupts = interrupts
        try:
            with ended_by_failures("search", args.script):
                found = module_search.search(trials.run, trials.modules, args.trials, trials.named)
        except _Cut:
            print(f"To continue: python -m amp_patch search --resume {shlex.quote(str(args.out))}")
            raise
    _report(args, trials.level, found)
    sys.exit(0 if found.answer is not None else 1)


def _report(args: argparse.Namespace, level: str, found: Found) -> None:
    device = [] if args.device is None else ["--device", args.device]
    command = shlex.join([*device, *(["-m"] if args.module else []), args.script, *args.arguments])
    print("\n".join(["", *module_search.report(level, found, command)]))


class _Cut(SystemExit):
    """The exit for a trial that Ctrl-C or another signal has ended; `code` is the exit status of `search`."""


class _Trials:
    """The trials of a search: each trains the script at one level with some modules kept, in its own folder.

    The first trial also trains at O0. The other folders get copies of O0's runs.

    Attributes:
        level: the name of the level that is searched.
        interrupts: the receiver of signals: the first signal ends the runs.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        own = {**compare_arguments.defaults(), **vars(args), "levels": args.level}
        if args.level.strip() == BASELINE:
            raise ValueError(f"search: level is {BASELINE}; wanted one level that is not O0, for example O5")
        self._args = argparse.Namespace(**own)
        self._plan = replace(compare_arguments.plan_of(self._args), keep=())
        self._made = 0
        self._runs: list[Run] = []
        levels = [level for level in self._plan.levels if level != BASELINE]
        if len(levels) != 1:
            raise ValueError(f"search: level is {args.level}; wanted one level that is not O0, for example O5")
        if self._plan.seeds < 2:
            raise ValueError(f"search: seeds is {self._plan.seeds}; wanted 2 or more: one seed gives no interval")
        self.level = levels[0]
        self.interrupts = Interrupts()

    def run(self, kept: Kept) -> Trial:
        """Train the level with the modules `kept` in higher precision, and compare it with O0.

        Runs that a resumed search has finished are not trained again. A line with the result is printed.

        Raises:
            ComparisonRefused, ScriptFailed: from `RunSequence.train`.
            _Cut: a signal was received.
        """
        self._made += 1
        plan = replace(self._plan, keep=kept)
        args = argparse.Namespace(**{**vars(self._args), "out": self._args.out / f"trial{self._made}"})
        found = self._folder(args, plan)
        sequence = RunSequence(plan, args, self.interrupts, found)
        cut = sequence.train()
        self._runs = sequence.runs
        if cut:
            raise _Cut(cut)
        comparison = comparison_of(args, plan, [run for run in self._runs if run.level in plan.levels], 0, machine())
        done = module_search.trial_of(kept, comparison)
        print(module_search.line(self._made, done), flush=True)
        return done

    def modules(self) -> list[str]:
        """Return the names of the modules of the script's models, as recorded by the last trial's runs, each once."""
        return [*dict.fromkeys(name for run in self._runs if run.level != BASELINE for name in run.modules)]

    def named(self) -> list[str]:
        """Return the modules of the lines that a survey of the first step names at the level; [] at O6 and O7.

        Raises:
            _Cut: a signal was received.
        """
        if module_search.argument(self.level) != "keep_fp32":  # the survey does not judge formats of products
            return []
        args = argparse.Namespace(**{**vars(self._args), "out": self._args.out / "trial1"})
        if compare_folder.survey_in(args.out) is None:
            try:
                survey_script(self._plan, args, self.interrupts.check, [self.level.partition("+")[0]])
            except Ended as interrupt:
                raise _Cut(interrupt.status) from None
        dtype = next((run.dtype for run in self._runs if run.level == self.level), None)
        names = named_lines.modules(compare_folder.survey_in(args.out), self.level, dtype)
        if names:
            print(f"the survey of the first step names lines in {', '.join(names)}: tried first", flush=True)
        return names

    def _folder(self, args: argparse.Namespace, plan: Plan) -> list[Run]:
        """Prepare the folder of a trial, and return the runs that need no training.

        The runs at O0 are copied from the first trial's folder. If the search is resumed, and the trial in the folder
        kept the same modules, the level's runs in the folder are returned too.
        """
        record = args.out / "kept.json"
        kept = dumps([self.level, *(plan.keep or ())])
        resumable = record.exists() and record.read_text() == kept and self._args.resume is not None
        compare_folder.prepare(args.out)
        if not resumable:
            compare_folder.begin(args)
            write_whole(record, kept)
        if self._made > 1:
            for run in (self._args.out / "trial1" / "runs").glob(f"{BASELINE}-seed*"):
                shutil.copyfile(run, args.out / "runs" / run.name)
        return compare_folder.runs_in(args.out, plan)
