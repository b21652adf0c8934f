"""The picture of opt_levels.py: one panel for each task and level, with O0 behind it in grey."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
import numpy as np

matplotlib.use("Agg")  # a file, not a window: works without a display

import matplotlib.pyplot as plt

if TYPE_CHECKING:
    from opt_levels import Result

TITLES = {
    "O0": "O0 · FP32",
    "O1": "O1 · FP16 by operation",
    "O2": "O2 · FP16, FP32 masters",
    "O3": "O3 · FP16 throughout",
    "O4": "O4 · BF16 by operation",
    "O5": "O5 · BF16, FP32 masters",
}
# Okabe and Ito's palette: told apart with every kind of colour vision, and in print.
COLOURS = {"O0": "#555555", "O1": "#0072B2", "O2": "#D55E00", "O3": "#CC79A7", "O4": "#56B4E9", "O5": "#E69F00"}


def smooth(losses: list[float], window: int) -> tuple[np.ndarray, np.ndarray]:
    """(steps, running mean over the `window` losses that end there); a loss that is not finite leaves a gap."""
    window = max(1, min(window, len(losses)))
    return np.arange(window, len(losses) + 1), np.convolve(losses, np.full(window, 1 / window), mode="valid")


def plot(results: dict[str, list[Result]], path: Path) -> None:
    panels = max(len(rows) for rows in results.values())
    style = {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#e6e6e6",
        "grid.linewidth": 0.6,
        "axes.axisbelow": True,
    }
    with plt.rc_context(style):
        figure, grid = plt.subplots(
            len(results),
            panels,
            figsize=(0.9 + 2.25 * panels, 0.5 + 2.35 * len(results)),
            sharex="row",
            sharey="row",
            squeeze=False,
            layout="constrained",
        )
        for axes, rows in zip(grid, results.values(), strict=True):
            window = len(rows[0].losses) // 25
            baseline = next((row for row in rows if row.level == "O0"), None)
            for panel, row in zip(axes, rows, strict=True):
                steps = np.arange(1, len(row.losses) + 1)
                panel.plot(steps, row.losses, color=COLOURS[row.level], alpha=0.2, linewidth=0.6)
                if baseline is not None and row is not baseline:
                    panel.plot(*smooth(baseline.losses, window), color="#9a9a9a", linewidth=3.2, label="O0")
                panel.plot(*smooth(row.losses, window), color=COLOURS[row.level], linewidth=1.5, label=row.level)
                panel.set_title(TITLES[row.level], fontsize=9, fontweight="bold", loc="left")
                panel.text(
                    0.97,
                    0.95,
                    f"held-out {row.metric}\n{row.held_out:.2f}",
                    transform=panel.transAxes,
                    ha="right",
                    va="top",
                    color="#333333",
                )
                panel.set_xlabel("step")
            finite = [loss for row in rows for loss in row.losses if math.isfinite(loss)]
            if finite and max(finite) > 20 * min(finite):
                axes[0].set_yscale("log")
            axes[0].set_ylabel(f"{rows[0].task}: training loss")
        figure.suptitle(
            "The same training at every opt level: running mean of the loss, O0 in grey behind", fontsize=11
        )
        figure.savefig(path, dpi=150)
        plt.close(figure)
