"""What else reads or reduces gradients and weights of a training: guests of the road."""

from __future__ import annotations
