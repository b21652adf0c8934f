"""A warning about tables of frequencies that the cast of a model rounds, so that sinusoids of positions are wrong."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from amp_patch.model.buffers import EXACT
from amp_patch.support.generated_class import base_class
from amp_patch.support.scripts_line import stacklevel

_PHASE = 0.5  # radians; a smaller error is not warned about


def warn_of_tables(model: nn.Module, inputs: Iterable[Tensor]) -> bool:
    """Warn if a cast buffer of `model` is a table whose angles are off by more than 0.5 radians at these inputs.

    A table of frequencies is recognized by its values: 1.0 and smaller powers of one number, at least four, the
    smallest at most 0.01. A table of angles has products of them with positions 0, 1, 2, ... Others are not told apart
    from tables that may be rounded (decays, schedules, windows). Positions are taken to go up to the length of a
    sequence (dimension 1 of inputs of two or three dimensions) and to the largest number of a vector (times).

    Reads the values of buffers that the cast has rounded, which syncs.
    """
    rounded = [(path, module) for path, module in model.named_modules() if vars(module).get(EXACT)]
    if not rounded:
        return False
    found, last = {}, _last_position(inputs)
    for path, module in rounded:
        for name, exact in vars(module)[EXACT].items():
            low = getattr(module, name, None)  # ScriptModules have no plain `_buffers`
            off = 0.0 if low is None or low.shape != exact.shape else _radians_off(exact.to(low.device), low, last)
            if off > _PHASE:
                found[f"{path}.{name}".lstrip(".")] = off, path
    if found:
        paths = sorted({path for _, path in found.values() if path})
        modules = f", keep_fp32={paths} the modules that own them" if paths else ""
        warnings.warn(
            f"initialize: it cast the buffers {list(found)} of {base_class(model).__name__}, which look like "
            f"frequencies of sinusoids: at positions up to {last}, angles are off by up to "
            f"{max(off for off, _ in found.values()):.2g} radians. keep_fp32='buffers' keeps buffers FP32{modules}; "
            "a module with buffers and no parameters stays FP32 without an option",
            stacklevel=stacklevel(),
        )
    return bool(found)


def _last_position(inputs: Iterable[Tensor]) -> int:
    last = 0
    for x in inputs:
        if x.dim() in (2, 3):
            last = max(last, x.shape[1] - 1)
        elif x.dim() == 1 and x.numel() and x.dtype is not torch.bool and not x.is_complex():
            most = float(x.max())
            last = max(last, int(most)) if most < 1e6 else last
    return last


def _radians_off(exact: Tensor, low: Tensor, last: int) -> float:
    """Return the largest error of the angles that a table gives at positions up to `last`; 0 if it is no such table."""
    exact, low = exact.squeeze(), low.squeeze()
    if exact.dim() == 1 and _is_geometric(exact):
        positions = torch.arange(max(0, last - 4096), last + 1, dtype=torch.int64, device=exact.device)[:, None]
        exact, low = positions * exact, positions * low
    elif not _has_angles(exact):
        return 0.0
    return float((exact[: last + 1] - low[: last + 1].to(exact.dtype)).abs().max())


def _has_angles(table: Tensor) -> bool:
    if table.dim() != 2 or len(table) < 3 or bool(table[0].any()) or not _is_geometric(table[1]):
        return False
    return torch.allclose(table[-1], (len(table) - 1) * table[1], rtol=1e-4)


def _is_geometric(values: Tensor) -> bool:
    """Tell whether `values`, or its two equal halves, are 1.0 and smaller powers of one number."""
    half = len(values) // 2
    if torch.equal(values[:half], values[half:]):
        values = values[:half]
    if len(values) < 4 or values[0] != 1 or not 0 < values[-1] <= 0.01 or bool((values <= 0).any()):
        return False
    ratios = values[1:] / values[:-1]
    return bool(ratios.max() < 1) and bool((ratios / ratios[0] - 1).abs().max() < 1e-3)
