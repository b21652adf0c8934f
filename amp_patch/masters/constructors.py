"""Constructors of torch that ask no class: what they make of a master."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from amp_patch.masters.master import Master
from amp_patch.masters.split_master import SplitMaster, opened
from amp_patch.support.asking import asks_first
from amp_patch.support.patches import Installation, Patches

_of_masters, _of_split_masters = Installation(), Installation()


def take_masters() -> None:
    """Let `nn.Parameter(master)` be an ordinary FP32 parameter in the master's memory, as of any tensor; idempotent.

    Torch wants a subclass whose `detach()` gives that subclass, and refuses any other.
    """
    _of_masters.install(lambda patches: patches.set(nn.Parameter, "__new__", staticmethod(_of_tensor(nn.Parameter))))


def take_split_masters() -> None:
    """Let `torch.tensor`, `as_tensor` and `asarray` find the value of a split master; idempotent."""
    _of_split_masters.install(_redirect)


def _of_tensor(kind: Any) -> Callable[..., Any]:
    own = kind.__new__

    @functools.wraps(own)
    def new(cls: Any, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        return own(cls, data.detach() if isinstance(data, Master) else data, *args, **kwargs)

    return new


def _redirect(patches: Patches) -> None:
    for name in ("tensor", "as_tensor", "asarray"):
        patches.set(torch, name, _that_asks(getattr(torch, name)))


@functools.cache  # cached for good: torch.jit keeps its id, which no other function may get
def _that_asks(own: Any) -> Any:
    builtins = importlib.import_module("torch.jit._builtins")
    function = asks_first(own, SplitMaster, opened)
    if (operator := builtins._find_builtin(own)) is not None:
        builtins._register_builtin(function, operator)
    return function
