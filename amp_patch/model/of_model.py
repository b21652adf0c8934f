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

import torch
from torch import Tensor, nn

from amp_patch.casts import install, regions
from amp_patch.casts.cpu_half import emulate
from amp_patch.masters.masters import ModelLinks
from amp_patch.model import buffers, copies, incoming
from amp_patch.model.keep_fp32 import forbid_fast_path
from amp_patch.policy import Policy


class _Running(threading.local):
    """The policy of the model whose forward runs on this thread; None if no such forward runs.

    Attributes:
        inputs: the cast inputs of that forward, with their values from before (kept_module.py).
    """

    def __init__(self) -> None:  # attributes of the instance, for torch.compile's guards
        self.policy: Policy | None = None
        self.inputs: tuple[tuple[Tensor, Any], ...] = ()


running = _Running()


@dataclass
class ModelState:
    """The state of a model in a training: `module._amp`.

    Attributes:
        policy: the training's policy.
        low_buffers: names of buffers that were low precision before `initialize`.
        on_demand: whether `state_dict()` makes the masters, because no optimizer trains the model.
        links: finds masters of the model that were written and not yet copied back into their weights.
        forms: the training's `Rounding` of stochastic masters, which knows the positions of the model's parameters.
        fast_path_off: whether torch's fused encoder layers are disabled, because some of their modules stay FP32.
        sharded: whether the model went through `fully_shard` before `initialize`.
        handles: handles of hooks on FSDP modules inside the model.
        written_buffers: finds cast buffers that training writes; None after two forwards.
        cleared: the number of calls of `zero_grad`.
        owner: the model.
        modules: the modules inside the model at `initialize`; empty for a copy.
        high: names of weights whose products stay 16-bit when other products are FP8 or FP4.
        wide: for a copy, its FP32 weights by name, and the types that they are cast to during calls.
        calls: for a copy, the lock around its calls, and the weights that the running call has replaced by casts.
        region: the region around the model's forward; made at the first call, and again after a change of `policy`.
        keeps: whether modules inside the model stay FP32 and may receive its inputs.
        takes_infinite: whether first inputs with a number that becomes infinite are warned about, in place of an error.
        looks: the number of calls whose inputs are still looked at, by their kinds (first_inputs.py).
        masks: by method, positions and names of arguments that were additive masks; their casts saturate.
        told: methods' arguments that a warning has named, and a word for tables.
        mixing: names of methods in which functions that receive several floating types are cast as at O1.
    """

    policy: Policy
    low_buffers: frozenset[str] = frozenset()
    on_demand: bool = False
    links: ModelLinks = field(default_factory=ModelLinks)
    forms: tuple[Any, ...] = ()
    fast_path_off: bool = False
    sharded: bool = False
    handles: list[Any] = field(default_factory=list)
    written_buffers: buffers.WrittenBuffers | None = None
    cleared: int = 0
    owner: weakref.ref[nn.Module] | None = None
    modules: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    high: tuple[str, ...] = ()
    wide: dict[str, torch.dtype] = field(default_factory=dict)
    calls: copies.Calls = field(default_factory=copies.Calls)
    region: regions.region | None = None
    keeps: bool = False
    takes_infinite: bool = False
    looks: dict[tuple[str, bool, bool], int] = field(default_factory=dict)
    masks: dict[str, set[int | str]] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)
    mixing: set[str] = field(default_factory=set)

    def __getstate__(self) -> dict[str, Any]:
        # A copy starts without these fields: they reference parameters and hooks of the original.
        state = {**vars(self), "handles": [], **dict.fromkeys(("written_buffers", "owner", "region"))}
        del state["links"], state["calls"], state["modules"]
        model = None if self.owner is None else self.owner()
        if model is not None:
            known = [(param, incoming.type_of(param)) for param in model.parameters()]
            state["came"] = [(param, dtype) for param, dtype in known if dtype is not None]
            state["places"] = [form.places(model.parameters()) for form in self.forms]
        if model is not None and self.policy.cast_model_type is not None:
            types, state["weights"] = copies.low_weights(model, self.on_demand)
            state["wide"] = {**self.wide, **types}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        copies.widen(state.pop("weights", ()), state["wide"])
        for param, dtype in state.pop("came", ()):
            incoming.note_type(param, dtype)
        for form, places in zip(state.get("forms", ()), state.pop("places", ()), strict=False):
            form.place(places)
        vars(self).update(state, links=ModelLinks(), calls=copies.Calls(), modules=weakref.WeakSet())
        emulate(self.policy)  # an unpickled model may be in a new process
        if self.policy.makes_low_tensors:
            install.install(self.policy.op_lists if self.policy.casts_calls else install.ALONE)
        if self.fast_path_off:
            forbid_fast_path()


# Models of trainings that change nothing (untouched.py) -> their state, and the argument `methods` of `initialize`.
# These models keep their own classes and dictionaries.
untouched: weakref.WeakKeyDictionary[nn.Module, tuple[ModelState, tuple[str, ...]]] = weakref.WeakKeyDictionary()


def followed_policy(module: Any) -> Policy | None:
    """Return the policy of the training that `module` belongs to, as a model or an inner module; else None."""
    state = module.__dict__.get("_amp")  # not `vars(module)`, which Dynamo of torch 2.6 cannot trace
    return None if state is None else state.policy


def cast_mixed_calls(module: Any, method: str) -> bool:
    """Cast calls of several floating types in a method of a training's model as at O1; return False if they are."""
    mixing: set[str] = module.__dict__["_amp"].mixing
    known = method in mixing
    mixing.add(method)
    return not known
