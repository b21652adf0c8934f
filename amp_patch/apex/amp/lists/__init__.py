"""Apex's op lists, to be printed and edited: `amp.lists.functional_overrides.FP16_FUNCS.append("x")`.

They are read off `oplists.py` and show what the casts of Apex's variant do: Apex's names, and those that torch has got
since. An edit acts from the next `initialize` or `init` on, which calls `register_edits`.
"""

from __future__ import annotations

from types import ModuleType

from amp_patch import casts
from amp_patch.apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides
from amp_patch.apex.amp.lists._from_oplists import KINDS, names

__all__ = ["functional_overrides", "tensor_overrides", "torch_overrides"]

_REGISTER = {
    "FP16_FUNCS": casts.register_half_function,
    "FP32_FUNCS": casts.register_float_function,
    "CASTS": casts.register_promote_function,
}


def register_edits() -> None:
    """Register the rules of what a caller has put on the lists, and leave alone what he has taken off.

    As in Apex a name that torch does not have is passed over. The rule stays registered (it is that of
    `casts.register_half_function` and its like: for every policy of the process) also if the list is edited back. An
    edit of SEQUENCE_CASTS, or of the message of a banned function, changes nothing.
    """
    for module in (functional_overrides, torch_overrides, tensor_overrides):
        _register_edits(module)


def _register_edits(module: ModuleType) -> None:
    kinds = [kind for kind in KINDS if hasattr(module, kind)]
    made = {kind: set(names(module.ADDRESS, kind)) for kind in kinds}
    edited = {kind: {_name(entry) for entry in getattr(module, kind)} for kind in kinds}
    for kind in _REGISTER.keys() & kinds:
        for name in sorted(edited[kind] - made[kind]):
            if hasattr(module.MODULE, name):
                _REGISTER[kind](module.MODULE, name)
    for name in sorted(set().union(*made.values()) - set().union(*edited.values())):
        if hasattr(module.MODULE, name):
            casts.leave_alone(module.MODULE, name)


def _name(entry: str | tuple[str, str]) -> str:
    return entry if isinstance(entry, str) else entry[0]  # BANNED_FUNCS has messages too
