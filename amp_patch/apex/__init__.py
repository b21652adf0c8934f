"""Apex's import paths on amp_patch, for scripts with `from apex import amp`.

`python -m amp_patch run train.py` runs such a script unchanged. Or the script has this line before its first import of
Apex::

    import amp_patch.apex; amp_patch.apex.install()

Before `install`, amp_patch adds no module called `apex`: a package that probes for Apex finds only a real one.
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

# Apex's compiled extensions, which are top-level modules.
TOP_LEVEL = ("amp_C", "apex_C")

# Modules of Apex that amp_patch does not have -> their replacement, for the error message.
ELSEWHERE = {
    "contrib": "NVIDIA's apex (https://github.com/NVIDIA/apex) still has apex.contrib",
    "transformer": "NVIDIA's Megatron-Core (pip install megatron-core) has what was apex.transformer",
    "RNN": "torch.nn.LSTM, GRU and RNN run in mixed precision at every opt level",
    "reparameterization": "torch.nn.utils.parametrizations.weight_norm does it",
    "pyprof": "torch.profiler does it",
    "parallel.multiproc": "torchrun, which torch has, starts a process for each GPU",
    "mlp": "NVIDIA's apex still has apex.mlp; torch.nn.Sequential of Linear and ReLU computes the same",
    "fused_dense": "NVIDIA's apex still has apex.fused_dense; torch.nn.Linear and GELU compute the same",
}

_installation = Installation(of_process=True)


def install() -> None:
    """Make `import apex`, `import amp_C` and `import apex_C` return amp_patch's modules. Idempotent.

    If a real Apex is installed, it stays, and only the modules and names that it lacks are added (its present releases
    have no `apex.amp`, `apex.parallel` and `apex.fp16_utils`). `uninstall` undoes this.
    """
    _installation.install(_serve)


def _serve(patches: Patches) -> None:
    ours = dict(modules())
    real: set[str] = set()
    for name, module in ours.items():
        parent = name.rpartition(".")[0]
        # A submodule is searched only in a real parent. In our packages `find_spec` would find our own files, and load
        # them a second time under Apex's names.
        found = _real(name) if not parent or parent in real else None
        if found is None:
            _register(patches, name, module, below_real=parent in real)
        else:
            real.add(name)
            _add_missing(patches, found, module)
    finder = _Elsewhere()
    patches.apply(lambda: sys.meta_path.append(finder), lambda: sys.meta_path.remove(finder))


def uninstall() -> None:
    """Undo `install`: later imports find a real Apex, or fail. Names that a script has imported still work."""
    _installation.uninstall()


def installed() -> bool:
    """Tell whether `install` is in force."""
    return _installation.installed


def modules() -> Iterator[tuple[str, ModuleType]]:
    """Yield (name in Apex, module) for each module of this package. A package is yielded before the modules in it."""
    package = sys.modules[__name__]
    yield "apex", package
    for info in pkgutil.walk_packages(package.__path__, prefix=f"{__name__}."):
        name = info.name.removeprefix(f"{__name__}.")
        yield name if name in TOP_LEVEL else f"apex.{name}", importlib.import_module(info.name)


def _real(name: str) -> ModuleType | None:
    """Return the module that `import name` finds without amp_patch; None if there is none, or if it cannot be imported.

    A folder without `__init__.py`, such as a clone of Apex's repository beside the script, is no module.
    """
    try:
        spec = importlib.util.find_spec(name)
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
    """The last finder on `sys.meta_path`. It raises an error with the replacement of a module that Apex had.

    Python asks it only for modules that no other finder has found.
    """

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        # `from apex import contrib` looks for "amp_patch.apex.contrib", because `apex` is this package.
        first, _, rest = fullname.removeprefix("amp_patch.").partition(".")
        parent = rest.partition(".")[0]
        if first != "apex" or not rest or (f"apex.{parent}" in sys.modules and rest not in ELSEWHERE):
            return None  # the parent module exists, so Python's own error is right
        served = sorted(name for name in sys.modules if name.startswith("apex.") and name.count(".") == 1)
        hint = ELSEWHERE.get(rest) or ELSEWHERE.get(parent, "")
        # The error has no `name=`. With it, `from apex import contrib` would replace this message by Python's.
        raise ModuleNotFoundError(
            f"No module named 'apex.{rest}': amp_patch serves {', '.join(served)}" + (f"; {hint}" if hint else "")
        )
