"""Lists of callbacks through which optional features extend every training; `amp_patch/guests.py` fills them.

The core calls the registered functions in order, and imports no feature. In a training with one optimizer, the steps
after the first ones read none of these lists except `forms`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor, nn

from amp_patch.masters.closed_master import Form
from amp_patch.policy import Policy

# Forms of storage -----------------------------------------------------------------------------------------------------

# A value of Policy.master_weights -> a function that receives `LossScaler.beside`, and returns the compressed form of
# the masters, or None for plain FP32.
forms: dict[Any, Callable[[dict[str, Any]], Form | None]] = {}
# Each function receives a policy, and returns {name in the state dict: object}: the objects whose state is saved with
# the first loss scale of a training of that policy.
beside_scale: list[Callable[[Policy], dict[str, Any]]] = []
# Modules that store an optimizer's state in another form than FP32 tensors, for example in eight bits. In each,
# `is_for(stash)` tells whether it stores this optimizer's state, `overrides(base)` returns methods for the optimizer's
# generated class, and `KEY` tells such a class from others over the same base.
keepers: list[Any] = []

# Ways to step ---------------------------------------------------------------------------------------------------------

ways: list[Any] = []  # strategies (step.py); an optimizer gets the first that suits its class

# Surroundings ---------------------------------------------------------------------------------------------------------

# Each function receives (models, policy, modules that stay FP32, ids of the parameters whose dtype will change,
# process_group). If a feature cannot work with these models, the function raises before `initialize` changes anything.
check_models: list[Callable[[list[nn.Module], Policy, list[nn.Module], set[int], Any], None]] = []
enter_models: list[Callable[[Any, list[nn.Module], list[Any]], None]] = []  # (training, models, targets), at the end
retyped: list[Callable[[Collection[int]], None]] = []  # ids of the parameters whose dtype has changed
unpickled: list[Callable[[], None]] = []  # masters were unpickled or copied, maybe into another process
regrouped: list[Callable[[Any], None]] = []  # masters were put into an optimizer's groups, or taken out
wrapped: list[Callable[[Any], None]] = []  # (wrapper): `scale_loss` was given a wrapper of an optimizer
# One class: the subclass of `ScaledBackward` for trainings with several optimizers, or with parameters in no optimizer.
shared_backward: list[Any] = []
captured: list[Callable[[Any, Any], None]] = []  # (optimizer, stash), at the start of a step that a CUDA graph captures

# Moments of an optimizer ----------------------------------------------------------------------------------------------

check_optimizer: list[Callable[[Any, Policy], None]] = []  # (optimizer, policy): raise before any change
check_group: list[Callable[[Any, Any, list[Tensor]], None]] = []  # (optimizer, stash, params) of `add_param_group`
group_added: list[Callable[[Any, Any], None]] = []  # (optimizer, stash), at the end of `add_param_group`
enter_optimizer: list[Callable[[Any, Any], None]] = []  # (optimizer, stash), new in a training, copied or loaded
leave_optimizer: list[Callable[[Any, Any], None]] = []  # (optimizer, stash), before its masters are detached


def tell(listeners: list[Callable[..., None]], *args: Any) -> None:
    """Call each function of `listeners`, one of the lists of this file, with `args`."""
    for listener in listeners:
        listener(*args)
