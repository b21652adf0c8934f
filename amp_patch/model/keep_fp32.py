"""Which modules stay FP32 inside a model that is cast: by the user's rules, batch norms, tables of buffers."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from amp_patch.model import buffers
from amp_patch.policy import Policy
from amp_patch.support.patches import Installation

# A rule for modules that stay FP32: a qualified name, a class, a module itself, or a predicate over (name, module).
KeepFP32 = str | type[nn.Module] | nn.Module | Callable[[str, nn.Module], bool]


def kept_modules(
    models: list[nn.Module],
    policy: Policy,
    rules: KeepFP32 | Iterable[KeepFP32],
    caller: str = "initialize",
    *,
    low_tables: bool = False,
) -> list[nn.Module]:
    """The outermost modules that stay FP32; errors begin with the name of the `caller`.

    Those are: modules that `rules` name; batch norms, where the policy keeps them; in a cast model modules that have
    buffers and no parameters, where low precision saves nothing and ruins a rotary table's angles; and modules that
    share a weight with one of these, or read its weight.

    Args:
        low_tables: whether buffers alone may be low precision too: those of models that came so.

    Raises:
        ValueError: a name that no model has, a class of which no model has an instance.
        TypeError: a rule of another kind.
    """
    kept: dict[int, nn.Module] = {}
    kept.update((id(m), m) for m in modules_matching(models, rules, "keep_fp32", caller))
    if policy.cast_model_type is not None and policy.keep_batchnorm_fp32:
        norms = (m for model in models for m in model.modules() if is_batch_norm(m))
        kept.update((id(m), m) for m in norms)
    if policy.cast_model_type is not None:
        roots = {id(model) for model in models}
        inside = (m for model in models for m in model.modules() if id(m) not in roots and not is_batch_norm(m))
        kept.update((id(m), m) for m in inside if buffers.are_all_that(m, low_tables))
    # MultiheadAttention never calls `out_proj`, whose weight it reads: a kept `out_proj` must keep the attention too.
    for model in models:
        for module in model.modules():
            if isinstance(module, nn.MultiheadAttention) and id(module.out_proj) in kept:
                kept[id(module)] = module
    # A module that shares a weight with a kept module would get inputs of another type than the weight's.
    stays = {id(p) for m in kept.values() for p in m.parameters()}
    for model in models:
        for module in model.modules():
            if any(id(p) in stays for p in module._parameters.values()):
                kept.setdefault(id(module), module)
    inner = {id(child) for m in kept.values() for child in m.modules() if child is not m}
    return [m for key, m in kept.items() if key not in inner]


def modules_matching(
    models: list[nn.Module], rules: KeepFP32 | Iterable[KeepFP32], argument: str, caller: str
) -> list[nn.Module]:
    """The modules that the rules of `argument` name, each once; in place of containers those inside.

    Raises:
        ValueError: a name that no model has, a class of which no model has an instance.
        TypeError: a rule of another kind.
    """
    found: dict[int, nn.Module] = {}
    for rule in _as_rules(rules, argument, caller):
        named = [m for model in models for name, m in model.named_modules() if _matches(rule, name, m)]
        if not named and isinstance(rule, str | type | nn.Module):
            raise ValueError(
                f"{caller}: {argument} names {_in_words(rule)}, which matches no module of the given "
                f"models{_nearest(rule, models)}"
            )
        found.update((id(m), m) for outer in named for m in with_forward(outer))
    return list(found.values())


def with_forward(module: nn.Module) -> list[nn.Module]:
    """`module`; in place of a container that is never called itself (ModuleList, ModuleDict), those inside it."""
    if type(module).forward is not nn.Module.forward:
        return [module]
    return [inner for child in module.children() for inner in with_forward(child)]


def is_batch_norm(module: nn.Module) -> bool:
    """Whether `module` is a batch norm of torch's, or of a subclass (SyncBatchNorm)."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def _as_rules(rules: Any, argument: str, caller: str) -> list[KeepFP32]:
    one = isinstance(rules, str | type) or callable(rules)
    result = [rules] if one else list(rules)
    for rule in result:
        if isinstance(rule, str) or (isinstance(rule, type) and issubclass(rule, nn.Module)):
            continue
        if isinstance(rule, type) or not callable(rule):
            raise TypeError(
                f"{caller}: {argument} holds {rule!r}; wanted module names, modules, torch.nn.Module classes or a "
                "predicate over (name, module)"
            )
    return result


def _matches(rule: KeepFP32, name: str, module: nn.Module) -> bool:
    if isinstance(rule, str):
        return name == rule
    if isinstance(rule, type):
        return isinstance(module, rule)
    if isinstance(rule, nn.Module):
        return module is rule
    return bool(rule(name, module))


def _in_words(rule: KeepFP32) -> str:
    return f"a {type(rule).__name__}" if isinstance(rule, nn.Module) else repr(rule)


def _nearest(rule: KeepFP32, models: list[nn.Module]) -> str:
    """Return "; did you mean 'head'?" if a module's name is close to `rule`, otherwise ""."""
    names = [name for model in models for name, _ in model.named_modules() if name] if isinstance(rule, str) else []
    near = difflib.get_close_matches(str(rule), names)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


_installation = Installation()


def forbid_fast_path() -> None:
    """Keep encoder layers from their one fused call in eval mode, which wants all their children of one type."""
    # `add`, not `install`: the user may have turned the fast path on again since the last call.
    _installation.add(lambda patches: patches.set(torch.backends.mha, "_is_fastpath_enabled", False))
