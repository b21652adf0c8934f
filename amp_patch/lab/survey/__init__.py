"""Which lines of a training would break at which level: one step in FP32, looked at operation by operation."""

from __future__ import annotations
