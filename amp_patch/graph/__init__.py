"""A training step, or an inference, as one call on torch.compile, in the words of OneFlow's nn.Graph."""

from __future__ import annotations

from amp_patch.graph.config import GraphConfig
from amp_patch.graph.graph import Graph
from amp_patch.graph.scalers import GradScaler, StaticGradScaler

__all__ = ["GradScaler", "Graph", "GraphConfig", "StaticGradScaler"]
