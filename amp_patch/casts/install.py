"""Installation of O1's casts: it replaces torch's functions by wrappers, and restores them."""

from __future__ import annotations

import functools
import inspect
import pkgutil
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint

from amp_patch.casts import dynamo
from amp_patch.casts.oplists import LATE, rules_by_name
from amp_patch.casts.regions import as_now
from amp_patch.casts.rules import RULES
from amp_patch.casts.wrappers import (
    Wrapped,
    backend,
    register_wrapper,
    tensor_methods,
    wrapped_by,
    wrapper_at,
)
from amp_patch.support import held_names
from amp_patch.support.imports import when_imported
from amp_patch.support.patches import Installation, Patches

# ---------------------------------------------------------------------------------------------------------------------
# Installation: one per process, since torch's namespace belongs to the process.

_CAUSAL_BIAS = "torch.nn.attention.bias"
_installation = Installation()
_installed: set[str] = set()  # the arguments of `install` whose functions are replaced now
_listed_names: set[tuple[str, str]] = set()  # (address of the owner, name) of each function that is replaced now
ALONE = "alone"  # an argument of `install` beside "torch" and "apex"
# While installed: (id of the owner, name) -> the owner, and the attribute that a wrapper replaced.
_originals: dict[tuple[int, str], tuple[Any, Any]] = {}
at_install: list[Callable[[Patches], None]] = []  # called at the installation of torch's lists
_wrappers: dict[tuple[int, str, str, str], tuple[Any, Any]] = {}  # (id(original), rules, backend) -> both
_registered: dict[tuple[int, str], tuple[Any, str, str]] = {}  # by `register`: (owner, name, rule)


def install(op_lists: str = "torch") -> None:
    """Replace the functions on the op lists, and the functions that users registered, by wrappers. Idempotent.

    While no policy acts (see `region` and `set_default`) the wrappers call the originals. If anything fails, nothing is
    replaced. Names that this torch lacks are skipped. Names of a module that is not imported yet are replaced when user
    code imports it. If another module has imported a function by name, the function is replaced there too
    (`support/held_names.py`).

    Args:
        op_lists: ``"torch"``; or ``"apex"``, which also replaces the functions that only Apex's lists have (arithmetic,
            comparisons), for policies with these lists. Or `ALONE`, for levels that cast the model: only the functions
            whose rule has an `alone`, which corrects calls while no casts act.
    """
    if op_lists in _installed:
        dynamo.hook()
        return
    with _installation.lock:
        if op_lists not in _installed:
            _installation.add(functools.partial(_replace_listed, op_lists=op_lists))


def _replace_listed(patches: Patches, op_lists: str) -> None:
    """Replace the functions that `install(op_lists)` must replace and that no earlier call has replaced."""
    names = [key for key, rule in rules_by_name("torch").items() if RULES[rule].alone is not None]
    wanted = [key for key in (names if op_lists == ALONE else rules_by_name(op_lists)) if key not in _listed_names]
    if not _installed:
        patches.on_remove(_forget_installation)
    _listed_names.update(wanted)
    _replace_names(patches, [key for key in wanted if LATE.get(key[0], "torch") in sys.modules])
    if op_lists != ALONE and not installed():
        for module in (*LATE.values(), _CAUSAL_BIAS):
            if module not in sys.modules:  # names of imported modules were replaced above
                when_imported(module, _replace_late)
        _keep_regions_in_checkpoints(patches)
        if _CAUSAL_BIAS in sys.modules:
            _keep_causal_bias(patches)
        for change in at_install:
            change(patches)
        for owner, name, rule in _registered.values():
            _replace(patches, owner, name, rule, rule)
    held_names.replace_in_modules(patches, _listed())
    dynamo.hook()
    _installed.update((op_lists,) if op_lists == ALONE else ("torch", op_lists, ALONE))


