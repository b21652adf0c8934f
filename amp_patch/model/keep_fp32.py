"""Choice of the modules that stay FP32 inside a cast model: by the user's rules, batch norms, tables of buffers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.model import buffers
from amp_patch.policy import Policy
from amp_patch.support.distributed import is_first_rank
from amp_patch.support.generated_class import base_class
from amp_patch.support.patches import Installation
from amp_patch.support.words import did_you_mean, of_class

logger = logging.getLogger("amp_patch")

# A rule for modules that stay FP32: a qualified name, a class, a module itself, or a predicate over (name, module).
KeepFP32 = str | type[nn.Module] | nn.Module | Callable[[str, nn.Module], bool]
# A rule for parameters: a parameter, its qualified name, or a rule for the modules that hold it.
ParamRule = KeepFP32 | Tensor

BUFFERS = "buffers"  # the rule that keeps all buffers FP32; torch refuses a module of this name (`Module.buffers`)


def kept_modules(
    models: list[nn.Module],
    policy: Policy,
    rules: KeepFP32 | Iterable[KeepFP32],
    caller: str = "initialize",
    *,
    low_tables: bool = False,
) -> list[nn.Module]:
    """Return the outermost modules that stay FP32.

    A module stays FP32 if a rule names it, or if it is a batch norm and the policy keeps batch norms. In a cast model a
    module with buffers and no parameters stays too: low precision would save nothing, and would ruin the angles of a
    rotary table. If a module shares a weight with a module that stays FP32, or reads that module's weight, it also
    stays. The rule "buffers" adds no module (`with_kept_buffers`).

    Args:
        caller: the function that error messages begin with.
        low_tables: whether modules with only low-precision buffers stay too, for models that were low precision before.

    Raises:
        ValueError: a name that no model has, or a class without an instance in any model.
        TypeError: a rule is of no type in `KeepFP32`.
    """
    if _has_buffers(rules):
        rules = [rule for rule in _as_rules(rules, "keep_fp32", caller) if rule != BUFFERS]
    kept = dict.fromkeys(modules_matching(models, rules, "keep_fp32", caller))  # a set in order
    modules = [*dict.fromkeys(module for model in models for module in model.modules())]
    if policy.cast_model_type is not None:
        norms = filter(is_batch_norm, modules) if policy.keep_batchnorm_fp32 else ()
        roots = set(models)
        inside = (m for m in modules if m not in roots and not is_batch_norm(m))
        kept |= dict.fromkeys((*norms, *(m for m in inside if buffers.are_all_that(m, low_tables))))
    # MultiheadAttention reads the weight of `out_proj` and never calls it: if `out_proj` stays FP32, so must the
    # attention.
    kept |= dict.fromkeys(m for m in modules if isinstance(m, nn.MultiheadAttention) and m.out_proj in kept)
    # Without this, a module that shares a weight with an FP32 module would get inputs of another type than the
    # weight's.
    stays = {p for m in kept for p in m.parameters()}
    tied = [m for m in modules if not stays.isdisjoint(m._parameters.values())]
    more = set(tied).difference(*(m.modules() for m in kept))
    if more and policy.cast_model_type is not None and is_first_rank():
        names = [name for model in models for name, m in model.named_modules() if m in more]
        size = 4 * sum(p.numel() for p in {p for m in more for p in m._parameters.values() if p is not None})
        said = "%s: %s stay FP32 too, %d bytes: they share a weight with a module that stays FP32"
        logger.info(said, caller, ", ".join(map(repr, names)), size)
    kept |= dict.fromkeys(tied)
    inner = {child for m in kept if has_forward(m) for child in m.modules() if child is not m}
    return [m for m in kept if m not in inner]


def with_mixed_types(policy: Policy, rules: Any, kept: Iterable[nn.Module]) -> Policy:
    """Return `policy` for a call of `initialize` with `keep_fp32=rules`, under which the modules `kept` stay FP32.

    If all buffers stay FP32, or tensors of a module without a forward, other modules read them beside low precision.
    """
    if policy.cast_model_type is None:
        return policy
    all_buffers = _has_buffers(rules)
    mixes = all_buffers or not all(map(has_forward, kept))
    return replace(policy, keep_buffers_fp32=all_buffers, mixes_types=mixes)


def _has_buffers(rules: Any) -> bool:
    given = rules if isinstance(rules, list | tuple | set | frozenset) else (rules,)
    return BUFFERS in given


def modules_matching(
    models: list[nn.Module], rules: KeepFP32 | Iterable[KeepFP32], argument: str, caller: str
) -> list[nn.Module]:
    """Return the modules that `rules` match, each once. Containers are replaced by the modules inside.

    `rules` are the value of the argument named `argument` of `caller`.

    Raises:
        ValueError: a name that no model has, or a class without an instance in any model.
        TypeError: a rule is of no type in `KeepFP32`.
    """
    found: dict[nn.Module, None] = {}
    for rule in _as_rules(rules, argument, caller):
        named = _named_modules(rule, models)
        if not named and isinstance(rule, str | type | nn.Module):
            names = [name for model in models for name, _ in model.named_modules()]
            raise ValueError(f"{caller}: {argument} names {_no_match(rule, 'module', names)}")
        found.update((m, None) for outer in named for m in _with_tensors(outer))
    return list(found)


def params_matching(models: list[nn.Module], rules: ParamRule | Iterable[ParamRule], argument: str) -> list[Tensor]:
    """Return the parameters that `rules` match, and all parameters of modules that `rules` match, each once.

    `rules` are the value of the argument named `argument` of `initialize`.

    Raises:
        ValueError: a name, class, module or parameter that matches no parameter of `models`.
        TypeError: a rule is of no type in `ParamRule`.
    """
    found: dict[Tensor, None] = {}
    params = [(name, p) for model in models for name, p in model.named_parameters(remove_duplicate=False)]
    for rule in _as_rules(rules, argument, "initialize", Tensor):
        named = [p for name, p in params if p is rule or (isinstance(rule, str) and name == rule)]
        named += [p for module in _named_modules(rule, models) for p in module.parameters()]
        if not named and isinstance(rule, str | type | nn.Module | Tensor):
            names = [name for name, _ in params] + [name for model in models for name, _ in model.named_modules()]
            raise ValueError(f"initialize: {argument} names {_no_match(rule, 'parameter', names)}")
        found.update((p, None) for p in named)
    return list(found)


def _named_modules(rule: Any, models: list[nn.Module]) -> list[nn.Module]:
    return [m for model in models for name, m in model.named_modules() if _matches(rule, name, m)]


def with_forward(module: nn.Module) -> list[nn.Module]:
    """Return `[module]`; for a container without a forward (ModuleList, ModuleDict), the modules in it."""
    return [m for m in _with_tensors(module) if has_forward(m)]


def _with_tensors(module: nn.Module) -> list[nn.Module]:
    """Return `[module]`; for a container, the modules in it, and `module` too if it has tensors as a ParameterList."""
    if has_forward(module):
        return [module]
    own = [module] if module._parameters or module._buffers else []
    return own + [inner for child in module.children() for inner in _with_tensors(child)]


def has_forward(module: nn.Module) -> bool:
    """Tell whether the class of `module` defines a forward: a container (ModuleList, ParameterDict) has none."""
    base: Any = base_class(module)  # a module that stayed FP32 in an earlier training has a generated class
    return base.forward is not nn.Module.forward


def is_batch_norm(module: nn.Module) -> bool:
    """Tell whether `module` is a torch batch norm, or of a subclass (SyncBatchNorm)."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def _as_rules(rules: Any, argument: str, caller: str, *more: type) -> list[Any]:
    """Return `rules`, one rule or several, as a list.

    Raises:
        TypeError: a rule is not a module name, module, Module class or predicate over (name, module), nor an instance
            of a class in `more`.
    """
    one = isinstance(rules, (str, type, *more)) or callable(rules)
    result = [rules] if one else list(rules)
    for rule in result:
        if isinstance(rule, (str, *more)) or (isinstance(rule, type) and issubclass(rule, nn.Module)):
            continue
        if isinstance(rule, type) or not callable(rule):
            raise TypeError(
                f"{caller}: {argument} holds {rule!r}; wanted {'parameters, their names, ' if more else ''}module "
                "names, modules, torch.nn.Module classes or a predicate over (name, module)"
            )
    return result


def _matches(rule: ParamRule, name: str, module: nn.Module) -> bool:
    if isinstance(rule, Tensor):
        return False
    if isinstance(rule, str):
        return name == rule
    if isinstance(rule, type):
        return isinstance(module, rule)
    if isinstance(rule, nn.Module):
        return module is rule
    return bool(rule(name, module))


def _no_match(rule: ParamRule, what: str, names: list[str]) -> str:
    """Return the end of an error text: `rule` matches no `what`; "did you mean" the `names` that are similar to it."""
    given = of_class(rule) if isinstance(rule, nn.Module | Tensor) else repr(rule)
    hint = did_you_mean(rule, filter(None, names)) if isinstance(rule, str) else ""
    return f"{given}, which matches no {what} of the given models{hint}"


_installation = Installation()


def forbid_fast_path() -> None:
    """Disable torch's fused encoder layers in eval mode until `restore`: they require one type in all children."""
    # `add`, not `install`, because user code may have enabled the fast path again since the last call.
    _installation.add(lambda patches: patches.set(torch.backends.mha, "_is_fastpath_enabled", False))
