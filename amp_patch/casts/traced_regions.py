"""Regions in code that torch.compile traces. Dynamo calls the functions of this file while it traces.

While a thread traces, its acting policy is in `this_thread.traced`, and not in the state that eager wrappers read
(state.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from amp_patch.casts.thread_state import DEVICE_TYPES, Traced, is_enabled, native_depth, this_thread
from amp_patch.policy import Policy
from amp_patch.support.compiled import constant_in_traces


def begin_trace(acting: Policy | None, disable: Callable[[str], Callable[[], object]] | None) -> None:
    """Set this thread's state for a frame that torch.compile begins to trace, where `acting` acts.

    Args:
        disable: disables torch.autocast for a device type in the code traced after it; returns a function that undoes
            this.
    """
    this_thread.traced, this_thread.disable = [Traced(acting, native_depth(), [])], disable
    this_thread.traced_emulated = None


def enter_trace_of(acting: Policy | None, disables_torch_autocast: bool, emulated: torch.dtype | None) -> None:
    """Begin a region in code that is being traced; `leave_traced` ends it. The arguments are those of `region`."""
    # A policy is passed as its fields, because Dynamo passes only plain constants to a `constant_in_traces` function.
    enter_traced(None if acting is None else casts_of(acting), disables_torch_autocast, emulated)


# The fields of a policy that decide how a call is cast, in the order of `casts_of`.
_CASTS = ("dtype", "allow_banned", "op_lists", "low_precision_norms", "product_format", "patch_torch_functions")


def casts_of(policy: Policy) -> tuple[Any, ...]:
    """Return the arguments of `casts_policy`: the values of `_CASTS` in `policy`."""
    calls = policy.op_lists, policy.low_precision_norms, policy.product_format, policy.patch_torch_functions
    return policy.dtype, policy.allow_banned, *calls


def emulated_in_trace() -> torch.dtype | None:
    """Return the type whose products a region in this thread's trace emulates; None for none."""
    return this_thread.traced_emulated


# Dynamo calls the next three functions while it traces. When Dynamo traces a `torch.autocast`, it enters it for real,
# so `native_depth` counts the torch.autocasts around the traced code. In a trace without `begin_trace` no policy acts.


@constant_in_traces
def traced() -> Policy | None:
    """Return the policy that acts at the current position of this thread's trace."""
    if not this_thread.traced:
        return None
    inner = this_thread.traced[-1]
    if inner.acting is None or (native_depth() <= inner.depth and not torch._C._is_any_autocast_enabled()):
        return inner.acting
    return None


@constant_in_traces
def enter_traced(casts: tuple[Any, ...] | None, disables_torch_autocast: bool, emulated: torch.dtype | None) -> None:
    """Begin a traced region. `casts`: the arguments of `casts_policy`; None for a region without casts."""
    if this_thread.traced:
        this_thread.traced_emulated = emulated or this_thread.traced_emulated
        disable = this_thread.disable if disables_torch_autocast else None
        undo = [disable(kind) for kind in DEVICE_TYPES if is_enabled(kind)] if disable is not None else []
        this_thread.traced.append(Traced(None if casts is None else casts_policy(*casts), native_depth(), undo))


@constant_in_traces
def leave_traced() -> None:
    """End the innermost region of the traced code."""
    if this_thread.traced:
        for undo in reversed(this_thread.traced.pop().undo):
            undo()


class CastsPolicy(Policy):
    """The acting policy of a trace: a separate type, for which traced_calls.py registers Dynamo's handling."""


@functools.cache
def casts_policy(*casts: Any) -> Policy:
    """Return a policy with the casts that the arguments, of `casts_of`, describe; for equal ones the same object."""
    return CastsPolicy("O1", **dict(zip(_CASTS, casts, strict=True)))
