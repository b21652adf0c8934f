"""Choice of the modules whose products stay 16-bit at the levels with FP8 or FP4: by default first layer and head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from amp_patch.casts import low_bit, regions
from amp_patch.model.forward import AmpModel, give, policy_of
from amp_patch.model.joints import Call, ForwardGuest
from amp_patch.model.keep_fp32 import KeepFP32, modules_matching
from amp_patch.model.kept_module import InnerModule, KeptModule
from amp_patch.model.of_model import ModelState
from amp_patch.policy import Policy
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
            with regions.region(own.policy) if is_dynamo_compiling() else own.region:
                return forward(self, *args, **kwargs)

        return {"forward": high}


class HighNames(ForwardGuest):
    """Marks the weights with these names before each call, so that their products stay 16-bit."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def call(self, call: Call, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return `method` under the marks."""
        return low_bit.keeping_named(method, self.names)


class Kept(NamedTuple):
    """Modules whose calls have 16-bit products, and weights whose products are 16-bit wherever they are used."""

    models: list[nn.Module]
    modules: list[nn.Module]
    weights: list[Tensor]


def check(rules: Rules, models: list[nn.Module], _: Any, targets: Any, policy: Policy) -> Kept:
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
        return Kept(models, found, [p for module in found for p in module.parameters()])
    modules: dict[nn.Module, None] = {}
    weights: list[Tensor] = []
    for model in models if policy.product_format is not None else ():
        layers = list(_layers(model))
        tables = [layer for layer in layers if hasattr(layer, "num_embeddings")]
        weights += [p for table in tables for p in table.parameters(recurse=False)]
        ends = layers[:1] + [layer for layer in layers if layer not in tables][-1:]
        modules.update((layer, None) for layer in ends if layer not in tables)
    weights += [p for layer in modules for p in layer.parameters()]
    return Kept(models, list(modules), weights)


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        if module is model and next(module.children(), None) is not None:
            continue  # parameters of a whole model, for example position tables, do not make it a layer
        if any(p is not None and p.dim() > 1 for p in module._parameters.values()):
            yield module


def enter(_: Any, kept: Kept) -> None:
    """Mark `kept` to stay 16-bit in its models, which have just entered a training; clear earlier marks.

    If the policy has no product format, change nothing: no product is FP8 or FP4.
    """
    policy = policy_of(kept.models[0])
    if policy is None or policy.product_format is None:
        return
    for weight in (p for m in kept.models for p in m.parameters()):
        low_bit.release(weight)
    stay = set(kept.weights)
    for model in kept.models:
        named = model.named_parameters(remove_duplicate=False)
        names = tuple(name for name, param in named if param in stay)
        if isinstance(model, AmpModel) and names:
            vars(model)["_amp"].guests.add(HighNames(names))
            low_bit.keep_named(model, names)
    high, roots = replace(policy, product_format=None), set(kept.models)
    for module in kept.modules:
        if module not in roots and not isinstance(module, KeptModule):
            give(module, HighModule, ModelState(high))
