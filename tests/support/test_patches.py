"""patches.py: replaced attributes come back exactly, in any kind of owner and after failures; installations."""

from __future__ import annotations

import threading
import time
import types
from collections.abc import Iterator

import pytest
import torch
from torch.utils import _device

from amp_patch.support.patches import Installation, Patches, installations


class Base:
    def inherited(self) -> str:
        return "base"


class Derived(Base):
    own = "own"

    @staticmethod
    def static() -> str:
        return "static"

    @property
    def prop(self) -> str:
        return self.__dict__.get("_prop", "unset")

    @prop.setter
    def prop(self, value: str) -> None:
        self.__dict__["_prop"] = value


class Slotted:
    __slots__ = ("field",)


def test_own_slot_of_a_class_is_the_very_object_again() -> None:
    before = dict(vars(Derived))
    patches = Patches()
    patches.set(Derived, "own", 1)
    patches.set(Derived, "static", lambda: "patched")
    assert Derived.own == 1
    patches.remove()
    assert {name: value for name, value in vars(Derived).items() if before.get(name) is not value} == {}
    assert isinstance(vars(Derived)["static"], staticmethod), "the slot was read through getattr"


def test_torch_tensor_method_and_operator_are_inherited_again() -> None:
    x = torch.tensor([2.0])
    patches = Patches()
    patches.set(torch.Tensor, "exp", lambda self: "exp")
    patches.set(torch.Tensor, "__matmul__", lambda self, other: "matmul")
    assert (x.exp(), x @ x) == ("exp", "matmul")
    patches.remove()
    assert "exp" not in vars(torch.Tensor) and "__matmul__" not in vars(torch.Tensor)
    assert (x @ x).item() == 4.0


def test_module_that_answers_through_getattr() -> None:
    assert "lstm" not in vars(torch._VF)
    original = torch._VF.lstm
    patches = Patches()
    patches.set(torch._VF, "lstm", len)
    assert torch._VF.lstm is len
    patches.remove()
    assert "lstm" not in vars(torch._VF)
    assert torch._VF.lstm is original


def test_one_name_twice_comes_apart_in_order() -> None:
    module = types.ModuleType("module")
    module.value = "original"
    patches = Patches()
    for value in ("first", "second"):
        patches.set(module, "value", value)
    assert module.value == "second" and len(patches) == 2
    patches.remove()
    assert module.value == "original" and len(patches) == 0
    patches.remove()  # nothing left: nothing happens
    assert module.value == "original"


def test_instance_with_property_or_slots() -> None:
    derived, slotted, empty = Derived(), Slotted(), Slotted()
    derived.prop, slotted.field = "set", "filled"
    patches = Patches()
    patches.set(derived, "prop", "patched")
    patches.set(slotted, "field", "patched")
    patches.set(empty, "field", "patched")
    assert (derived.prop, slotted.field, empty.field) == ("patched", "patched", "patched")
    patches.remove()
    assert (derived.prop, slotted.field) == ("set", "filled")
    assert not hasattr(empty, "field")


def test_closure_cell() -> None:
    captured = "original"

    def reader() -> str:
        return captured

    (cell,) = reader.__closure__
    patches = Patches()
    patches.set_cell(cell, "patched")
    assert reader() == "patched"
    patches.remove()
    assert reader() == "original"


def test_empty_closure_cell_is_empty_again() -> None:
    cell = types.CellType()
    patches = Patches()
    patches.set_cell(cell, 1)
    assert cell.cell_contents == 1
    patches.remove()
    with pytest.raises(ValueError):
        _ = cell.cell_contents


def test_refused_change_leaves_nothing_on_the_stack() -> None:
    patches = Patches()
    with pytest.raises((AttributeError, TypeError)):
        patches.set(int, "bit_length", None)  # a builtin type takes no attributes
    assert len(patches) == 0
    patches.remove()


def test_one_failing_undo_does_not_keep_the_others_from_running() -> None:
    module = types.ModuleType("module")
    module.kept = "original"
    patches = Patches()
    patches.set(module, "kept", "patched")
    patches.set(module, "fresh", 1)
    del module.fresh  # somebody else cleaned up: our delattr will fail
    with pytest.raises(AttributeError, match="fresh"):
        patches.remove()
    assert module.kept == "original" and len(patches) == 0


# ---------------------------------------------------------------------------------------------------------------------
# Installations


@pytest.fixture
def installation() -> Iterator[Installation]:
    made = Installation()
    yield made
    made.uninstall()


def test_an_installation_is_made_once_and_undone_as_a_whole(installation: Installation) -> None:
    calls = []

    def change(patches: Patches) -> None:
        calls.append("change")
        patches.on_remove(lambda: calls.append("undone"))
        patches.set(Derived, "own", 1)

    for _ in range(2):
        installation.install(change)
        installation.install(change)
        assert installation.installed and installation in installations() and Derived.own == 1
        installation.uninstall()
        installation.uninstall()
        assert not installation.installed and installation not in installations() and Derived.own == "own"
    assert calls == ["change", "undone"] * 2


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("before", [0, 1])
def test_an_installation_that_fails_half_way_is_undone(
    error: type[BaseException], before: int, installation: Installation
) -> None:
    def change(patches: Patches) -> None:
        patches.set(Derived, "static", len)
        raise error("half way")

    for _ in range(before):
        installation.add(lambda patches: patches.set(Derived, "own", 1))
    with pytest.raises(error, match="half way"):
        installation.add(change)
    assert not installation.installed and installation not in installations()
    assert Derived.own == "own" and Derived.static() == "static"


def test_the_newest_installation_is_undone_first_and_process_ones_only_on_request() -> None:
    old, new, lasting = Installation(), Installation(), Installation(of_process=True)
    for made in (old, new, lasting):
        made.install(lambda patches: patches.on_remove(lambda: None))
    assert [found for found in installations() if found in (old, new, lasting)] == [new, old]
    for made in (old, new, lasting):
        made.uninstall()


def test_threads_that_install_together_install_once(installation: Installation) -> None:
    ready, changes = threading.Barrier(4), []

    def change(patches: Patches) -> None:
        changes.append(1)
        time.sleep(0.01)  # lets the others come

    def run() -> None:
        ready.wait()
        installation.install(change)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert changes == [1] and installation.installed


def test_tables_of_torchs_functions_have_the_originals_if_they_are_made_while_others_are_in_force():
    tables = (torch.overrides._get_overridable_functions, _device._device_constructors)
    for table in tables:
        table.cache_clear()
    matmul, tensor, installation = torch.matmul, torch.tensor, Installation()

    def change(patches: Patches) -> None:
        for name, original in (("matmul", matmul), ("tensor", tensor)):
            patches.set(torch, name, lambda *args, original=original: original(*args))

    installation.install(change)
    try:
        assert matmul in torch.overrides.get_overridable_functions()[torch]
        with torch.device("meta"):
            assert torch.tensor([1.0]).is_meta and tensor([1.0]).is_meta
    finally:
        installation.uninstall()
        for table in tables:
            table.cache_clear()
