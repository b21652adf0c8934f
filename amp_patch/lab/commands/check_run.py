"""`python -m amp_patch check --run train.py`: run the first step of an unedited script in FP32, and survey it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import ExitStack, redirect_stdout, suppress
from typing import Any

from torch import nn

from amp_patch.environment import LEVEL
from amp_patch.lab.commands import run
from amp_patch.lab.survey.survey import Surveyor
from amp_patch.lab.unedited.script import UneditedScript
from amp_patch.training import observers
from amp_patch.training.innermost import innermost
from amp_patch.training.observers import Observer


class _Ended(SystemExit):
    """Exit of the script after its first step."""


class _FirstStep(Observer):
    """Observer that surveys the script in its `with` block, and ends it by `_Ended` after the first step.

    The script ends at the first forward after each optimizer has stepped, or after one optimizer has stepped twice.
    """

    def __init__(self) -> None:
        self.surveyor = Surveyor()
        self.script = UneditedScript("O0")
        self._models: dict[int, nn.Module] = {}
        self._steps: dict[int, int] = {}
        self._entered = ExitStack()

    def __enter__(self) -> _FirstStep:
        self._entered.enter_context(self.script)
        self._entered.enter_context(self.surveyor)
        observers.add(self)
        self._entered.callback(observers.remove, self)
        return self

    def __exit__(self, *_: Any) -> None:
        self._entered.close()

    @property
    def stepped(self) -> bool:
        """Whether a step was made."""
        return any(self._steps.values())

    def training_begun(self, training: Any) -> None:
        if training is None:
            return
        optimizers = [innermost(o) for ref in training.optimizers if (o := ref()) is not None]
        for optimizer in optimizers:
            self._steps.setdefault(id(optimizer), 0)
        held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        for model in (m for ref in training.models if (m := ref()) is not None):
            if id(model) not in self._models:
                self._models[id(model)] = model
                self.surveyor.follow(model, held)
                self._entered.callback(model.register_forward_pre_hook(self._forward_begins()).remove)

    def _forward_begins(self) -> Any:
        # A function, not a bound method: a deepcopy of the model copies its hooks, and would copy the observer too.
        def before(*_: Any) -> None:
            steps = self._steps.values()
            if steps and (all(steps) or max(steps) > 1):
                raise _Ended

        return before

    def step_begins(self, optimizer: Any) -> None:
        if id(optimizer) in self._steps:
            self.surveyor.step_begins(optimizer)

    def step_ends(self, optimizer: Any) -> None:
        if id(optimizer) in self._steps:
            self._steps[id(optimizer)] += 1
            self.surveyor.step_ends(optimizer)


def check_run(script: str, arguments: list[str], as_json: bool) -> None:
    """Run a script until its first step is over, print the survey, and exit.

    The exit status is 1 if a level would break a line, 2 if the script failed or made no step, else 0.
    """
    os.environ[LEVEL] = "O0"  # overrides the level of a call of `initialize` in the script
    first, given = (
        _FirstStep(),
        argparse.Namespace(
            module=False, script=script, arguments=arguments, level=None, device=None, methods=None, allow_banned=False
        ),
    )
    try:
        with redirect_stdout(sys.stderr) if as_json else suppress(_Ended):
            run.run(given, around=first)
    except _Ended:
        pass
    except SystemExit as error:
        if error.code:
            print(error.code if isinstance(error.code, str) else "", file=sys.stderr)
            sys.exit(2)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(2)
    if not first.stepped:
        missing = first.script.missing()
        why = "it made no step" if missing is None else f"{missing.why}{missing.way_out}"
        print(f"python -m amp_patch check --run: {script} trained nothing: {why}", file=sys.stderr)
        sys.exit(2)
    report = first.surveyor.report
    print(json.dumps(report.to_json(), indent=2) if as_json else report)
    sys.exit(int(bool(report.lines)))
