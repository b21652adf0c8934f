"""The joints of a model's forward: five events at which optional features act. `amp_patch/guests.py` registers them.

A feature of the forward is a guest, with its own state for each model. A model gets its guests at `initialize`, by
`choosers`. A call of a model without guests runs no code of this file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn
from torch.compiler import is_dynamo_compiling

from amp_patch.policy import Policy
from amp_patch.support.compiled import may_trace_next
from amp_patch.support.scripts_line import frames

# The method's name, the model's mode, whether gradients are on, and whether one tensor is the whole input.
Kind = tuple[str, bool, bool, bool]


class Call:
    """One call of a training's model.

    Attributes:
        state: the model's `ModelState`.
        given: (args, kwargs) as the caller gave them.
        args, kwargs: the same for the method. `enter` may replace them, then the cast of the inputs does.
        outer: the policy of the model whose forward makes this call; None if there is none.
        notes: what guests store during the call, by names of their own.
    """

    def __init__(self, model: nn.Module, state: Any, kind: Kind, args: Any, kwargs: Any, outer: Policy | None) -> None:
        self.model, self.state, self.kind, self.outer = model, state, kind, outer
        self.given, self.args, self.kwargs = (args, kwargs), args, kwargs
        self.notes: dict[str, Any] = {}


class ForwardGuest:
    """A feature of the forward of one model; it overrides the events that it needs.

    The events of a call come in the order of the methods below. At `cast_out` and `leave` the last guest is the first.
    After an error in the call, `leave` follows for each guest whose `enter` has returned.

    A call inside a call of the same training has its inputs cast already, as has a recomputed part of one
    (activation checkpointing): there `call` alone acts. A whole forward that is recomputed has all events.

    Attributes:
        copied: whether copies and pickles of the model have a copy of the guest.
        traced: whether the guest acts in compiled code too, where Dynamo traces its methods.
        retyped: names of weights that have another type during calls than between them.
    """

    copied = traced = True
    retyped: Collection[str] = ()

    def enter(self, call: Call) -> None:
        """Begin a call, before its inputs are cast and outside of the model's region; may replace `call.args`."""

    def cast_in(self, call: Call) -> None:
        """Follow the cast of the inputs: `call.given` has them from before."""

    def call(self, call: Call, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return `method`, a function of the model and the arguments, or a function around it."""
        return method

    def cast_out(self, call: Call, output: Any, result: Any) -> Any:
        """Return the call's result: `result`, which is the method's `output` after the cast, or another value."""
        return result

    def leave(self, call: Call) -> None:
        """End a call."""


class FirstCalls(ForwardGuest):
    """A guest that looks at the first three calls of each kind, outside of compiled code.

    Calls in which a pipeline finds out shapes have arbitrary numbers: they do not count.

    Attributes:
        left: (method, mode, whether gradients are on) -> the number of calls that are still looked at. (Rollouts
            without gradients often have one row, which tells nothing about the batches of the training.)
        stays: whether the guest also acts in later calls.
    """

    stays = False

    def __init__(self) -> None:
        self.left: dict[tuple[str, bool, bool], int] = {}

    def look(self, call: Call) -> None:
        """Look at one of the first calls."""

    def enter(self, call: Call) -> None:
        """Call `look`, or leave the calls of this kind."""
        if is_dynamo_compiling():
            return
        kind = call.kind[:3]
        if self.left.setdefault(kind, 3) and not may_trace_next() and not _finds_shapes():
            self.left[kind] -= 1
            self.look(call)
        if self.left[kind] < 1 and not self.stays:  # replicas of DataParallel share the guest
            call.state.guests.dismiss(self, call.kind)


def _finds_shapes() -> bool:
    """Tell whether torch.distributed.pipelining runs this call on unwritten memory, to find out shapes."""
    pipelines = "torch.distributed.pipelining"
    return f"{pipelines}.stage" in sys.modules and any(
        "infer" in frame.f_code.co_name and frame.f_globals.get("__name__", "").startswith(pipelines)
        for frame in frames()
    )


class Guests:
    """The guests of one model, the outermost first.

    Attributes:
        all: the guests.
        of_kind: kind of a call -> the guests that are left, for kinds that some guests do not need to see any more.
    """

    def __init__(self, guests: Iterable[ForwardGuest] = ()) -> None:
        self.all, self.of_kind = tuple(guests), dict[Kind, tuple[ForwardGuest, ...]]()

    def add(self, guest: ForwardGuest) -> None:
        """Make `guest` the outermost one."""
        self.all, self.of_kind = (guest, *self.all), {}

    def stay(self, guest: FirstCalls) -> None:
        """Let `guest` act in later calls too, also of kinds that it has left."""
        guest.stays, self.of_kind = True, {}

    def dismiss(self, guest: ForwardGuest, kind: Kind) -> None:
        """Tell `guest` no more of calls of this kind, unless they are compiled."""
        if not is_dynamo_compiling():
            self.of_kind[kind] = tuple(each for each in self.of_kind.get(kind, self.all) if each is not guest)


class Entry(NamedTuple):
    """What `initialize` tells `choosers` about a training.

    Attributes:
        kept: the modules that stay FP32.
        cast_buffers: the (module, name) of each buffer that the training casts.
        takes_infinite: whether first inputs with a number that becomes infinite are warned about, in place of an error.
    """

    policy: Policy
    kept: list[nn.Module]
    cast_buffers: list[tuple[nn.Module, str]]
    takes_infinite: bool


# Each function returns a new guest for this model, or None; the order is that of the model's guests.
choosers: list[Callable[[nn.Module, Entry], ForwardGuest | None]] = []
# Each function is called for a model that is copied or pickled, and may return (function, value) for the pickle. The
# copy calls `function(state, value)` with its own `ModelState`.
copied: list[Callable[[nn.Module, Any], tuple[Callable[[Any, Any], None], Any] | None]] = []
# Each function receives a model's class and its own methods by name, and returns overrides for the generated class.
overrides: list[Callable[[type, Mapping[str, Callable[..., Any]]], dict[str, Callable[..., Any]]]] = []


def choose(model: nn.Module, entry: Entry) -> Guests:
    """Return the guests of `model`, which enters a training."""
    return Guests(guest for chooser in choosers if (guest := chooser(model, entry)) is not None)
