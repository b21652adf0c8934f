"""Casts of users' functions: decorators and registration."""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from casting import (
    FULL,
    HALF,
    clean_fixture,  # noqa: F401  the fixture `_clean`
    differences,
    namespaces,
    o1,
)
from torch import Tensor

from amp_patch.casts import autocast as casts_autocast
from amp_patch.casts import functions, install, regions

DECORATORS = [
    (functions.half_function, HALF),
    (functions.float_function, FULL),
    (functions.promote_function, FULL),
]


def types_of(*args: Any) -> list[torch.dtype]:
    return [arg.dtype for arg in args]


@pytest.mark.parametrize(("decorator", "expected"), DECORATORS)
def test_decorators_act_while_casts_are_on(decorator: Any, expected: torch.dtype) -> None:
    function = decorator(types_of)
    args = torch.ones(1), torch.ones(1, dtype=HALF), torch.ones(1, dtype=torch.int64)
    assert function(*args) == types_of(*args)
    with regions.region(o1()):
        assert function(*args) == [expected, expected, torch.int64]
        with casts_autocast.disable_casts():
            assert function(*args) == types_of(*args)
    assert function.__name__ == "types_of" and function.__wrapped__ is types_of
    assert inspect.signature(function) == inspect.signature(types_of)


class Callables:
    @functions.half_function
    def method(self, x: Tensor) -> Tensor:
        return x

    @staticmethod
    @functions.half_function
    def static(x: Tensor) -> Tensor:
        return x

    @functions.half_function
    @staticmethod
    def static_inside(x: Tensor) -> Tensor:
        return x

    @functions.half_function
    @classmethod
    def of_class(cls, x: Tensor) -> Tensor:
        assert cls is Callables
        return x

    def plain(self, x: Tensor) -> Tensor:
        return x

    def __call__(self, x: Tensor) -> Tensor:
        return x


class Doubled(torch.autograd.Function):
    @staticmethod
    @functions.half_function
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.seen = x.dtype
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        assert gradient.dtype is ctx.seen
        return gradient * 2


class Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


@pytest.mark.parametrize(
    "function",
    [
        Callables().method,
        Callables.static,
        Callables.static_inside,
        Callables().static_inside,
        Callables.of_class,
        functions.half_function(Callables().plain),
        functions.half_function(Callables()),
        functions.half_function(Plain.apply),
        Doubled.apply,
        functions.half_function(torch._C._nn.gelu),
        functions.half_function(torch.Tensor.relu),
        functions.half_function(functions.half_function(torch.relu)),
    ],
)
def test_kinds_of_callables(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.ones(2, requires_grad=True)
    assert function(x).dtype is FULL
    with regions.region(o1()):
        result = function(x)
    assert result.dtype is HALF
    result.sum().backward()
    assert x.grad is not None and x.grad.dtype is FULL


def test_decorated_builtins_copy_and_pickle() -> None:
    gelu = functions.float_function(torch._C._nn.gelu)
    assert copy.deepcopy(gelu) is gelu
    loaded = pickle.loads(pickle.dumps(gelu))
    with regions.region(o1()):
        assert loaded(torch.ones(1, dtype=HALF)).dtype is FULL


def test_decorators_look_into_containers() -> None:
    seen: dict[str, Any] = {}

    @functions.half_function
    def function(batch: dict[str, Any], *, extra: Any) -> None:
        seen.update(batch=batch, extra=extra)

    with regions.region(o1()):
        function({"x": (torch.ones(1), 3)}, extra=[torch.ones(1)])
    assert seen["batch"]["x"][0].dtype is HALF and seen["batch"]["x"][1] == 3 and seen["extra"][0].dtype is HALF


def test_decorators_refuse_objects_other_than_functions() -> None:
    for decorator, _ in DECORATORS:
        with pytest.raises(TypeError, match=f"{decorator.__name__}: wanted a function, got 3"):
            decorator(3)


@contextlib.contextmanager
def temporary_module() -> Iterator[Any]:
    module = types.ModuleType("temporary_module")
    module.function = types_of
    yield module


@pytest.mark.parametrize("before", [True, False])
def test_registration_before_and_after_install(before: bool) -> None:
    x = torch.ones(1, dtype=HALF)
    with temporary_module() as module:
        if not before:
            install.install()
        functions.register_float_function(module, "function")
        if before:
            assert module.function is types_of
            install.install()
        with regions.region(o1()):
            assert module.function(x) == [FULL]
        install.uninstall()
        assert module.function is types_of
        install.install()
        with regions.region(o1()):
            assert module.function(x) == [FULL], "registration ended with uninstall"


@pytest.mark.parametrize("when", ["before", "after"])
def test_registration_overrides_the_lists(when: str) -> None:
    before = namespaces()
    if when == "after":
        install.install()
    functions.register_float_function(torch, "einsum")
    functions.register_half_function(torch, "sigmoid")
    functions.register_promote_function(torch, "mm")
    functions.register_half_function(torch, "mm")  # a later word holds
    functions.register_promote_function(torch, "mm")
    install.install()
    a = torch.ones(2, 2)
    with regions.region(o1()):
        assert torch.einsum("ij,jk->ik", a.half(), a.half()).dtype is FULL
        assert torch.sigmoid(a).dtype is HALF
        assert torch.mm(a, a.half()).dtype is FULL
        assert (a @ a).dtype is HALF
    install.uninstall()
    assert differences(before, namespaces()) == []


def test_registration_on_classes() -> None:
    class Base:
        def method(self, x: Tensor) -> Tensor:
            return x

        @staticmethod
        def static(x: Tensor) -> Tensor:
            return x

        @classmethod
        def of_class(cls, x: Tensor) -> Tensor:
            assert cls is Derived
            return x

    class Derived(Base):
        pass

    for name in ("method", "static", "of_class"):
        functions.register_half_function(Derived, name)
    install.install()
    with regions.region(o1()):
        x = torch.ones(1)
        assert {getattr(Derived(), name)(x).dtype for name in ("method", "static", "of_class")} == {HALF}
        assert Base().method(x).dtype is FULL
    install.uninstall()
    assert not {"method", "static", "of_class"} & set(vars(Derived))


def test_registration_errors() -> None:
    register = {
        "register_half_function": functions.register_half_function,
        "register_float_function": functions.register_float_function,
        "register_promote_function": functions.register_promote_function,
    }
    for name, function in register.items():
        with pytest.raises(ValueError, match=f"{name}: torch has no function named 'nothing'"):
            function(torch, "nothing")
        with pytest.raises(TypeError, match=f"{name}: torch.float16 is not a function"):
            function(torch, "float16")
