"""Where FP32 values of weights and of optimizer state are kept otherwise than in FP32 tensors: guests of the road."""

from __future__ import annotations