def _listed() -> held_names.Replaced:
    """Return {id(function): (function, wrapper)} for the functions of the op lists that are replaced now."""
    found = [place for place in places() if not place.registered]
    return {id(place.wrapped.original): (place.wrapped.original, place.wrapper) for place in found}


def replace_in_attributes(modules: Iterable[torch.nn.Module]) -> Patches:
    """Replace listed functions by their wrappers in the attributes of `modules` (`self.act = F.softplus`).

    The caller removes the patches when the modules leave their training. If no casts are installed, nothing is
    replaced.
    """
    return held_names.replace_in_attributes(modules, _listed())


def _replace_names(patches: Patches, names: Iterable[tuple[str, str]]) -> None:
    torchs, apexs = rules_by_name("torch"), rules_by_name("apex")
    owners: dict[str, Any] = {}  # address -> owner: resolved once, because an owner has many names
    for address, name in names:
        if address not in owners:
            owners[address] = resolve_address(address)
        owner = owners[address]
        # A rule that the user has registered for a name overrides the lists' rule.
        if hasattr(owner, name) and (id(owner), name) not in _registered:
            key = address, name
            _replace(patches, owner, name, torchs.get(key, "none"), apexs[key])


def _replace_late(module: types.ModuleType) -> None:
    """If casts are installed, replace what they replace in owners that the import of `module` has completed."""

    def replace(patches: Patches) -> None:
        _replace_names(patches, [key for key in rules_by_name("torch") if LATE.get(key[0]) == module.__name__])
        if module.__name__ == _CAUSAL_BIAS:
            _keep_causal_bias(patches)
        dynamo.register_late_wrappers()

    with _installation.lock:
        if installed():
            _installation.add(replace)


def uninstall() -> None:
    """Restore every attribute that `install` replaced, to the same object; inherited attributes are inherited again."""
    _installation.uninstall()


def _forget_installation() -> None:
    tensor_methods.clear()
    _originals.clear()
    _installed.clear()
    _listed_names.clear()


def installed() -> bool:
    """Tell whether the functions on torch's op lists are replaced now; False after `install(ALONE)` alone."""
    return "torch" in _installed


