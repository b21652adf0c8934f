"""Replays of a script's forward: a call of a model and the gradients of its output, as a case to measure."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.diagnose.module_error import floats
from amp_patch.diagnose.survey.steps import Case, copied, note_gradients


class Replay:
    """The first call of a model, from `watch` on, whose output gets a gradient.

    The loss of the script is not replayed: the output's gradients stand for it.

    Attributes:
        call: copies of the arguments, positional and by name.
        grads: the index of a floating tensor in the output -> its gradient, FP32.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._watches = model, False
        self.call: tuple[Any, Any] = ((), {})
        self.grads: dict[int, Tensor] = {}
        before, after = self._hooks()
        self._handles: list[Any] = [
            model.register_forward_pre_hook(before, with_kwargs=True),
            model.register_forward_hook(after),
        ]

    def watch(self) -> None:
        """Note the calls of the model from now on. A copy of a call's arguments is in memory."""
        self._watches = True

    def end(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def case(self) -> Case | None:
        """Return the call as a case; None if no output has got a gradient."""
        grads = dict(self.grads)

        def weighed(output: Any) -> Tensor:
            made = floats(output)
            return torch.stack([(made[at].float() * grad).sum() for at, grad in grads.items()]).sum()

        return Case(self._model, weighed, self.call[0], self.call[1], ()) if grads else None

    def _hooks(self) -> tuple[Any, Any]:
        # Functions, not bound methods: a deepcopy of the model copies the object of a bound method.
        def before(_model: nn.Module, args: Any, named: Any) -> None:
            if self._watches and not self.grads and torch.is_grad_enabled():
                self.call = copied((args, named))

        def after(_model: nn.Module, _args: Any, output: Any) -> None:
            if self._watches and not self.grads and torch.is_grad_enabled():
                note_gradients(output, partial(_keep, self, self.call))

        return before, after


def _keep(replay: Replay, call: tuple[Any, Any], at: int, grad: Tensor) -> None:
    # Of several calls in one step, those whose gradients arrive later are not mixed with the first.
    if not replay.grads or replay.call is call:
        replay.call = call
        replay.grads.setdefault(at, grad.detach().float())
