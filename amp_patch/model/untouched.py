"""Models of trainings that change nothing, O0's: each keeps its own class and dictionary, which libraries look at.

Outside of models the casts of the newest O1 training act in whatever is called, and would act in such a model. While
there are such casts, it has the class that models of other trainings have, whose forward enters a region of its own.
"""

from __future__ import annotations

from torch import nn

from amp_patch.casts import state as casts_state
from amp_patch.model.forward import AmpModel, KeptModule, give, low_buffers_of, take
from amp_patch.model.state import ModelState, followed_policy, untouched
from amp_patch.policy import Policy
from amp_patch.support.patches import Installation

_installation = Installation()


def enter_training(models: list[nn.Module], policy: Policy, methods: tuple[str, ...]) -> None:
    """Let `models` follow `policy`, which changes nothing."""
    for model in models:
        low = low_buffers_of(model)
        for module in model.modules():
            if isinstance(module, KeptModule) or (module is model and isinstance(module, AmpModel)):
                take(module)  # the class that an earlier training gave
        untouched[model] = ModelState(policy, low), tuple(name for name in methods if hasattr(model, name))
    if casts_state.default() is not None:
        shield()


def shield() -> None:
    """Hold the casts of the process off all such models, until `restore`."""
    _installation.install(lambda patches: patches.on_remove(_unshield))
    for model, (state, methods) in list(untouched.items()):
        if followed_policy(model) is None:
            give(model, AmpModel, state, methods)


def _unshield() -> None:
    for model in list(untouched):
        if isinstance(model, AmpModel):
            take(model)
