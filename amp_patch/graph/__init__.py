"""OneFlow's `nn.Graph` on torch.compile: a training step, or an inference, that is compiled and is one call."""

from __future__ import annotations

from amp_patch.graph.config import GraphConfig
from amp_patch.graph.graph import Graph
from amp_patch.graph.scalers import GradScaler, StaticGradScaler

__all__ = ["GradScaler", "Graph", "GraphConfig", "StaticGradScaler"]
