"""Apex's op lists, which scripts may print and edit: `amp.lists.functional_overrides.FP16_FUNCS.append("x")`.

The lists are made from `amp_patch.casts.oplists` in Apex's variant. So they have the names on Apex's lists, and names
that are newer than Apex. An edit acts from the next `initialize` or `init` on, which calls `register_edits`. FP16_FUNCS
applies to trainings in FP16 and BF16, as scripts for NVIDIA's Apex expect.
"""

from __future__ import annotations

from types import ModuleType

from amp_patch.apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides
from amp_patch.apex.amp.lists._from_oplists import KINDS, names
from amp_patch.casts import functions

__all__ = ["functional_overrides", "tensor_overrides", "torch_overrides"]

_REGISTER = {
    "FP16_FUNCS": functions.register_half_function,
    "FP32_FUNCS": functions.register_float_function,
    "CASTS": functions.register_promote_function,
}


def register_edits() -> None:
    """Register functions that user code has added to the lists, and stop the casts of functions that it has removed.

    As in Apex, a name that torch does not have is skipped. A function is registered as by
    `casts.register_half_function` and similar functions: for every policy of the process, and also after the list is
    edited back. Edits of SEQUENCE_CASTS, and of the message of a banned function, have no effect.
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
    taken_off = set().union(*(made[kind] - edited[kind] for kind in kinds))
    put_on = set().union(*(edited[kind] - made[kind] for kind in kinds))
    # A function that was removed from a list and added to no other list is registered without a rule.
    for name in sorted(taken_off - put_on):
        if hasattr(module.MODULE, name):
            functions.register_without_rule(module.MODULE, name)


def _name(entry: str | tuple[str, str]) -> str:
    return entry if isinstance(entry, str) else entry[0]  # BANNED_FUNCS has messages too
