"""Where features meet the road of every training: lists of functions that `amp_patch/guests.py` fills.

The road calls what is registered, in order, and names no guest. None of these lists is looked at in a plain step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor, nn

from amp_patch.masters.closed_master import Form
from amp_patch.policy import Policy

# Forms of storage -----------------------------------------------------------------------------------------------------

# Policy.master_weights -> of what is saved beside a training's loss scales, the form in which its masters are kept.
forms: dict[Any, Callable[[dict[str, Any]], Form | None]] = {}
# Give what a policy saves beside its first loss scale, by its name in the state dict.
beside_scale: list[Callable[[Policy], dict[str, Any]]] = []
# What keeps the state of an optimizer: has KEY (of the generated class), `is_for(stash)` and `overrides(base)`.
keepers: list[Any] = []

# Ways to step ---------------------------------------------------------------------------------------------------------

ways: list[Any] = []  # strategies (step.py): an optimizer has the first one that suits its class

# Surroundings ---------------------------------------------------------------------------------------------------------

# (models, policy, modules that stay FP32, ids of the parameters whose type would change, process_group)
check_models: list[Callable[[list[nn.Module], Policy, list[nn.Module], set[int], Any], None]] = []
enter_models: list[Callable[[Any, list[nn.Module], list[Any]], None]] = []  # (training, models, targets), at the end
retyped: list[Callable[[Collection[int]], None]] = []  # the type of parameters of these ids has changed
unpickled: list[Callable[[], None]] = []  # a pickle or a copy has brought masters, maybe into another process
regrouped: list[Callable[[Any], None]] = []  # an optimizer's groups have come to hold masters, or parameters again
wrapped: list[Callable[[Any], None]] = []  # `scale_loss` was given an optimizer around the one that steps
shared_backward: list[Any] = []  # the `ScaledBackward` beside which the training has other parameters: one
captured: list[Callable[[Any, Any], None]] = []  # (optimizer, stash): a CUDA graph is about to capture a step

# Moments of an optimizer ----------------------------------------------------------------------------------------------

check_optimizer: list[Callable[[Any, Policy], None]] = []  # raise before `initialize` changes anything
check_group: list[Callable[[Any, Any, list[Tensor]], None]] = []  # (optimizer, stash, params) of `add_param_group`
group_added: list[Callable[[Any, Any], None]] = []  # (optimizer, stash), at the end of `add_param_group`
enter_optimizer: list[Callable[[Any, Any], None]] = []  # (optimizer, stash), of a training, a copy or a pickle
leave_optimizer: list[Callable[[Any, Any], None]] = []  # (optimizer, stash), before its masters are detached


def tell(listeners: list[Callable[..., None]], *args: Any) -> None:
    """Call each of `listeners`, one of the lists above."""
    for listener in listeners:
        listener(*args)
