"""install() and uninstall(): what `import apex` finds."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest

import amp_patch.apex as shim

APEX_NAMES = ("apex", "amp_C", "apex_C")


def of_apex() -> set[str]:
    return {name for name in sys.modules if name.partition(".")[0] in APEX_NAMES}


@pytest.fixture
def no_apex():
    """Nothing called apex, before and after."""
    assert not of_apex()
    yield
    shim.uninstall()
    for name in of_apex():
        del sys.modules[name]


@pytest.fixture
def real_apex(no_apex, tmp_path, monkeypatch):
    """An installed Apex of today: it has optimizers, and no amp."""
    package = tmp_path / "apex"
    (package / "optimizers").mkdir(parents=True)
    (package / "__init__.py").write_text("from . import optimizers\nreal = True\n")
    (package / "optimizers" / "__init__.py").write_text("class FusedAdam: real = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()


def test_nothing_is_called_apex_until_install(no_apex):
    assert importlib.util.find_spec("apex") is None
    shim.install()
    assert importlib.util.find_spec("apex") is not None
    assert importlib.import_module("apex") is shim


def test_each_module_is_one_object_under_both_names(no_apex):
    shim.install()
    for name in sorted(of_apex()):
        ours = name if name.startswith("apex.") else {"apex": "apex"}.get(name, f"apex.{name}")
        assert sys.modules[name] is importlib.import_module(f"amp_patch.{ours}")


def test_uninstall_leaves_nothing(no_apex):
    before = dict(sys.modules), list(sys.meta_path)
    shim.install()
    shim.install()
    shim.uninstall()
    assert not of_apex() and list(sys.meta_path) == before[1]
    assert importlib.util.find_spec("apex") is None
    shim.uninstall()


def test_a_real_apex_keeps_its_names_and_receives_the_missing_ones(real_apex):
    shim.install()
    apex = importlib.import_module("apex")
    assert apex.real and apex.optimizers.FusedAdam.real
    assert apex.amp is importlib.import_module("amp_patch.apex.amp")
    assert importlib.import_module("apex.optimizers").FusedLAMB.__module__.startswith("amp_patch.")
    assert importlib.import_module("apex.amp.scaler") is importlib.import_module("amp_patch.apex.amp.scaler")
    assert hasattr(apex.amp._amp_state, "verbosity")  # the state, not the module of that name
    shim.uninstall()
    assert importlib.import_module("apex") is apex
    assert not hasattr(apex, "amp") and not hasattr(apex.optimizers, "FusedLAMB")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("apex.amp")


def test_a_broken_apex_and_a_folder_of_that_name_are_none(no_apex, tmp_path, monkeypatch):
    (tmp_path / "apex").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    shim.install()
    assert importlib.import_module("apex") is shim
    shim.uninstall()
    (tmp_path / "apex" / "__init__.py").write_text("import nowhere_to_be_found")
    importlib.invalidate_caches()
    shim.install()
    assert importlib.import_module("apex") is shim


@pytest.mark.parametrize(
    "statement", ["import apex.contrib", "from apex import contrib", "import apex.contrib.sparsity"]
)
def test_a_module_that_is_not_served_says_where_to_go(no_apex, statement):
    shim.install()
    with pytest.raises(
        ImportError, match=r"No module named 'apex.contrib'.*amp_patch serves apex\.amp, .*NVIDIA's apex"
    ):
        exec(statement, {})


@pytest.mark.parametrize("statement", ["import apex.parallel.multiproc", "from apex.parallel import multiproc"])
def test_the_launcher_of_2018_is_refused_and_torchrun_is_named(no_apex, statement):
    shim.install()
    with pytest.raises(ImportError, match=r"No module named 'apex.parallel.multiproc'.*torchrun"):
        exec(statement, {})


def test_a_name_that_a_served_module_lacks_is_an_import_error_of_python_s(no_apex):
    shim.install()
    with pytest.raises(ImportError, match=r"cannot import name 'Foo' from 'amp_patch\.apex\.normalization'"):
        exec("from apex.normalization import Foo", {})


def test_an_install_that_fails_changes_nothing(no_apex, monkeypatch):
    before = dict(sys.modules)

    def fail(*args: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(shim, "_Elsewhere", fail)
    with pytest.raises(RuntimeError, match="planted"):
        shim.install()
    assert not of_apex() and not shim.installed()
    assert set(before) <= set(sys.modules)
