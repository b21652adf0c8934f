"""`ModelState`, what amp_patch stores with a model of a training, and the policy of the model whose forward runs now.

A checkpoint has nothing of this file. `AmpModel.state_dict` (forward.py) returns the model's FP32 values,
`optimizer.state_dict()` the optimizer's state (torch's method; for state in 8 bits `overrides` of
storage/coded_steps.py), and `amp.state_dict` (frontend.py) the loss scales.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from amp_patch.casts import install, regions
from amp_patch.casts.cpu_half import emulate
from amp_patch.masters.masters import ModelLinks
from amp_patch.model import joints
from amp_patch.model.joints import Guests
from amp_patch.policy import Policy


class _Running(threading.local):
    """The policy of the model whose forward runs on this thread; None if no such forward runs."""

    def __init__(self) -> None:  # an attribute of the instance, for torch.compile's guards
        self.policy: Policy | None = None


running = _Running()


@dataclass
class ModelState:
    """The state of a model in a training: `module._amp`.

    Attributes:
        policy: the training's policy.
        low_buffers: names of buffers that were low precision before `initialize`.
        on_demand: whether `state_dict()` makes the masters, because no optimizer trains the model.
        handles: handles of changes that `restore` undoes: hooks on FSDP modules, functions that attributes hold.
        guests: the optional features of the forward, each with its own state (joints.py).
        links: finds masters of the model that were written and not yet copied back into their weights.
        region: the region around the model's forward.
    """

    policy: Policy
    low_buffers: frozenset[str] = frozenset()
    on_demand: bool = False
    handles: list[Any] = field(default_factory=list)
    guests: Guests = field(default_factory=Guests)
    links: ModelLinks = field(default_factory=ModelLinks)
    region: regions.region = field(init=False)

    def __post_init__(self) -> None:
        self.follow(self.policy)

    def follow(self, policy: Policy) -> None:
        """Replace the policy, for calls that begin from now on."""
        self.policy, self.region = policy, regions.region(policy)

    def __getstate__(self) -> dict[str, Any]:
        # A copy makes the other fields anew: they reference parameters and hooks of the original.
        state = {name: getattr(self, name) for name in ("policy", "low_buffers", "on_demand")}
        state["guests"] = [guest for guest in self.guests.all if guest.copied]
        model = None if self.links.model is None else self.links.model()
        if model is not None:
            state["copied"] = [found for copier in joints.copied if (found := copier(model, self)) is not None]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        guests, copied = Guests(state.pop("guests")), state.pop("copied", ())
        self.__init__(**state, guests=guests)  # type: ignore[misc]
        for function, value in copied:
            function(self, value)
        emulate(self.policy)  # an unpickled model may be in a new process
        if self.policy.makes_low_tensors:
            install.install(self.policy.op_lists if self.policy.casts_calls else install.ALONE)


# Models of trainings that change nothing (untouched.py) -> their state, and the argument `methods` of `initialize`.
# These models keep their own classes and dictionaries.
untouched: weakref.WeakKeyDictionary[nn.Module, tuple[ModelState, tuple[str, ...]]] = weakref.WeakKeyDictionary()


def followed_policy(module: Any) -> Policy | None:
    """Return the policy of the training that `module` belongs to, as a model or an inner module; else None."""
    state = module.__dict__.get("_amp")  # not `vars(module)`, which Dynamo of torch 2.6 cannot trace
    return None if state is None else state.policy
