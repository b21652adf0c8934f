"""FirstStep: the survey of a training's first step. After that step it ends the training."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from typing import Any

from torch import Tensor, nn

from amp_patch.diagnose.call_log import eagerly
from amp_patch.diagnose.survey.measured import MEASURED, measure
from amp_patch.diagnose.survey.replay import Replay, Replays
from amp_patch.diagnose.survey.report import Report
from amp_patch.diagnose.survey.survey import Surveyor
from amp_patch.training import observers
from amp_patch.watch.averages import averages_in


class FirstStepOver(SystemExit):
    """The exception that ends a surveyed training. The first forward after the first step raises it."""


class FirstStep(observers.Observer):
    """A `with` block that surveys the O0 trainings in it, and raises `FirstStepOver` when their first step is over.

    The first step is over when a forward begins after each optimizer has made a step. If one optimizer has made two
    steps before that, the first step is over too: other optimizers may never step.

    Args:
        after: the number of steps before the step that `measure` looks at. The rules look at the first step.

    Attributes:
        entered: the context managers that the block has entered. Its end closes them.
    """

    def __init__(self, after: int = 0) -> None:
        self._surveyor, self._after = Surveyor(), after
        self._survey = ExitStack()
        self._models: dict[int, nn.Module] = {}
        self._noting = Replays()
        self._steps: dict[int, int] = {}
        self.entered = ExitStack()

    def __enter__(self) -> FirstStep:
        self.entered.enter_context(eagerly())
        self.entered.enter_context(self._noting)
        self._survey.enter_context(self._surveyor)
        self.entered.enter_context(self._survey)
        observers.add(self)
        self.entered.callback(observers.remove, self)
        return self

    def __exit__(self, *_: Any) -> None:
        self.entered.close()

    @property
    def stepped(self) -> bool:
        """Whether a step was made."""
        return any(self._steps.values())

    @property
    def unedited(self) -> bool:
        """Whether `run` would train the script at a level, and serve some of its lines."""
        return False

    @property
    def replays(self) -> list[Replay]:
        """The noted part of the step of each model."""
        return self._noting.each

    @property
    def report(self) -> Report:
        """The findings of the survey. They are complete after the `with` block."""
        return self._surveyor.report

    def measure(self, levels: Sequence[str] = MEASURED) -> None:
        """Measure `levels` in the noted step of each model, and add the result to the report; after the block."""
        with redirect_stdout(io.StringIO()):  # a forward that prints would print once for each step
            for case in (case for replay in self.replays if (case := replay.case()) is not None):
                for found in measure(case, tuple(levels), known=self.report.broken):
                    self.report.add_measured(found)

    def training_begun(self, training: Any) -> None:
        if training is None:
            return
        self._surveyor.unedited = self.unedited
        optimizers = training.own_optimizers()
        for optimizer in optimizers:
            self._steps.setdefault(id(optimizer), 0)
        held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        trained = [p for p in held if p.requires_grad]  # of an average that an optimizer holds, nothing is trained
        for model in (m for ref in training.models if (m := ref()) is not None):
            if id(model) not in self._models:
                self._models[id(model)] = model
                self._surveyor.follow(model, trained)
                begins = self._forward_begins(len(self._noting.each))
                self.entered.callback(model.register_forward_pre_hook(begins).remove)
                self._noting.each.append(
                    replay := Replay(model, self._options(model, trained))
                )  # its hooks are called after that one
                self.entered.callback(replay.end)

    def _options(self, model: nn.Module, trained: list[Tensor]) -> dict[str, Any]:
        """Return the arguments that `run` gives `initialize`; none for a script that calls it."""
        kept = averages_in([model], {id(param) for param in trained}) if self.unedited else {}
        return ({"allow_banned": True} if self.unedited else {}) | ({"keep_fp32": [*kept.values()]} if kept else {})

    def _forward_begins(self, at: int) -> Any:
        # A function, not a bound method: a deepcopy of the model copies the object of a bound method, here the survey.
        def before(*_: Any) -> None:
            steps = self._steps.values()
            if steps and (all(steps) or max(steps) > 1):
                self._survey.close()
                if max(steps) > self._after:
                    raise FirstStepOver
            if max(steps, default=0) >= self._after:
                self._noting.each[at].watch()

        return before

    def step_begins(self, optimizer: Any) -> None:
        self._noting.paused = True
        if id(optimizer) in self._steps:
            self._surveyor.step_begins(optimizer)

    def step_ends(self, optimizer: Any) -> None:
        self._noting.paused = False
        if id(optimizer) in self._steps:
            self._steps[id(optimizer)] += 1
            self._surveyor.step_ends(optimizer)
