"""A mode that casts calls with mixed floating types as O1 does, for cast models whose forward makes such calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from amp_patch.casts.install import resolve_address
from amp_patch.casts.oplists import LATE, rules_by_name
from amp_patch.casts.rules import RULES, Rule
from amp_patch.casts.wrappers import wrapped_by
from amp_patch.policy import Policy
from amp_patch.support.tree import tensors

_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_CASTING = (
    *("lower", "product", "sparse", "einsum", "fused", "rnn"),
    *("fp32", "norm", "direction", "inexact", "widest", "match_self"),
)


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
        rule = _rules().get(function)
        if rule is not None and kwargs.get("out") is None:
            found = {tensor.dtype for tensor in tensors((args, kwargs)) if tensor.dtype in _TYPES}
            if len(found) > 1:
                return rule.apply(function, args, kwargs, self._policy)
        return function(*args, **kwargs)


def cast_within(method: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
    """Return `method`, a function of a model, that runs under `MixedOperands`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with MixedOperands(policy):
            return method(*args, **kwargs)

    return call


@functools.cache
def _rules() -> dict[Any, Rule]:
    """Return {function: rule}; the keys are the functions on the op lists, and the wrappers that replace them."""
    found: dict[Any, Rule] = {}
    for (address, name), rule in rules_by_name("torch").items():
        if address in LATE or rule not in _CASTING:
            continue
        function = getattr(resolve_address(address), name, None)
        wrapped = wrapped_by(function)
        original = function if wrapped is None else wrapped.original
        if original is not None:
            # torch passes this mode the wrapper instead of the function if the function is written in Python.
            found[original] = found[function] = RULES[rule]
    # This function is written in Python, and a mode is off inside the calls that it makes. So the calls inside would
    # not be cast, and all arguments are cast here.
    found[torch.nn.functional.multi_head_attention_forward] = RULES["lower"]
    return found
