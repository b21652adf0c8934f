"""Apex's import paths, served by amp_patch: scripts that say `from apex import amp` run again.

Either `python -m amp_patch run train.py`, with the script as it is, or one line before its first import of Apex::

    import amp_patch.apex; amp_patch.apex.install()

No module is called `apex` before that: a package that probes for Apex finds only a real installation.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from amp_patch.support.patches import Installation, Patches

# Modules of Apex that stand beside the package `apex`: its compiled extensions.
TOP_LEVEL = ("amp_C", "apex_C")

# Names of Apex that are not served, by their first part behind "apex.", -> where else their function is to be had.
ELSEWHERE = {
    "contrib": "NVIDIA's apex (https://github.com/NVIDIA/apex) still has apex.contrib",
    "transformer": "NVIDIA's Megatron-Core (pip install megatron-core) has what was apex.transformer",
    "RNN": "torch.nn.LSTM, GRU and RNN run in mixed precision at every opt level",
    "reparameterization": "torch.nn.utils.parametrizations.weight_norm does it",
    "pyprof": "torch.profiler does it",
    "mlp": "NVIDIA's apex still has apex.mlp; torch.nn.Sequential of Linear and ReLU computes the same",
    "fused_dense": "NVIDIA's apex still has apex.fused_dense; torch.nn.Linear and GELU compute the same",
}

_installation = Installation(of_process=True)


def install() -> None:
    """Let `import apex`, `import amp_C` and `import apex_C` find amp_patch's. Idempotent; `uninstall` undoes it.

    Where a real Apex is installed it stays, and only the modules and names that it lacks are added to it (its present
    releases have no `apex.amp`, `apex.parallel` and `apex.fp16_utils`).
    """
    _installation.install(_serve)


def _serve(patches: Patches) -> None:
    ours = dict(modules())
    real: set[str] = set()
    for name, module in ours.items():
        parent = name.rpartition(".")[0]
        # No search below our packages: `find_spec` would load our files a second time, under Apex's names.
        found = _real(name) if not parent or parent in real else None
        if found is None:
            _register(patches, name, module, below_real=parent in real)
        else:
            real.add(name)
            _add_missing(patches, found, module)
    finder = _Elsewhere()
    patches.apply(lambda: sys.meta_path.append(finder), lambda: sys.meta_path.remove(finder))


def uninstall() -> None:
    """Undo `install`: later imports find a real Apex, or fail. Names that a script has imported stay usable."""
    _installation.uninstall()


def installed() -> bool:
    """Whether `install` is in force."""
    return _installation.installed


def modules() -> Iterator[tuple[str, ModuleType]]:
    """Every module of this package under the name that Apex has for it; parents first."""
    package = sys.modules[__name__]
    yield "apex", package
    for info in pkgutil.walk_packages(package.__path__, prefix=f"{__name__}."):
        name = info.name.removeprefix(f"{__name__}.")
        top, _, below = name.partition(".")
        if top not in TOP_LEVEL:
            yield f"apex.{name}", importlib.import_module(info.name)
        elif not below:  # Apex's extensions have no modules below them
            yield top, importlib.import_module(info.name)


def _real(name: str) -> ModuleType | None:
    """The module that `import name` finds without us, or None. A broken one, and a mere folder, count as none."""
    try:
        spec = importlib.util.find_spec(name)
        # A folder without __init__.py (a clone of Apex's repository beside the script) is no package of anybody's.
        return None if spec is None or spec.origin is None else importlib.import_module(name)
    except (ImportError, OSError):  # OSError: its compiled part does not fit this torch
        return None


def _register(patches: Patches, name: str, module: ModuleType, *, below_real: bool) -> None:
    patches.set_item(sys.modules, name, module)
    if below_real:
        parent, _, leaf = name.rpartition(".")
        patches.set(sys.modules[parent], leaf, module)


def _add_missing(patches: Patches, real: ModuleType, ours: ModuleType) -> None:
    for name in getattr(ours, "__all__", ()):
        if not hasattr(real, name):
            patches.set(real, name, getattr(ours, name))


class _Elsewhere:
    """The last finder on `sys.meta_path`: names the replacement for a module of Apex that no finder has found."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        # `from apex import contrib` asks for "amp_patch.apex.contrib": the parent's name is this package's.
        first, _, rest = fullname.removeprefix("amp_patch.").partition(".")
        if first != "apex" or not rest or f"apex.{rest.partition('.')[0]}" in sys.modules:
            return None  # the parent exists: Python's error names the missing module
        served = sorted(name for name in sys.modules if name.startswith("apex.") and name.count(".") == 1)
        hint = ELSEWHERE.get(rest.partition(".")[0], "")
        # Raised without `name=`: with it `from apex import contrib` would replace our message by Python's.
        raise ModuleNotFoundError(
            f"No module named 'apex.{rest}': amp_patch serves {', '.join(served)}" + (f"; {hint}" if hint else "")
        )
