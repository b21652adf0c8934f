"""The model's side of a training: its cast, its forward, what stays FP32, buffers, FSDP2."""

from __future__ import annotations
