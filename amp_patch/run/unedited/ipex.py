"""A stand-in for IPEX, Intel's extension for PyTorch, for scripts that `run`, `compare` and `check --run` execute.

Intel archived IPEX in March 2026. `install` adds a finder behind all others, so that an installed IPEX is found first.
`ipex.optimize` of a model and an optimizer chooses the level, and an `UneditedScript` then trains the script. If the
environment sets a level (`run --level`, `compare`, `check --run`), the script is trained at that level already, and
`optimize` returns its arguments. Other names of IPEX can be imported. Their use raises ScriptRefused with a way out.
"""

from __future__ import annotations

import copy
import functools
import sys
import weakref
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import nn

from amp_patch.environment import asked_level
from amp_patch.run.unedited.native import NativePrecision
from amp_patch.run.unedited.processes import tell
from amp_patch.run.unedited.refusal import ScriptRefused, where
from amp_patch.run.unedited.script import UneditedScript
from amp_patch.support.patches import Installation, Patches

_NAME = "intel_extension_for_pytorch"
_VERSION = "2.8.0+amp_patch"  # the last release, whose arguments `optimize` takes
# The modules whose weights torch.autocast casts.
_PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

# First part of a name of IPEX that amp_patch does not have -> the way out, as an instruction.
_WAYS_OUT = {
    "xpu": "Leave it out: torch serves these devices by torch.xpu and device='xpu'",
    "quantization": "Leave it out, and quantize with torchao (pip install torchao)",
    "llm": "Leave it out: transformers and vLLM run the model without it",
    "fast_bert": "Call ipex.optimize with the same dtype and optimizer",
    "verbose": "torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON) prints the same lines",
    "cpu": "Leave it out: torch.set_num_threads and numactl choose the cores, torch.amp.GradScaler scales",
}
_WITHOUT = "Leave it out, or install IPEX and the torch that it needs"
# Functions of IPEX that change the speed only: their calls do nothing, with a note.
_SETTINGS = ("enable_onednn_fusion", "enable_auto_channels_last", "disable_auto_channels_last", "set_fp32_math_mode")


class _Missing:
    """A name of IPEX that amp_patch does not have. It can be imported; calls and subclasses raise ScriptRefused."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(".".join(filter(None, (self._name, name))))

    def __call__(self, *args: Any, **kwargs: Any) -> bool | None:
        if self._name == "xpu.is_available":
            return False
        if self._name not in _SETTINGS:
            self._refuse()
        tell(f"amp_patch: ipex.{self._name} has no effect{where()}")
        return None

    def __mro_entries__(self, bases: tuple[Any, ...]) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        way_out = _WAYS_OUT.get(self._name.partition(".")[0], _WITHOUT)
        raise ScriptRefused(f"it uses ipex.{self._name}, which amp_patch does not have", lines="", then=way_out)


class _StandIn(MetaPathFinder, Loader):
    """The finder and loader of IPEX's modules, and the training that `optimize` begins.

    Args:
        patches: the replacements of the installation. Their removal ends the training.
    """

    def __init__(self, patches: Patches) -> None:
        self._patches = patches
        self._script: UneditedScript | None = None
        # Without this, autocasts and GradScalers that the script constructs before `optimize` could not be disabled.
        self._native = NativePrecision(False, lambda: False)
        self._cast = weakref.WeakSet[nn.Module]()  # modules with weights that `_for_inference` has cast

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of any module of IPEX. If IPEX is installed, its modules that are missing stay missing."""
        first, _, below = fullname.partition(".")
        if first != _NAME or (below and getattr(sys.modules.get(first), "__loader__", None) is not self):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Fill a module that is being imported."""
        self._patches.on_remove(lambda: sys.modules.pop(module.__name__, None))
        below = module.__name__.partition(".")[2]
        names: dict[str, Any] = {"__getattr__": _Missing(below).__getattr__}
        if not below:
            names |= {"optimize": self.optimize, "__version__": _VERSION}
            if asked_level() is None:  # otherwise the level's UneditedScript has marked them
                self._native.install(self._patches)
            self._patches.set(torch, "compile", _refusing_ipex(torch.compile))
        vars(module).update(names)

    def optimize(
        self,
        model: nn.Module,
        dtype: torch.dtype | None = None,
        optimizer: Any = None,
        level: str = "O1",
        inplace: bool = False,
        *_: Any,
        split_master_weight_for_bf16: bool | None = None,
        **__: Any,
    ) -> Any:
        """Return (`model`, `optimizer`), for a training. Without an optimizer, return the model for inference.

        Both are the objects that were passed, even if `inplace` is False. The level is O2 for float16, and O5 for
        bfloat16. O5 has split masters, unless `split_master_weight_for_bf16` is False, its default at `level` "O0". For
        float32 and None nothing changes. The other arguments have no effect.

        Raises:
            ScriptRefused: another `dtype` or `level`, or an earlier call has chosen another opt level.
        """
        if dtype not in (None, torch.float32, torch.bfloat16, torch.float16) or level not in ("O0", "O1"):
            way_out = "Give it torch.bfloat16, torch.float16 or torch.float32, and level 'O1' or 'O0'"
            raise ScriptRefused(f"ipex.optimize is given dtype={dtype}, level={level!r}", lines="", then=way_out)
        low = None if dtype is torch.float32 else dtype
        if optimizer is None:
            return self._for_inference(model, low, inplace)
        if low is not None and asked_level() is None:
            split = level == "O1" if split_master_weight_for_bf16 is None else split_master_weight_for_bf16
            self._train("O2" if low is torch.float16 else "O5+split" if split else "O5", optimizer)
        return model, optimizer

    def _train(self, level: str, optimizer: Any) -> None:
        """Begin the `UneditedScript` of this process, unless it has begun, and pass it `optimizer`."""
        if self._script is None:
            script = UneditedScript(level)
            self._patches.on_remove(lambda: script.__exit__())
            self._script = script.__enter__()
            self._native.disable_scalers()
            for module in self._cast:  # the autocast that they need is disabled from here on
                module.float()
        elif self._script.level != level:
            raise ScriptRefused(
                f"ipex.optimize asks for {level} here, and has asked for {self._script.level} before",
                lines="",
                then=f"python -m amp_patch run --level {level} trains all models at that level",
            )
        self._script.note_optimizer(optimizer)

    def _for_inference(self, model: nn.Module, dtype: torch.dtype | None, inplace: bool) -> nn.Module:
        """Return the model, or a copy of it with weights of products in `dtype`, for use in torch.autocast.

        A model in training mode and, while the process trains at a level, every model is returned as it is.
        """
        if dtype is None or model.training or self._script is not None or asked_level() is not None:
            return model
        model = model if inplace else copy.deepcopy(model)
        for module in model.modules():
            if isinstance(module, _PRODUCTS):
                self._cast.add(module.to(dtype))
        return model


def _refusing_ipex(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compile(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("backend") == "ipex":
            way_out = "Leave backend out: torch's own inductor compiles for the CPU"
            raise ScriptRefused("it compiles by the backend 'ipex' of IPEX", lines="", then=way_out)
        return original(*args, **kwargs)

    return compile


def _serve(patches: Patches) -> None:
    finder = _StandIn(patches)
    patches.apply(lambda: sys.meta_path.append(finder), lambda: sys.meta_path.remove(finder))


_installation = Installation(of_process=True)


def install() -> None:
    """Make `import intel_extension_for_pytorch` find the stand-in, unless IPEX is installed. Idempotent."""
    _installation.install(_serve)


def uninstall() -> None:
    """Undo `install`, and end the training that `ipex.optimize` has begun."""
    _installation.uninstall()
