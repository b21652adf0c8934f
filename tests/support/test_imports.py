"""imports.py: a callback runs once its module is imported; registering it imports nothing."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from amp_patch.support import imports
from amp_patch.support.imports import when_imported

_numbers = itertools.count()


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of a module that nobody has imported."""
    name = f"awaited_{next(_numbers)}"
    (tmp_path / f"{name}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.meta_path)
    yield name
    sys.modules.pop(name, None)
    imports._waiting.pop(name, None)
    sys.meta_path[:] = before


def test_who_waits_is_called_when_the_code_of_the_module_has_run_and_before_its_importer_goes_on(name: str) -> None:
    before = list(sys.meta_path)

    def change(module: ModuleType) -> None:
        module.value += 1

    when_imported(name, change)
    assert name not in sys.modules
    scope: dict[str, int] = {}
    exec(f"from {name} import value", scope)
    assert scope["value"] == 2
    assert sys.meta_path == before, "nobody waits any more"
    importlib.reload(sys.modules[name])
    assert sys.modules[name].value == 1, "once"


def test_an_imported_module_calls_back_at_once(name: str) -> None:
    module, seen = importlib.import_module(name), []
    when_imported(name, seen.append)
    assert seen == [module] and name not in imports._waiting


def test_several_wait_each_once(name: str) -> None:
    seen: list[str] = []

    def first(module: ModuleType) -> None:
        seen.append("first")

    for then in (first, first, lambda module: seen.append("second")):
        when_imported(name, then)
    importlib.import_module(name)
    assert seen == ["first", "second"]


def test_asking_whether_there_is_such_a_module_ends_no_wait(name: str) -> None:
    seen: list[ModuleType] = []
    when_imported(name, seen.append)
    assert importlib.util.find_spec(name) is not None and not seen
    assert seen == [] and [importlib.import_module(name)] == seen


def test_an_import_that_fails_may_be_tried_again(name: str, tmp_path: Path) -> None:
    seen: list[ModuleType] = []
    when_imported(name, seen.append)
    source = tmp_path / f"{name}.py"
    source.write_text("raise OSError('not today')\n")
    with pytest.raises(OSError, match="not today"):
        importlib.import_module(name)
    assert not seen
    source.write_text("value = 12345\n")
    importlib.invalidate_caches()
    assert [importlib.import_module(name)] == seen


def test_a_module_that_is_nowhere_stays_so(name: str) -> None:
    when_imported(f"{name}_not", print)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{name}_not")
    imports._waiting.pop(f"{name}_not")
