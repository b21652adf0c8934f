"""module_names: the parts of a model that can be kept in another precision, by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from amp_patch.support.generated_class import base_class

_ONLY_CALL_OTHERS = (nn.Module.forward, nn.Sequential.forward)  # of ModuleList, ModuleDict; of Sequential


def module_names(models: Iterable[nn.Module]) -> list[str]:
    """The modules in which something is computed, each behind those inside it, in the order of their definition.

    Left out are the models themselves, and containers that only call what is in them.
    """
    return [*dict.fromkeys(name for model in models for name in _names(model, ""))]


def _names(module: nn.Module, name: str) -> Iterator[str]:
    for child_name, child in module.named_children():
        yield from _names(child, f"{name}.{child_name}" if name else child_name)
    if name and getattr(base_class(module), "forward", None) not in _ONLY_CALL_OTHERS:
        yield name
