"""`load_state_dict` of a module inside a cast model: masters take the values of the file, as from the whole model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from amp_patch.model.forward import AmpModel
from amp_patch.model.tensors import load_masters
from amp_patch.support.patches import Installation

_installation = Installation()
_load = functools.partial(load_masters, parts=True)


def install() -> None:
    """Patch `nn.Module.load_state_dict`; idempotent."""
    _installation.install(lambda patches: patches.set(nn.Module, "load_state_dict", _served(nn.Module.load_state_dict)))


def _served(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def load_state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(module, AmpModel) for module in self.modules()):
            return own(self, *args, **kwargs)
        hook = self.register_load_state_dict_pre_hook(_load)
        try:
            return own(self, *args, **kwargs)
        finally:
            hook.remove()

    return load_state_dict
