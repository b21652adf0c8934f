"""Small models that record their inputs."""

from __future__ import annotations

import torch

CAST = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}
