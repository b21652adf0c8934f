"""`python -m amp_patch check --run train.py`: run the first step of an unedited script in FP32, and survey it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import nullcontext, redirect_stdout, suppress

from amp_patch.diagnose.survey.first_step import FirstStep, FirstStepOver
from amp_patch.environment import LEVEL
from amp_patch.run import run
from amp_patch.run.unedited.script import UneditedScript


class SurveyedScript(FirstStep):
    """A `FirstStep` around an unedited script: in the block the script is trained at O0 as `run` would train it."""

    def __init__(self, after: int = 0) -> None:
        super().__init__(after)
        self._script = UneditedScript("O0")

    def __enter__(self) -> SurveyedScript:
        self.entered.enter_context(self._script)
        super().__enter__()
        return self

    @property
    def unedited(self) -> bool:
        return self._script.applies()

    @property
    def why_nothing(self) -> str:
        """The reason why no step was made, in words, and the change of the script that helps, if one is known."""
        missing = self._script.missing()
        return "it made no step" if missing is None else f"{missing.why}{missing.way_out}"


def check_run(
    script: str,
    arguments: list[str],
    as_json: bool,
    device: str | None = None,
    module: bool = False,
    after: int = 0,
) -> None:
    """Run a script, or a `module`, until its first step is over, print the survey of that step, and exit the process.

    The rules look at the first step, the measurement at the step after `after` steps.

    With `as_json` the survey is printed as JSON, and the script's own output goes to stderr. The exit status is 1 if a
    level would break a line, 2 if the script failed or made no step, else 0.
    """
    os.environ[LEVEL] = "O0"  # overrides the level of a call of `initialize` in the script
    first, options = SurveyedScript(after), {"module": module, "level": None, "methods": None, "allow_banned": False}
    given = argparse.Namespace(script=script, arguments=arguments, device=device, **options)
    try:
        with suppress(FirstStepOver), redirect_stdout(sys.stderr) if as_json else nullcontext():
            run.run(given, around=first)
    except SystemExit as error:
        if error.code:
            print(error.code if isinstance(error.code, str) else "", file=sys.stderr)
            sys.exit(2)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(2)
    if not first.stepped:
        print(f"python -m amp_patch check --run: {script} trained nothing: {first.why_nothing}", file=sys.stderr)
        sys.exit(2)
    first.measure()
    report = first.report
    print(json.dumps(report.to_json(), indent=2) if as_json else report)
    sys.exit(int(bool(report.broken)))
