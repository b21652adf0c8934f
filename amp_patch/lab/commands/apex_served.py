"""What becomes of a name of Apex here: served as it was, otherwise than by Apex, or missing.

It is asked of the modules of `amp_patch.apex` themselves, and of the table in apex_surface.py.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import amp_patch.apex
from amp_patch.lab.commands import apex_surface

SERVED, DIFFERS, MISSING = "served", "differs", "missing"
ELEMENT = "[]"
CALL = "()"

# Compiled modules of Apex that are top-level modules, beside the package.
EXTENSIONS = re.compile(r"(fused_layer_norm|fused_adam|fused_dense|mlp|xentropy|syncbn|.*masked_softmax)_cuda$")


@cache
def modules() -> dict[str, ModuleType]:
    """Every module that install() registers, under Apex's name for it."""
    return dict(amp_patch.apex.modules())


@cache
def _known() -> dict[str, Any]:
    """Attribute of Apex's state object or of the optimizer -> the instance or class of ours that it holds."""
    amp = modules()
    return {
        "_amp_state": vars(amp["apex.amp._amp_state"])["_amp_state"],
        "loss_scalers": amp["apex.amp.scaler"].LossScaler(1.0),  # stands for each element
        "opt_properties": amp["apex.amp.frontend"].Properties(),
        "handle": amp["apex.amp.handle"].AmpHandle,
        "_amp_stash": amp["apex.amp._process_optimizer"].AmpOptimizerState,
    }


def resolve(name: str) -> Any:
    """What `name` is here, e.g. of "apex.amp._amp_state.loss_scalers[]._loss_scale".

    None for an attribute that only instances have; of "apex.amp.initialize().combine_grad" the argument.

    Raises:
        AttributeError: amp_patch does not serve it.
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
                continue  # apex.amp._amp_state is a module for imports, and an object as an attribute
    raise AttributeError(f"amp_patch does not serve {name}")


def _attribute(found: Any, parts: list[str]) -> Any:
    for part in parts:
        if not hasattr(found, part) and not _declares(found, part):
            raise AttributeError(part)
        value = getattr(found, part, None)
        found = value if isinstance(value, ModuleType) else _known().get(part, value)
    return found


def _declares(found: Any, name: str) -> bool:
    """Whether instances have an attribute that need not be there now."""
    kind = found if isinstance(found, type) else type(found)
    return hasattr(kind, name) or any(name in inspect.get_annotations(base) for base in kind.__mro__)


@cache
def _differences() -> tuple[dict[str, str], dict[int, str]]:
    """The rows' `difference`, by name, and by the id of a function or class that may have other names."""
    by_name, by_id = {}, {}
    for row in apex_surface.ROWS:
        for path in row.paths():
            by_name[path] = row.difference
            if callable(found := resolve(path)):  # an equal number or list elsewhere may be another one
                by_id[id(found)] = row.difference
    return by_name, by_id


@dataclass
class Finding:
    """One name of Apex: where it is used, and what becomes of it here."""

    name: str
    status: str
    note: str
    places: list[str]


def finding(name: str, places: list[str]) -> Finding:
    """Whether amp_patch serves this name of Apex, and with which difference; `places` are where it is used."""
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
        return "a compiled part of NVIDIA's apex, which scripts use through apex"
    return amp_patch.apex.ELSEWHERE.get(rest.partition(".")[0], "") if first == "apex" else ""
