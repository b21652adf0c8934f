"""One training: loss scale, scale_loss, the step and its skip, DistributedDataParallel, ZeRO."""

from __future__ import annotations
