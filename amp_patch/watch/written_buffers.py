"""A warning about cast buffers that each forward writes: running averages and counters stop changing."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm

from amp_patch.model.joints import Call, Entry, ForwardGuest
from amp_patch.support.scripts_line import warn

_BEFORE = "buffers before the forward"  # in `Call.notes`


class WrittenBuffers(ForwardGuest):
    """Compares buffers before and after two training forwards of a model, and warns of cast buffers that both write.

    A buffer that one forward writes may be a cache. A buffer that each forward writes is a counter or a running
    average, which stops changing in low precision if its decay is near 1. Compiled forwards are not compared. The model
    references this object, so the modules are referenced weakly here.

    Attributes:
        owned: (path of the module, the module, name) of each buffer that all compared forwards have written.
    """

    copied = traced = False

    def __init__(self, owned: list[tuple[str, weakref.ref[nn.Module], str]]) -> None:
        self.owned, self.looks = owned, 0

    def enter(self, call: Call) -> None:
        """Store each buffer and its version counter, in a call of training."""
        _, training, has_grad, _ = call.kind
        if self.looks == 2 or not (training and has_grad and self.owned):
            call.state.guests.dismiss(self, call.kind)
        else:
            call.notes[_BEFORE] = self._states()

    def cast_out(self, call: Call, output: Any, result: Any) -> Any:
        """Drop the buffers that the forward has not written; after two forwards warn of the buffers that are left."""
        if (before := call.notes.get(_BEFORE)) is not None:
            self.owned = [
                owned
                for owned, (old, old_version), (new, version) in zip(self.owned, before, self._states(), strict=True)
                if new is not old or version != old_version
            ]
            self.looks += 1
            if self.owned and self.looks == 2:
                self._warn()
        return result

    def _states(self) -> list[tuple[Tensor | None, int]]:
        return [self._state(module(), name) for _, module, name in self.owned]

    def _warn(self) -> None:
        names = [f"{path}.{name}".lstrip(".") for path, _, name in self.owned]
        modules = sorted({path for path, _, _ in self.owned if path})
        kept = f"keep_fp32={modules} keeps their modules FP32, and a" if modules else "A"
        _, module, name = self.owned[0]
        dtype = getattr(getattr(module(), name, None), "dtype", "low precision")
        warn(
            f"initialize: each forward writes the buffers {names}, which are {dtype}: in this type a running average "
            f"with a decay near 1 stops changing, as a counter does after a few hundred steps. {kept} separate module "
            "with buffers and no parameters stays FP32 without an option"
        )

    @staticmethod
    def _state(module: nn.Module | None, name: str) -> tuple[Tensor | None, int]:
        buffer = getattr(module, name, None)  # `getattr`: ScriptModules have no plain `_buffers`
        return buffer, buffer._version if isinstance(buffer, Tensor) and not buffer.is_inference() else -1


def choose(model: nn.Module, entry: Entry) -> WrittenBuffers | None:
    """Return a guest if the training casts buffers of `model` that a forward may write as averages or counters."""
    names = {module: path for path, module in model.named_modules()}
    inside = [(m, name) for m, name in entry.cast_buffers if m in names and not _is_of_a_norm(m, name)]
    return WrittenBuffers([(names[m], weakref.ref(m), name) for m, name in inside]) if inside else None


def _is_of_a_norm(module: nn.Module, name: str) -> bool:
    """Tell whether forwards write buffer `name`, and no warning is due: a norm's statistic, or spectral norm's vector.

    `keep_batchnorm_fp32` decides on the statistics, and no vector is an average.
    """
    hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)]
    of_hooks = any(name in (f"{hook.name}_u", f"{hook.name}_v") for hook in hooks)
    return of_hooks or isinstance(module, nn.modules.batchnorm._NormBase)
