"""module_names: the parts of a model that can be kept in another precision, by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from amp_patch.support.generated_class import base_class

_ONLY_CALL_OTHERS = (nn.Module.forward, nn.Sequential.forward)  # the first is that of ModuleList and ModuleDict


def module_names(models: Iterable[nn.Module], *, with_products: bool = False) -> list[str]:
    """Return the names of the modules that compute, in the order of definition, each after the modules inside it.

    The models themselves and containers that only call their children are left out.

    Args:
        with_products: also leave out torch's modules without a matrix product (activations, norms, dropout).
    """
    named = [pair for model in models for pair in _named(model, "")]
    return [*dict.fromkeys(name for name, module in named if not with_products or _may_multiply(module))]


def _named(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        yield from _named(child, f"{name}.{child_name}" if name else child_name)
    if name and getattr(base_class(module), "forward", None) not in _ONLY_CALL_OTHERS:
        yield name, module


def _may_multiply(module: nn.Module) -> bool:
    is_torchs = base_class(module).__module__.startswith("torch.nn.")
    return not is_torchs or any(True for _ in module.children()) or any(p.dim() > 1 for p in module.parameters())
