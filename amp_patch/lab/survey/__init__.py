"""The survey: it follows one FP32 step operation by operation, to find the lines of user code that a level breaks."""

from __future__ import annotations
