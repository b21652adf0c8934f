"""A mode that casts calls with mixed floating types as O1 does, for cast models whose forward makes such calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from amp_patch.casts.install import rule_of
from amp_patch.casts.rules import RULES
from amp_patch.policy import LOW_PRECISION, Policy
from amp_patch.support.tree import cast_floats, tensors

_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_CASTING = (
    *("lower", "product", "sparse", "einsum", "fused", "rnn"),
    *("fp32", "loss", "norm", "direction", "inexact", "widest", "match_self"),
)
# Functions without a rule, whose kernels take a low-precision input, the first argument, with FP32 weights and
# statistics, but not low-precision weights with FP32 statistics.
_WITH_STATISTICS = (functional.batch_norm, functional.instance_norm, torch.batch_norm, torch.instance_norm)


# Whether Dynamo traces this mode, which is tried with torch 2.13. Else compiled calls are made unchanged.
TRACED = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


class MixedOperands(TorchFunctionMode):
    """A mode that casts calls of functions on the op lists if their tensors have several floating types.

    Such a call follows the function's rule. All other calls are made unchanged. Each call of a torch function takes one
    or two microseconds more.

    Args:
        policy: the policy whose low-precision type the rules cast to.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self._policy = replace(policy, patch_torch_functions=True)  # as at O1; the rule of products reads it

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `function`: by its rule if the tensors of the call have several floating types, otherwise unchanged."""
        kwargs = kwargs or {}
        rule = rule_of(function)
        with_statistics = function in _WITH_STATISTICS
        if (rule in _CASTING or with_statistics) and kwargs.get("out") is None:
            found = {tensor.dtype for tensor in tensors((args, kwargs)) if tensor.dtype in _TYPES}
            if len(found) > 1 and with_statistics:
                args = (*args[:1], *cast_floats(args[1:], torch.float32, LOW_PRECISION))
                named = cast_floats(kwargs, torch.float32, LOW_PRECISION)
                return function(*args, **({**named, "input": kwargs["input"]} if "input" in kwargs else named))
            if len(found) > 1:
                return RULES[str(rule)].apply(function, args, kwargs, self._policy)
        return function(*args, **kwargs)


def cast_within(method: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
    """Return `method`, a function of a model, that runs under `MixedOperands`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with MixedOperands(policy):
            return method(*args, **kwargs)

    return call
