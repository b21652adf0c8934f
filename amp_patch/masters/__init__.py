"""FP32 masters: which stands behind a parameter, how values and gradients go from one to the other, clipping."""

from __future__ import annotations
