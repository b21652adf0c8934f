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
from amp_patch.lab.commands import apex_surface

SERVED, DIFFERS, MISSING = "served", "differs", "missing"
ELEMENT = "[]"
CALL = "()"

# Apex's compiled modules, which are top-level modules next to the package `apex`.
EXTENSIONS = re.compile(r"(fused_layer_norm|fused_adam|fused_dense|mlp|xentropy|syncbn|.*masked_softmax)_cuda$")


@cache
def modules() -> dict[str, ModuleType]:
    """Return {name of a module of Apex: amp_patch's module}, for every name that `amp_patch.apex.install` registers."""
    return dict(amp_patch.apex.modules())


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
            natives = apex_surface.names_of(node.module, apex_surface.NATIVE)
            for name in getattr(modules().get(node.module), "__all__", natives):
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
    if parts[0] == apex_surface.OPTIMIZER:
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
        if not hasattr(found, part) and not _declares(found, part):
            raise AttributeError(part)
        value = getattr(found, part, None)
        found = value if isinstance(value, ModuleType) else _known().get(part, value)
    return found


def _declares(found: Any, name: str) -> bool:
    """Return whether the class of `found` defines or annotates the attribute, which `found` itself may not have yet."""
    kind = found if isinstance(found, type) else type(found)
    return hasattr(kind, name) or any(name in inspect.get_annotations(base) for base in kind.__mro__)


@cache
def _differences() -> tuple[dict[str, str], dict[int, str]]:
    """Return in words how each object that amp_patch serves differs from Apex's (`apex_surface.ROWS`).

    Returns:
        by_name: {full name of Apex: the difference}, for each name with a row; "" if nothing differs.
        by_id: {id of a function or class of amp_patch: the difference}. It serves names without a row: Apex has
            the same object under further names, in other modules.
    """
    by_name, by_id = {}, {}
    for row in apex_surface.ROWS:
        for path in row.paths():
            by_name[path] = row.difference
            if callable(found := resolve(path)):  # a number or a list may be shared by unrelated names
                by_id[id(found)] = row.difference
    return by_name, by_id


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
        return Finding(name, MISSING, _elsewhere(name), places)
    by_name, by_id = _differences()
    difference = by_name.get(name) or by_id.get(id(found), "")
    return Finding(name, DIFFERS if difference else SERVED, difference, places)


def _elsewhere(name: str) -> str:
    first, _, rest = name.partition(".")
    if EXTENSIONS.match(first):
        return "a compiled module of NVIDIA's apex, which scripts use through the package apex"
    return amp_patch.apex.ELSEWHERE.get(rest.partition(".")[0], "") if first == "apex" else ""
