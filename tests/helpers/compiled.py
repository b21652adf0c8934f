"""Comparison of compiled functions with eager ones: the same types and numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def same_as_eager(function, *inputs, backend="aot_eager", **tolerances):
    """Compiled twice (the second call takes what the first made), in one graph: eager's types and numbers."""
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    compiled(*inputs)
    found, expected = compiled(*inputs), function(*inputs)
    torch.testing.assert_close(found, expected, **tolerances)  # types too
    return compiled


def zoo(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Each way to name a function: module functions, composites, methods, operators, unbound methods."""
    y = x @ w
    return (
        *(y, x.matmul(w), torch.Tensor.matmul(x, w), torch.mm(x, w), F.linear(x, w), torch.einsum("ij,jk->ik", x, w)),
        *(y.softmax(-1), F.softmax(y, -1), torch.exp(y), y.exp(), y**2, 2**y, y.sum(), torch.linalg.norm(y)),
        *(F.layer_norm(y, (6,)), F.cross_entropy(y, torch.arange(4)), F.gelu(y), torch.cat([x, y]), y + x),
    )


def operands() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, 6), torch.randn(6, 6)
