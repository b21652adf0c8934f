"""The status of a name of Apex in amp_patch: served, served with a difference, or missing.

Whether a name is served is looked up in the modules of `amp_patch.apex`; the differences are in apex_surface.py.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import amp_patch.apex
from amp_patch.run import apex_surface

SERVED, DIFFERS, MISSING = "served", "differs", "missing"
ELEMENT = "[]"
CALL = "()"
OPTIMIZER = "optimizer"  # the owner of private names that scripts read from an optimizer

# The package `apex`, and Apex's compiled modules, which are top-level modules next to it.
PACKAGES = r"apex|amp_C|apex_C|(fused_layer_norm|fused_adam|fused_dense|mlp|xentropy|syncbn|.*masked_softmax)_cuda"


@cache
def modules() -> dict[str, ModuleType]:
    """Return {name of a module of Apex: amp_patch's module}, for every name that `amp_patch.apex.install` registers."""
    return dict(amp_patch.apex.modules())


@cache
def privates() -> frozenset[str]:
    """Return the names that Apex puts on optimizers. `check` recognises them on any object."""
    kind = modules()["apex.amp._process_optimizer"].AmpOptimizer
    return frozenset(name for name in (*vars(kind), *kind.__annotations__) if re.match("_[a-z]", name))


@cache
def _known() -> dict[str, Any]:
    """Return {attribute of Apex's state or of an optimizer: an example of the attribute's value, or the value's class}.

    Before the first `initialize` these attributes are empty or absent. Without an example, `resolve` could not look up
    a name below the attribute, such as "apex.amp._amp_state.loss_scalers[]._loss_scale".
    """
    amp = modules()
    return {
        "_amp_state": vars(amp["apex.amp._amp_state"])["_amp_state"],
        "loss_scalers": amp["apex.amp.scaler"].LossScaler(1.0),  # an element, as an example
        "opt_properties": amp["apex.amp.frontend"].Properties(),
        "handle": amp["apex.amp.handle"].AmpHandle,
        "_amp_stash": amp["apex.amp._process_optimizer"].AmpOptimizerState,
    }


class Import(NamedTuple):
    """One clause of an import statement, for example `a.b` of `import a.b`."""

    bound: str  # the name that it binds in the file: "a"
    to: str  # the full name of the object that is bound: "a"
    asked: str  # the full name that must exist: "a.b"


def imported(node: ast.AST) -> Iterator[Import]:
    """Yield the clauses of an import statement; for `import *` also one for each known name of the module."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            first = alias.name.partition(".")[0]
            yield Import(alias.asname or first, alias.name if alias.asname else first, alias.name)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        for alias in node.names:
            path = f"{node.module}.{alias.name}"
            if alias.name != "*":
                yield Import(alias.asname or alias.name, path, path)
                continue
            yield Import("*", path, path)
            for name in getattr(modules().get(node.module), "__all__", ()):
                yield Import(name, f"{node.module}.{name}", path)


def resolve(name: str) -> Any:
    """Return the object that amp_patch serves under a name of Apex.

    Args:
        name: for example "apex.amp.initialize"; "apex.amp._amp_state.loss_scalers[]._loss_scale", where `[]` means an
            element; or "apex.amp.initialize().combine_grad", which is an argument of a function.

    Returns:
        The object; the `inspect.Parameter` of an argument; None for an attribute that only instances have.

    Raises:
        AttributeError: amp_patch does not serve the name.
    """
    function, called, argument = name.partition(f"{CALL}.")
    if called:
        parameters = inspect.signature(resolve(function)).parameters
        if argument not in parameters:
            raise AttributeError(f"amp_patch does not serve {name}")
        return parameters[argument]
    parts = name.replace(ELEMENT, "").split(".")
    if parts[0] == OPTIMIZER:
        return _attribute(modules()["apex.amp._process_optimizer"].AmpOptimizer, parts[1:])
    for length in range(len(parts), 0, -1):
        if (module := modules().get(".".join(parts[:length]))) is not None:
            try:
                return _attribute(module, parts[length:])
            except AttributeError:
                continue  # `apex.amp._amp_state` is a module in imports, but an object as an attribute of apex.amp
    raise AttributeError(f"amp_patch does not serve {name}")


def _attribute(found: Any, parts: list[str]) -> Any:
    for part in parts:
        # An instance may not have an attribute yet that its class defines or annotates.
        kind = found if isinstance(found, type) else type(found)
        annotated = any(part in inspect.get_annotations(base) for base in kind.__mro__)
        if not (hasattr(found, part) or hasattr(kind, part) or annotated):
            raise AttributeError(part)
        value = getattr(found, part, None)
        found = value if isinstance(value, ModuleType) else _known().get(part, value)
    return found


@cache
def _names() -> dict[int, list[str]]:
    """Return {id of a function or class: its public names}. Apex has the same object under names of several modules."""
    names: dict[int, list[str]] = {}
    for module in modules():
        for public in getattr(modules()[module], "__all__", ()):
            names.setdefault(id(getattr(modules()[module], public)), []).append(f"{module}.{public}")
    return names


@dataclass
class Finding:
    """A name that the checked files use.

    Attributes:
        status: SERVED, DIFFERS or MISSING.
        note: the difference from Apex, or for a missing name what replaces it, in words; "" if there is neither.
        places: where the files use it, as "train.py:3".
    """

    name: str
    status: str
    note: str
    places: list[str]


def finding(name: str, places: list[str]) -> Finding:
    """Return the `Finding` of a name of Apex, which the files use at `places`."""
    try:
        found = resolve(name.removesuffix(".*"))
    except AttributeError:
        return Finding(
            name, MISSING, amp_patch.apex.ELSEWHERE.get(name.removeprefix("apex.").partition(".")[0], ""), places
        )
    others = _names().get(id(found), []) if callable(found) else []  # a number may be shared by unrelated names
    for pattern, difference in apex_surface.DIFFERENCES.items():
        if any(re.fullmatch(pattern, path) for path in (name, *others)):
            return Finding(name, DIFFERS, difference, places)
    return Finding(name, SERVED, "", places)
