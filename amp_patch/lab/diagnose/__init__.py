"""What somebody asks who looks for the cause: inspect, explain, find_loss_scale."""

from __future__ import annotations
