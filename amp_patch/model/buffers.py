"""Buffers of a cast model, and their exact FP32 values.

A buffer is cast like a weight, but no optimizer holds a master of it. So if the cast rounds it, its FP32 value is
stored in the `__dict__` of the module that owns the buffer. Parts, copies and pickles of a model then have the value
too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

import torch
from torch import Tensor, nn

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
    done: dict[Tensor, Tensor] = {}
    for module, name, buffer in found:
        if buffer not in done:
            done[buffer] = convert(module, name, buffer)
        module._buffers[name] = done[buffer]
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
