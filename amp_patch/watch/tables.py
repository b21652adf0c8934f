"""A warning about tables of frequencies that the cast of a model rounds, so that sinusoids of positions are wrong."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from amp_patch.model.buffers import EXACT
from amp_patch.support.generated_class import base_class
from amp_patch.support.scripts_line import warn

_PHASE = 0.5  # radians; a smaller error is not warned about


def warn_of_tables(model: nn.Module, inputs: Iterable[Tensor]) -> bool:
    """Warn if the cast has rounded a table of `model` so that angles are off by more than 0.5 radians at `inputs`.

    A buffer is a table of frequencies if its values are 1.0 and smaller powers of one number, at least four values, the
    smallest at most 0.01. It is a table of angles if its rows are products of such frequencies with the positions
    0, 1, 2, ... All other buffers are ignored, because rounding may not harm them (decays, schedules, windows).

    The inputs give the last position: the length of a sequence less 1 (dimension 1 of an input of two or three
    dimensions), or the largest number of a vector (times), whichever is greater.

    Reads the values of buffers that the cast has rounded, which syncs.

    Returns:
        Whether this has warned.
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
        warn(
            f"initialize: it cast the buffers {list(found)} of {base_class(model).__name__}, which look like "
            f"frequencies of sinusoids: at positions up to {last}, angles are off by up to "
            f"{max(off for off, _ in found.values()):.2g} radians. keep_fp32='buffers' keeps buffers FP32{modules}; "
            "a module with buffers and no parameters stays FP32 without an option"
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
    """Return the largest error of angles of the rounded table `low` at positions up to `last`, in radians.

    `exact` has the table's FP32 values. The result is 0 if it is a table of neither frequencies nor angles.
    """
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
    """Tell whether `values` are 1.0 and smaller powers of one number. If both halves are equal, look at one half."""
    half = len(values) // 2
    if torch.equal(values[:half], values[half:]):
        values = values[:half]
    if len(values) < 4 or values[0] != 1 or not 0 < values[-1] <= 0.01 or bool((values <= 0).any()):
        return False
    ratios = values[1:] / values[:-1]
    return bool(ratios.max() < 1) and bool((ratios / ratios[0] - 1).abs().max() < 1e-3)
