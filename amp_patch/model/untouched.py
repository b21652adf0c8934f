"""Models of trainings that change nothing (O0): they keep their class and `__dict__`, which libraries inspect.

Outside of models the casts of the newest O1 training act in every call, so they would act in these models too. While
such casts are installed, the models get the class of other trainings' models, whose forward enters a region.
"""

from __future__ import annotations

from torch import nn

from amp_patch.casts import state as casts_state
from amp_patch.model.forward import AmpModel, give, low_buffers_of, take
from amp_patch.model.kept_module import KeptModule
from amp_patch.model.of_model import ModelState, followed_policy, untouched
from amp_patch.policy import Policy
from amp_patch.support.patches import Installation

_installation = Installation()


def enter_training(models: list[nn.Module], policy: Policy, methods: tuple[str, ...]) -> None:
    """Enter `models` into `untouched` with this policy of O0; they get a generated class only while O1 casts act."""
    for model in models:
        low = low_buffers_of(model)
        for module in model.modules():
            if isinstance(module, KeptModule) or (module is model and isinstance(module, AmpModel)):
                take(module)  # its class is from an earlier training
        untouched[model] = ModelState(policy, low), tuple(name for name in methods if hasattr(model, name))
    if casts_state.default() is not None:
        shield()


def shield() -> None:
    """Give the models in `untouched` generated classes, until `restore`: casts of O1 trainings do not act in them."""
    _installation.install(lambda patches: patches.on_remove(_unshield))
    for model, (state, methods) in list(untouched.items()):
        if followed_policy(model) is None:
            give(model, AmpModel, state, methods)


def _unshield() -> None:
    for model in list(untouched):
        if isinstance(model, AmpModel):
            take(model)
