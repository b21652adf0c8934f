"""The state of a model in a training, and the policy of the model whose forward runs on this thread."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from amp_patch.casts import install, regions
from amp_patch.casts.cpu_half import emulate
from amp_patch.masters.masters import ModelLinks
from amp_patch.model import buffers, copies, incoming
from amp_patch.model.keep_fp32 import forbid_fast_path
from amp_patch.policy import Policy


class _Running(threading.local):
    """The policy of the model whose forward runs on this thread; None outside."""

    def __init__(self) -> None:  # an attribute of the instance, for torch.compile's guards
        self.policy: Policy | None = None


running = _Running()


@dataclass
class ModelState:
    """The state of a model in a training: `module._amp`.

    Attributes:
        policy: of the training.
        low_buffers: names of buffers that were low precision before `initialize`.
        on_demand: whether a state dict makes the masters: for models that no optimizer trains.
        links: of its parameters, for what somebody wrote into their masters, and no forward has seen yet.
        fast_path_off: whether torch's fused encoder layers would meet modules that were kept.
        sharded: whether the model went through `fully_shard` before.
        handles: of hooks on FSDP modules inside the model.
        no_sync: whether DDP's `no_sync()` is entered; around/ddp.py sets it.
        local: whether the gradients of the last forward stay on this process: it ran under `no_sync()`.
        written_buffers: looks for cast buffers that training writes; None after two forwards.
        cleared: how often `zero_grad` was called.
        owner: the model.
        modules: those inside the model when it went through `initialize`; none are known of a copy.
        high: the names of the weights whose products stay 16 bits wide where others are FP8 or FP4.
        wide: of a copy the weights that are FP32, by name, and the types that they are cast to while it is called.
        calls: those of a copy.
        region: in which the model's forward runs; made at the first call, and again after `policy` was changed.
    """

    policy: Policy
    low_buffers: frozenset[str] = frozenset()
    on_demand: bool = False
    links: ModelLinks = field(default_factory=ModelLinks)
    fast_path_off: bool = False
    sharded: bool = False
    handles: list[Any] = field(default_factory=list)
    no_sync: bool = False
    local: bool = False
    written_buffers: buffers.WrittenBuffers | None = None
    cleared: int = 0
    owner: weakref.ref[nn.Module] | None = None
    modules: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    high: tuple[str, ...] = ()
    wide: dict[str, torch.dtype] = field(default_factory=dict)
    calls: copies.Calls = field(default_factory=copies.Calls)
    region: regions.region | None = None

    def __getstate__(self) -> dict[str, Any]:
        # These fields are of the original's parameters and hooks; a copy starts without.
        fresh = {"handles": [], "no_sync": False, "local": False}
        fresh |= dict.fromkeys(("written_buffers", "owner", "region"))
        state = {**vars(self), **fresh}
        del state["links"], state["calls"], state["modules"]
        model = None if self.owner is None else self.owner()
        if model is not None:
            known = [(param, incoming.type_of(param)) for param in model.parameters()]
            state["came"] = [(param, dtype) for param, dtype in known if dtype is not None]
        if model is not None and self.policy.cast_model_type is not None:
            types, state["weights"] = copies.low_weights(model, self.on_demand)
            state["wide"] = {**self.wide, **types}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        copies.widen(state.pop("weights", ()), state["wide"])
        for param, dtype in state.pop("came", ()):
            incoming.note_type(param, dtype)
        vars(self).update(state, links=ModelLinks(), calls=copies.Calls(), modules=weakref.WeakSet())
        emulate(self.policy)  # an unpickled model may be in a new process
        if self.policy.makes_low_tensors:
            install.install(self.policy.op_lists if self.policy.casts_calls else install.ALONE)
        if self.fast_path_off:
            forbid_fast_path()


# Models of trainings that change nothing, which keep their own classes and dictionaries (untouched.py) -> the state,
# and the `methods` that were given to `initialize`.
untouched: weakref.WeakKeyDictionary[nn.Module, tuple[ModelState, tuple[str, ...]]] = weakref.WeakKeyDictionary()


def followed_policy(module: Any) -> Policy | None:
    """The policy of the training that `module` is a model, or a kept module, of; None outside of trainings."""
    state = module.__dict__.get("_amp")  # in place of `vars(module)`, which Dynamo of torch 2.6 cannot trace
    return None if state is None else state.policy
