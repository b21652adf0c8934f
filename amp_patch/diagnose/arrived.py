"""The relative error of modules' inputs, against the inputs of the same modules in an FP32 copy of the model.

The error of a module's input has grown over all calls before the module; `module_error.relative_error` measures the
error of one module alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.diagnose.module_error import distance, floats, is_random
from amp_patch.diagnose.survey.kinds import KINDS
from amp_patch.diagnose.survey.measured import measure
from amp_patch.diagnose.survey.replay import Replay
from amp_patch.model.forward import policy_of
from amp_patch.model.fp32_copies import fp32_copy
from amp_patch.policy import Policy
from amp_patch.support import tree
from amp_patch.support.random_states import random_states, restored_random_states


class ExactInputs:
    """The inputs of modules in a forward of an FP32 copy of the model, referenced until `error` has compared them."""

    def __init__(self) -> None:
        self._calls: dict[str, list[list[tuple[Tensor, int]]]] = {}

    @torch.no_grad()
    def compute(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Run an FP32 copy of `model` on `args` and `kwargs`, and store the inputs of its modules without children.

        Inputs of an earlier forward are dropped. If the copy's forward draws random numbers, or fails, no inputs are
        stored.
        """
        self._calls = {}
        try:
            with restored_random_states() as before:
                copy = fp32_copy(model)
                for name, module in copy.named_modules():
                    vars(module)["_forward_hooks"].clear()
                    vars(module)["_forward_pre_hooks"].clear()
                    if not any(module.children()):
                        module.register_forward_pre_hook(self._note(name), with_kwargs=True)
                copy(*args, **kwargs)
                if not tree.same(before, random_states()):
                    self._calls = {}
        except Exception:  # a model that cannot be copied, or whose forward works once
            self._calls = {}

    def _note(self, name: str) -> Any:
        calls = self._calls.setdefault(name, [])

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            calls.append([(tensor, tensor._version) for tensor in floats((args, kwargs))])

        return before

    @torch.no_grad()
    def error(self, name: str, args: Any, kwargs: Any) -> Tensor | None:
        """Return the `distance` of the arguments of a module's call from those of the same call in the FP32 copy.

        The n-th call of `error` for a module compares with the n-th call in the copy. None if the copy made fewer
        calls, if its arguments had other shapes, if it has written into them since, or if no argument is floating. Does
        not sync with the device.

        Args:
            name: the module's name in the model.
        """
        calls = self._calls.get(name)
        if not calls:
            return None
        exact, given = calls.pop(0), floats((args, kwargs))
        if [t.shape for t in given] != [t.shape for t, _ in exact] or any(t._version != v for t, v in exact):
            return None
        return distance(given, [tensor for tensor, _ in exact]) if given else None


def can_compare(model: nn.Module) -> bool:
    """Return whether an FP32 copy of `model` may run next to it: the model's level casts, and no module has a hook.

    In the copy a hook of user code would run once more, and might store the tensors that it receives. False too if a
    module draws random numbers, such as dropout: copy and model would draw different ones.
    """
    policy = policy_of(model)
    if policy is None or policy.changes_nothing:
        return False
    return not any(
        is_random(module) or vars(module)["_forward_hooks"] or vars(module)["_forward_pre_hooks"]
        for module in model.modules()
    )


def cause_of(replay: Replay, policy: Policy) -> str:
    """Return the line that the error of modules' inputs comes from, with its figures; "" if none is found.

    The gradients of the model's output stand for the loss.
    """
    casts = policy.cast_model_type is not None
    level = next(kind.levels[0] for kind in KINDS if (kind.casts, kind.dtype) == (casts, policy.dtype))
    case = replay.case()
    cause = None if case is None else next(measure(case, (level,), seconds=60.0)).cause
    return "" if cause is None or cause.line is None else f"{cause.line.shown}: {cause}"
