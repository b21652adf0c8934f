"""held_names.py: a replaced function is replaced wherever a module that uses torch holds it, and put back exactly."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from amp_patch.support.held_names import replace_in_attributes, replace_in_modules
from amp_patch.support.patches import Patches

SOURCE = """
import collections
import functools
import torch
from torch import einsum

ACTS = {"a": einsum}
ORDERED = collections.OrderedDict(a=einsum)
DEFAULT = collections.defaultdict(lambda: None, a=einsum)
KEYS = {einsum: 1}
TUPLE = (einsum,)
LIST = [einsum]
PARTIAL = functools.partial(einsum, "ij->ji")

def by_default(x, f=einsum):
    return f

class Net:
    act = staticmethod(einsum)
    acts = {"a": einsum}
"""


def other(*args: Any) -> str:
    return "other"


REPLACED = {id(torch.einsum): (torch.einsum, other)}


@pytest.fixture
def holder() -> Iterator[Any]:
    module = types.ModuleType("holder_of_names")
    sys.modules[module.__name__] = module
    exec(SOURCE, vars(module))
    yield module
    del sys.modules[module.__name__]


def held(module: Any) -> list[Any]:
    """What the module holds in each place that is served."""
    net = module.Net()
    held = [module.einsum, module.ACTS["a"], module.ORDERED["a"], module.DEFAULT["a"], module.PARTIAL.func]
    return [*held, net.acts["a"], net.act]


def test_each_place_is_replaced_and_put_back(holder: Any) -> None:
    patches = Patches()
    before = dict(vars(holder)), dict(vars(holder.Net))
    replace_in_modules(patches, REPLACED)
    assert held(holder) == [other] * 7
    assert [*holder.KEYS, *holder.TUPLE, *holder.LIST, holder.by_default(0)] == [torch.einsum] * 4
    patches.remove()
    assert held(holder) == [torch.einsum] * 7
    assert (dict(vars(holder)), dict(vars(holder.Net))) == before


def test_a_value_assigned_meanwhile_stays(holder: Any) -> None:
    patches = Patches()
    replace_in_modules(patches, REPLACED)
    holder.einsum, holder.ACTS["a"], holder.Net.act = 1, 2, 3
    patches.remove()
    assert (holder.einsum, holder.ACTS["a"], holder.Net.act) == (1, 2, 3)


def test_lazy_modules_and_torch_s_modules_are_not_read(holder: Any) -> None:
    class Lazy(types.ModuleType):
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(f"{name} of a lazy module was looked at")

    class Proxy:
        @property
        def __class__(self) -> Any:
            raise AssertionError("a proxy was asked for its class")

    sys.modules["lazy_of_names"] = Lazy("lazy_of_names")
    sys.modules["no_module_of_names"] = Proxy()  # type: ignore[assignment]
    holder.proxy = Proxy()
    patches = Patches()
    try:
        replace_in_modules(patches, REPLACED)
        assert holder.einsum is other and torch.functional.einsum is not other
    finally:
        patches.remove()
        del sys.modules["lazy_of_names"], sys.modules["no_module_of_names"]


def test_attributes_of_modules() -> None:
    net = nn.Sequential(nn.Linear(1, 1))
    net[0].act, net[0].acts, net.table = torch.einsum, [torch.einsum, {"a": torch.einsum}], {"a": torch.einsum}
    patches = replace_in_attributes(net.modules(), REPLACED)
    found = [net[0].act, net[0].acts[0], net[0].acts[1]["a"], net.table["a"]]
    patches.remove()
    after = [net[0].act, net[0].acts[0], net[0].acts[1]["a"], net.table["a"]]
    assert (found, after) == ([other] * 4, [torch.einsum] * 4)
