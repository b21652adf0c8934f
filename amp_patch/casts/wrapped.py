"""What the wrappers stand for: asked by `explain`, and by the side that torch.compile sees."""

from __future__ import annotations

import types
from typing import Any

import torch

from amp_patch.casts.rules import RULES, Rule
from amp_patch.policy import Policy


class Wrapped:
    """A function or method with a wrapper in front of it, and its rules by either list."""

    __slots__ = ("apex_rule", "original", "rule")

    def __init__(self, original: Any, rule: str, apex_rule: str) -> None:
        self.original, self.rule, self.apex_rule = original, RULES[rule], RULES[apex_rule]

    def rule_of(self, policy: Policy | None) -> Rule | None:
        """The rule that a call follows while `policy` acts; None: the call is made as it is."""
        if policy is None:
            return None
        rule = self.apex_rule if policy.op_lists == "apex" else self.rule
        return rule if rule.name != "none" and (policy.patch_torch_functions or rule.emulates) else None


by_id: dict[int, tuple[Any, Wrapped]] = {}  # id of a wrapper -> the wrapper (held: the id stays unique), entry
tensor_methods: dict[str, Wrapped] = {}  # name -> entry, of wrappers that are attributes of torch.Tensor now
own_tensor_methods: set[Any] = set()  # torch.Tensor's own methods that a wrapper ever replaced


def register_wrapper(owner: Any, name: str, wrapper: Any, original: Any, rule: str, apex_rule: str) -> None:
    """Note that `wrapper` stands at `owner.name` in place of `original`."""
    wrapped = Wrapped(original, rule, apex_rule)
    by_id[id(wrapper)] = wrapper, wrapped
    if owner is torch.Tensor:
        tensor_methods[name] = wrapped
        if isinstance(original, (types.MethodDescriptorType, types.WrapperDescriptorType)):
            own_tensor_methods.add(original)


def wrapped_by(wrapper: Any) -> Wrapped | None:
    """What `wrapper` stands for; None if it is no wrapper."""
    return by_id.get(id(wrapper), (None, None))[1]


def forget_methods() -> None:
    """torch.Tensor has its own methods again."""
    tensor_methods.clear()
