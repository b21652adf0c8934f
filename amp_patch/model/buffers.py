"""Buffers of a cast model: their exact FP32 values, and a warning about buffers that training writes.

A buffer is cast like a weight, but no optimizer holds a master of it. So if the cast rounds it, its FP32 value is
stored in the `__dict__` of the module that owns the buffer. Parts, copies and pickles of a model then have the value
too.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm

from amp_patch.policy import LOW_PRECISION

# A module that owns a buffer, and the buffer's name in it.
Owned = tuple[nn.Module, str]

EXACT = "_amp_exact"  # attribute of a module: name of a buffer -> its FP32 value from before the cast


def are_all_that(module: nn.Module, low: bool = False) -> bool:
    """Tell whether `module` has FP32 buffers and no parameters at all: a rotary table, a window, a filter.

    If `low`, FP16 and BF16 buffers count as FP32 buffers. Otherwise False for a module with an FP16 or BF16 buffer.
    False for a ScriptModule, because its class cannot be replaced.
    """
    own = module._buffers.values()
    return (
        not isinstance(module, torch.jit.ScriptModule)
        and any(
            b is not None and b.dtype in ((torch.float32, *LOW_PRECISION) if low else (torch.float32,)) for b in own
        )
        and (low or not any(b is not None and b.dtype in LOW_PRECISION for b in own))
        and next(module.parameters(), None) is None
    )


def replace(
    owned: Iterable[Owned], convert: Callable[[nn.Module, str, Tensor], Tensor]
) -> list[tuple[nn.Module, str, Tensor]]:
    """Replace each buffer by the result of `convert(module, name, buffer)`. A shared buffer stays shared.

    Returns:
        (module, name, the replaced buffer) for each of `owned`.
    """
    found = [(m, name, buffer) for m, name in owned if (buffer := m._buffers[name]) is not None]
    done: dict[int, Tensor] = {}  # by the id of a replaced buffer: `found` references the buffers
    for module, name, buffer in found:
        if id(buffer) not in done:
            done[id(buffer)] = convert(module, name, buffer)
        module._buffers[name] = done[id(buffer)]
    return found


def cast(owned: Iterable[Owned], dtype: torch.dtype) -> None:
    """Cast FP32 buffers to `dtype`, and store each FP32 value that this rounds. A shared buffer stays shared."""
    for module, name, buffer in replace(owned, lambda module, name, buffer: buffer.to(dtype)):
        _remember(module, name, buffer, dtype)


def uncast(model: nn.Module, but: Collection[str] = ()) -> None:
    """Undo `cast` for all low-precision buffers of `model`, except buffers named in `but`; free the stored values."""
    modules = [*model.named_modules()]
    replace(((m, name) for path, m in modules for name in _low(m) if _join(path, name) not in but), _exact)
    for _, module in modules:
        vars(module).pop(EXACT, None)


def exact_values(model: nn.Module, prefix: str) -> dict[str, Tensor]:
    """Return {name: FP32 value before the cast} for the buffers of `model` whose value the cast has rounded."""
    return {
        name: _exact(module, key, buffer) for name, module, key, buffer in _cast_buffers(model, prefix, remembered=True)
    }


def load(model: nn.Module, state: dict[str, Tensor], prefix: str, but: Collection[str]) -> None:
    """Store the FP32 values that `state` has for low-precision buffers of `model`.

    Torch's `load_state_dict` loads the rounded values into the buffers themselves.

    Args:
        but: names of buffers that were low precision before `initialize`. No values are stored for them.
    """
    for name, module, key, buffer in _cast_buffers(model, "", remembered=False):
        value = state.get(prefix + name)
        if name not in but and isinstance(value, Tensor) and value.shape == buffer.shape:
            _remember(module, key, value.detach().to(buffer.device, torch.float32, copy=True), buffer.dtype)


def _cast_buffers(model: nn.Module, prefix: str, remembered: bool) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    for path, module in model.named_modules(prefix=prefix.removesuffix("."), remove_duplicate=False):
        for name in _low(module):
            buffer = module._buffers[name]
            if buffer is not None and (not remembered or name in vars(module).get(EXACT, ())):
                yield _join(path, name), module, name, buffer


def _remember(module: nn.Module, name: str, value: Tensor, dtype: torch.dtype) -> None:
    """Store the FP32 `value` of the buffer `name` if a cast to `dtype` rounds it, else drop the stored one. Syncs."""
    value = value.detach()
    if value.is_meta or not torch.equal(value, value.to(dtype).float()):
        vars(module).setdefault(EXACT, {})[name] = value
    else:
        vars(module).get(EXACT, {}).pop(name, None)


@torch.no_grad()
def _exact(module: nn.Module, name: str, low: Tensor) -> Tensor:
    """Return the buffer `low` in FP32, with the stored value for each element that nothing has written since the cast.

    An element that nothing has written equals the rounded stored value. Version counters cannot show writes, because a
    buffer that is moved to a device, copied, or broadcast by DDP is another tensor with another version.
    """
    kept: Tensor | None = vars(module).get(EXACT, {}).get(name)
    if kept is None or kept.shape != low.shape:
        return low.float()
    kept = kept.to(low.device)
    return torch.where(kept.to(low.dtype) == low, kept, low.float())


def _low(module: nn.Module) -> list[str]:
    return [name for name, b in module._buffers.items() if b is not None and b.dtype in LOW_PRECISION]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


# ---------------------------------------------------------------------------------------------------------------------
# Running averages


class WrittenBuffers:
    """Compares buffers before and after two training forwards of a model, and warns of cast buffers that both write.

    A buffer that one forward writes may be a cache. A buffer that each forward writes is a counter or a running
    average, which stops changing in low precision if its decay is near 1. Compiled forwards are not compared, and
    copies of a model have no such object. The model references this object, so the modules are referenced weakly here.
    """

    def __init__(self, model: nn.Module, owned: Iterable[Owned]) -> None:
        names = {id(module): path for path, module in model.named_modules()}
        inside = [(m, name) for m, name in owned if id(m) in names]
        averages = [(m, name) for m, name in inside if not _is_of_a_norm(m, name)]
        self.owned = [(names[id(m)], weakref.ref(m), name) for m, name in averages]
        self.looks = 0

    def before(self) -> list[tuple[Tensor | None, int]]:
        """Return (buffer, version counter) for each buffer, the argument of `after` when the forward has ended."""
        return [self._state(module(), name) for _, module, name in self.owned]

    def after(self, before: list[tuple[Tensor | None, int]]) -> bool:
        """Drop the buffers that a forward has not written; after two forwards warn of the buffers that are left.

        Return whether the next forward is to be compared too: False after two, or if no buffer is left.
        """
        now = self.before()
        self.owned = [
            owned
            for owned, (old, old_version), (new, version) in zip(self.owned, before, now, strict=True)
            if new is not old or version != old_version
        ]
        self.looks += 1
        if self.owned and self.looks == 2:
            self._warn()
        return bool(self.owned) and self.looks < 2

    def _warn(self) -> None:
        names = [_join(path, name) for path, _, name in self.owned]
        modules = sorted({path for path, _, _ in self.owned if path})
        kept = f"keep_fp32={modules} keeps their modules FP32, and a" if modules else "A"
        _, module, name = self.owned[0]
        dtype = getattr(getattr(module(), name, None), "dtype", "low precision")
        warnings.warn(
            f"initialize: each forward writes the buffers {names}, which are {dtype}: in this type a running average "
            f"with a decay near 1 stops changing, as a counter does after a few hundred steps. {kept} separate module "
            "with buffers and no parameters stays FP32 without an option",
            stacklevel=6,
        )

    @staticmethod
    def _state(module: nn.Module | None, name: str) -> tuple[Tensor | None, int]:
        buffer = getattr(module, name, None)  # `getattr`: ScriptModules have no plain `_buffers`
        return buffer, buffer._version if isinstance(buffer, Tensor) and not buffer.is_inference() else -1


def _is_of_a_norm(module: nn.Module, name: str) -> bool:
    """Tell whether forwards write buffer `name`, and no warning is due: a norm's statistic, or spectral norm's vector.

    `keep_batchnorm_fp32` decides on the statistics, and no vector is an average.
    """
    hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)]
    of_hooks = any(name in (f"{hook.name}_u", f"{hook.name}_v") for hook in hooks)
    return of_hooks or isinstance(module, nn.modules.batchnorm._NormBase)
