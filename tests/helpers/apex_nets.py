"""Models for apex.fp16_utils."""

from __future__ import annotations

import torch

from amp_patch.apex.fp16_utils import *  # noqa: F403  scripts do, and it must give everything

LOW = [torch.float16, torch.bfloat16]
