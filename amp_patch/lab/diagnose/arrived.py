"""The error of what arrives at modules, against the inputs of the same modules in an FP32 copy of the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.lab.diagnose.module_error import distance, floats, is_random, random_states
from amp_patch.model.forward import policy_of
from amp_patch.model.fp32_copies import fp32_copy


class ExactInputs:
    """The inputs of a model's modules in an FP32 forward of a copy. References them until `error` has compared them."""

    def __init__(self) -> None:
        self._calls: dict[str, list[list[tuple[Tensor, int]]]] = {}

    @torch.no_grad()
    def compute(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Run an FP32 copy of `model` on the arguments of its forward, and replace the inputs of an earlier forward.

        There are none if the forward draws random numbers, or fails.
        """
        self._calls = {}
        devices = sorted({param.device.index for param in model.parameters() if param.device.type == "cuda"})
        try:
            with torch.random.fork_rng(devices):
                before = random_states(devices)
                copy = fp32_copy(model)
                for name, module in copy.named_modules():
                    vars(module)["_forward_hooks"].clear()
                    vars(module)["_forward_pre_hooks"].clear()
                    if not any(module.children()):
                        module.register_forward_pre_hook(self._note(name), with_kwargs=True)
                copy(*args, **kwargs)
                if not all(map(torch.equal, before, random_states(devices))):
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
        """Return the relative error of the arguments of the next call of this module, as `distance` does.

        None if the copy has made no such call, or has written to its inputs. Does not sync.
        """
        calls = self._calls.get(name)
        if not calls:
            return None
        exact, given = calls.pop(0), floats((args, kwargs))
        if [t.shape for t in given] != [t.shape for t, _ in exact] or any(t._version != v for t, v in exact):
            return None
        return distance(given, [tensor for tensor, _ in exact]) if given else None


def can_compare(model: nn.Module) -> bool:
    """Return whether a copy of `model` shows what FP32 computes: it trains at a level, without randomness and hooks.

    Hooks of user code would run once more in the copy, and may store what they are given.
    """
    policy = policy_of(model)
    if policy is None or policy.changes_nothing:
        return False
    return not any(
        is_random(module) or vars(module)["_forward_hooks"] or vars(module)["_forward_pre_hooks"]
        for module in model.modules()
    )
