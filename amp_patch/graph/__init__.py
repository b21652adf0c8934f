"""OneFlow's `nn.Graph` on torch.compile: a training step, or an inference, that is compiled and is one call.

Files, the first one to read first:

- `config.py`: GraphConfig: the settings of a graph, with the methods of OneFlow's `graph.config`
- `graph.py`: `Graph`, the class of this folder: its set-up, the checks of its first call, and the step that each
  call runs
- `micro_batches.py`: splitting of a graph's arguments into micro-batches, and joining of the results
- `noted_losses.py`: `loss.backward()` inside a graph's `build`: the loss is recorded, and its backward runs after
  `build`
- `scalers.py`: OneFlow's two grad scalers, with OneFlow's names and arguments
"""

from __future__ import annotations

from amp_patch.graph.config import GraphConfig
from amp_patch.graph.graph import Graph
from amp_patch.graph.scalers import GradScaler, StaticGradScaler

__all__ = ["GradScaler", "Graph", "GraphConfig", "StaticGradScaler"]
