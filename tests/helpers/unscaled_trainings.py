"""Trainings with `skip_nonfinite`, whose loss is not scaled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

TRAININGS: dict[str, dict[str, Any]] = {
    "O0": {"opt_level": "O0"},
    "O3": {"opt_level": "O3"},
    "O4": {"opt_level": "O4"},
    "O5": {"opt_level": "O5"},
    "O5, split": {"opt_level": "O5", "master_weights": "split"},
    "O5, stochastic": {"opt_level": "O5", "master_weights": "stochastic"},
    "O2 in BF16": {"opt_level": "O2", "dtype": torch.bfloat16},
}

every_training = pytest.mark.parametrize("options", TRAININGS.values(), ids=TRAININGS)