def _keep_causal_bias(patches: Patches) -> None:
    """Let `CausalBias.__torch_function__` recognize attention, and keep a bias that the wrapper casts.

    It tests whether it is called for `F.scaled_dot_product_attention`. That name has the wrapper, which calls the
    original. Without this patch the test fails, and attention takes the bias for a plain tensor: one of unwritten
    memory. A cast of a bias is a tensor without the bias's attributes.
    """
    bias = sys.modules[_CAUSAL_BIAS].CausalBias
    wrapper = torch.nn.functional.scaled_dot_product_attention
    known = wrapped_by(wrapper)
    attention = None if known is None else known.original  # None: user code has replaced the wrapper
    own = vars(bias)["__torch_function__"]

    def __torch_function__(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.to and isinstance(args[1], torch.dtype):
            return args[0]
        return own.__get__(None, cls)(wrapper if func is attention else func, types, args, kwargs)

    patches.set(bias, "__torch_function__", classmethod(__torch_function__))


def _keep_regions_in_checkpoints(patches: Patches) -> None:
    """Make activation checkpointing recompute under the casts of the first forward, as it does with torch.autocast.

    Checkpointed code is recomputed during backward. The regions of its first forward have ended by then, for example a
    region of `disable_casts` or of a module that stays FP32. The patched functions are the two that
    `torch.utils.checkpoint.checkpoint` looks up at each call and passes the function to recompute. Patching
    `checkpoint` itself would miss code that has imported it by name.
    """

    def wrap(original: Callable[..., Any], index: int) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return original(*args[:index], as_now(args[index]), *args[index + 1 :], **kwargs)

        return call

    owner = torch.utils.checkpoint
    # From torch 2.15 on the second function calls the first, so only the first is wrapped.
    for name in ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator"):
        if (generator := getattr(owner, name, None)) is not None:
            patches.set(owner, name, wrap(generator, 0))
            break
    reentrant = owner.CheckpointFunction
    patches.set(reentrant, "forward", staticmethod(wrap(reentrant.forward, 1)))


def resolve_address(address: str) -> Any:
    """Return the module or class of a dotted name of the op lists, for example "torch.Tensor"."""
    # During the import of a submodule its parent does not have it as an attribute yet.
    return sys.modules.get(address) or pkgutil.resolve_name(address)


_rules_of: dict[Any, str] = {}  # filled by `learn_rules`: Dynamo reads a dict, and warns of `functools.cache`


def learn_rules() -> None:
    """Find the functions on torch's op lists that compute, for `rule_of`; idempotent."""
    found = _rules_of
    for (address, name), rule in rules_by_name("torch").items():
        if address in LATE or rule == "scripted" or RULES[rule].shown is None:
            continue
        if (function := getattr(resolve_address(address), name, None)) is not None:
            wrapped = wrapped_by(function)
            found[function if wrapped is None else wrapped.original] = rule
    # This function is written in Python, and a torch function mode is off inside the calls that it makes. Without
    # this line, the calls inside would not be cast.
    found[torch.nn.functional.multi_head_attention_forward] = "lower"


def rule_of(function: Any) -> str | None:
    """Return the name of the rule of a function, or of the function behind a wrapper; None for one without a rule."""
    wrapped = wrapped_by(function)
    if not _rules_of:
        learn_rules()
    return _rules_of.get(function if wrapped is None else wrapped.original)


def _at(owner: Any, name: str) -> Any:
    """Return the attribute `owner.name`. For a class return the unbound object, for example a `staticmethod` object."""
    if not isinstance(owner, type):
        return getattr(owner, name)
    for cls in owner.__mro__:  # the usual case of getattr_static, in a tenth of its time
        if name in (slots := vars(cls)):
            return slots[name]
    return inspect.getattr_static(owner, name, None)


class Place(NamedTuple):
    """The place of a wrapper, `owner.name`. `registered`: by `register_half_function` or a similar function."""

    owner: Any
    name: str
    wrapper: Any
    wrapped: Wrapped
    registered: bool


def places() -> list[Place]:
    """Return the places of all wrappers now."""
    found = [(owner, name, _at(owner, name)) for (_, name), (owner, _) in list(_originals.items())]
    return [
        Place(owner, name, wrapper, wrapped, (id(owner), name) in _registered)
        for owner, name, wrapper in found
        if (wrapped := wrapped_by(wrapper)) is not None  # else a later patch replaced the wrapper
    ]


def _replace(patches: Patches, owner: Any, name: str, rule: str, apex_rule: str) -> None:
    found = _at(owner, name)
    _, original = _originals.setdefault((id(owner), name), (owner, found))
    key = (id(original), rule, apex_rule, backend())
    if key not in _wrappers:
        _wrappers[key] = (original, wrapper_at(owner, name, original, rule, apex_rule))
    wrapper = _wrappers[key][1]
    patches.set(owner, name, wrapper)
    register_wrapper(owner, name, wrapper, original, rule, apex_rule)


def register(module: Any, name: str, rule: str, caller: str) -> None:
    """Give `module.name` its own rule: now if the casts are installed, and at each later `install`.

    Args:
        caller: the function of `amp` that errors name.

    Raises:
        ValueError: `module` has no such name.
        TypeError: `module.name` is not callable.
    """
    where = getattr(module, "__name__", repr(module))
    if not hasattr(module, name):
        raise ValueError(f"{caller}: {where} has no function named {name!r}")
    if not callable(getattr(module, name)):
        raise TypeError(f"{caller}: {where}.{name} is not a function, it is {getattr(module, name)!r}")
    with _installation.lock:
        if installed():
            _replace(_installation.patches, module, name, rule, rule)
        _registered[id(module), name] = (module, name, rule)
