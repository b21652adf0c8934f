"""Choice of the modules whose products stay 16-bit at the levels with FP8 or FP4: by default first layer and head."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from amp_patch.casts import low_bit, regions
from amp_patch.model.forward import AmpModel, give
from amp_patch.model.keep_fp32 import KeepFP32, modules_matching
from amp_patch.model.kept_module import InnerModule, KeptModule
from amp_patch.model.of_model import ModelState
from amp_patch.policy import Policy
from amp_patch.support import fsdp
from amp_patch.support.compiled import wraps

Rules = KeepFP32 | Iterable[KeepFP32] | None


class HighModule(InnerModule):
    """The `forward` of a module in `keep_high`: it runs with the training's casts, but without FP8 or FP4 products."""

    @classmethod
    def _amp_overrides(cls, base: type, key: tuple[str, ...]) -> dict[str, Any]:
        @wraps(base.forward)  # type: ignore[attr-defined]
        def high(self: Any, *args: Any, **kwargs: Any) -> Any:
            forward, own = self._amp_base.forward, self.__dict__.get("_amp")
            if own is None:
                return forward(self, *args, **kwargs)
            with regions.region(own.policy):
                return forward(self, *args, **kwargs)

        return {"forward": high}


@dataclass(frozen=True)
class Kept:
    """Modules whose calls have 16-bit products, and weights whose products are 16-bit wherever they are used."""

    modules: list[nn.Module]
    weights: list[Tensor]


def kept_high(models: list[nn.Module], policy: Policy, rules: Rules) -> Kept:
    """Return the modules that `rules` match. If `rules` is None, return the first layer and the head of each model.

    A layer is a module with a weight of two or more dimensions. The first layer is the first one that a model defines;
    if it is an embedding or a convolution, which have no low-bit product, there is no first layer. The head is the last
    layer that is no embedding. If a model multiplies by an embedding's weight (a tied head), this product stays 16-bit
    too. Without a product format the result for None is empty.

    Raises:
        ValueError, TypeError: as for `keep_fp32`.
    """
    if rules is not None:
        found = modules_matching(models, rules, "keep_high", "initialize")
        return Kept(found, [p for module in found for p in module.parameters()])
    if policy.product_format is None:
        return Kept([], [])
    modules: dict[int, nn.Module] = {}
    weights: list[Tensor] = []
    for model in models:
        layers = list(_layers(model))
        tables = [layer for layer in layers if hasattr(layer, "num_embeddings")]
        weights += [p for table in tables for p in table.parameters(recurse=False)]
        ends = layers[:1] + [layer for layer in layers if layer not in tables][-1:]
        modules.update((id(layer), layer) for layer in ends if layer not in tables)
    weights += [p for layer in modules.values() for p in layer.parameters()]
    return Kept(list(modules.values()), weights)


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        if module is model and next(module.children(), None) is not None:
            continue  # parameters of a whole model, for example position tables, do not make it a layer
        if any(p is not None and p.dim() > 1 for p in module._parameters.values()):
            yield module


def enter_high(models: list[nn.Module], policy: Policy, kept: Kept) -> None:
    """Mark `kept` to stay 16-bit in `models`, which have just entered a training of `policy`; clear earlier marks.

    If the policy has no product format, change nothing: no product is FP8 or FP4.
    """
    if policy.product_format is None:
        return
    sharded = fsdp.fsdp_modules(models)
    for weight in (*(p for model in models for p in model.parameters()), *(w for w, _ in fsdp.gathered(sharded))):
        low_bit.release(weight)
    stay = {id(weight) for weight in kept.weights}
    for model in models:
        if isinstance(model, AmpModel):
            own: ModelState = vars(model)["_amp"]
            own.high = _names_of(model, stay)
            low_bit.keep_named(model, own.high)
            # Without these hooks, weights that an FSDP module inside gathers during the model's forward would have no
            # mark.
            marks = ((m, functools.partial(_mark, names=_names_of(m, stay))) for m in fsdp.fsdp_modules([model]))
            own.handles += [module.register_forward_pre_hook(mark) for module, mark in marks]
    high = replace(policy, product_format=None)
    roots = {id(model) for model in models}
    for module in kept.modules:
        if id(module) not in roots and not isinstance(module, KeptModule):
            give(module, HighModule, ModelState(high))


def _names_of(model: nn.Module, weights: Collection[int]) -> tuple[str, ...]:
    return tuple(name for name, param in model.named_parameters(remove_duplicate=False) if id(param) in weights)


def _mark(module: nn.Module, _: Any, names: tuple[str, ...]) -> None:
    low_bit.keep_named(module, names)
