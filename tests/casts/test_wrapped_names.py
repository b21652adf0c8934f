"""The wrappers in torch's namespace while casts are installed, and its restored functions afterwards."""

from __future__ import annotations

import copy
import gc
import importlib
import inspect
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import wrapper_backends
from casting import (
    FULL,
    HALF,
    clean_fixture,  # noqa: F401  the fixture `_clean`
    differences,
    installed_fixture,  # noqa: F401  the fixture `installed`
    namespaces,
    needs_install,
    o1,
)
from conftest import original
from torch import Tensor, nn

from amp_patch.casts import install, regions
from amp_patch.casts import state as casts_state
from amp_patch.casts import wrappers as cast_wrappers
from amp_patch.casts.oplists import OPLISTS


def test_undo_is_exact() -> None:
    before = namespaces()
    x = torch.ones(2, 2)
    for _ in range(2):
        install.install()
        assert install.installed() and differences(before, namespaces())
        install.install()  # idempotent: no second layer
        assert original(torch.exp) is before[repr(torch)]["exp"]
        with regions.region(o1()):
            assert (x @ x).dtype is HALF
        install.uninstall()
        install.uninstall()
        assert not install.installed()
        assert differences(before, namespaces()) == []
    with regions.region(o1()):
        assert (x @ x).dtype is FULL


def test_a_failing_install_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = namespaces()
    monkeypatch.setitem(OPLISTS, "torch.nothing_of_this_name", {"lower": ("mm",)})
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        install.install()
    assert not install.installed() and differences(before, namespaces()) == []


def test_a_name_that_this_torch_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPLISTS, "torch.fft", {"fp32": ("fft", "fft_of_tomorrow")})
    install.install()
    assert original(torch.fft.fft) is not torch.fft.fft and not hasattr(torch.fft, "fft_of_tomorrow")


def test_wrappers_are_made_once() -> None:
    install.install()
    first = torch.exp, torch.Tensor.exp, F.softmax
    install.uninstall()
    install.install()
    assert (torch.exp, torch.Tensor.exp, F.softmax) == first
    assert torch.conv2d is F.conv2d and torch.einsum is torch.functional.einsum, "one original, one wrapper"


@pytest.mark.parametrize("path", ["exp", "einsum", "Tensor.exp", "Tensor.__matmul__", "nn.functional.softmax"])
def test_wrappers_look_like_their_originals(path: str) -> None:
    def find() -> Any:
        owner, _, name = path.rpartition(".")
        return getattr(install.resolve_address(f"torch.{owner}" if owner else "torch"), name)

    found = find()
    install.install()
    wrapper = find()
    assert wrapper is not found and original(wrapper) is found
    assert (wrapper.__name__, wrapper.__doc__) == (found.__name__, found.__doc__)
    if inspect.isfunction(found):
        assert inspect.isfunction(wrapper) and inspect.signature(wrapper) == inspect.signature(found)
        assert (wrapper.__module__, wrapper.__qualname__) == (found.__module__, found.__qualname__)


@needs_install
def test_wrapped_builtins_do_not_bind_as_methods() -> None:
    class Module:
        act = torch.exp
        project = F.linear
        method = torch.Tensor.exp

    x = torch.ones(2, 2, dtype=HALF)
    with regions.region(o1()):
        assert Module().act(x).dtype is FULL and Module.act(x).dtype is FULL
        assert Module().project(x, x).dtype is HALF
        assert Module.act is Module().act is torch.exp
        assert x.exp().dtype is FULL and torch.Tensor.exp(x).dtype is FULL


@pytest.mark.parametrize(
    "path",
    [
        "torch:exp", "torch:einsum", "torch:Tensor.exp", "torch:Tensor.norm", "torch.nn.functional:linear",
        "torch.nn.functional:softmax", "torch._VF:lstm", "torch.linalg:inv",
    ],
)  # fmt: skip
def test_copies_and_pickles(path: str) -> None:
    module, _, name = path.partition(":")

    def find() -> Any:
        found = install.resolve_address(module)
        for part in name.split("."):
            found = getattr(found, part)
        return found

    found = find()
    install.install()
    wrapper = find()
    assert copy.deepcopy(wrapper) is wrapper and copy.copy(wrapper) is wrapper
    assert copy.deepcopy({"f": wrapper})["f"] is wrapper
    data = pickle.dumps(wrapper)
    assert b"amp_patch" not in data, "the pickle would need amp_patch where it is loaded"
    assert pickle.loads(data) is wrapper
    install.uninstall()
    assert pickle.loads(data) is found or pickle.loads(data) == found


def test_the_backend_is_named_and_the_default_stays(wrappers: str) -> None:
    assert cast_wrappers.backend() == wrappers
    casts_state.set_default(policy := o1())
    with wrapper_backends.use_backend("python"):
        assert cast_wrappers.backend() == "python" and casts_state.current() is policy
        install.install()
        assert type(torch.exp) is cast_wrappers.CastFunction
    assert cast_wrappers.backend() == wrappers and not install.installed() and casts_state.current() is policy


def test_torch_jit_forgets_a_wrapper_that_is_gone() -> None:
    """It knows builtins by their id, which another function may have next: that one was compiled as `torch.eye`."""
    table = importlib.import_module("torch.jit._builtins")._get_builtin_table()

    def wrapper(*args: Any) -> Any:
        return torch.eye(*args)

    known = len(table)
    cast_wrappers.register_with_jit(wrapper, torch.eye)
    assert table[id(wrapper)] == "aten::eye" and len(table) == known + 1
    del wrapper
    gc.collect()
    assert len(table) == known


@needs_install
@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_torch_jit_script_compiles_through_the_wrappers() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Softmax(dim=-1))
    x = torch.randn(2, 4)
    expected = module(x)
    torch.testing.assert_close(torch.jit.script(module)(x), expected, rtol=0, atol=0)
    assert torch.jit.script(_exponential)(x).dtype is FULL


def _exponential(x: Tensor) -> Tensor:
    return torch.exp(x) + F.softmax(x, dim=-1)
