"""The kernels of steps in one pass: how often they are called, and whether they round as torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from amp_patch import multi_tensor


def spied_kernels(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors each call of the kernels has from now on; it hides nothing from them."""
    calls: list[int] = []

    def spied(kernel: Any) -> Any:
        def call(grads: Any, *args: Any, **options: Any) -> None:
            kernel(grads, *args, **options)
            calls.append(len(grads))

        return call

    for name in ("multi_tensor_adam", "multi_tensor_sgd"):
        monkeypatch.setattr(multi_tensor, name, spied(getattr(multi_tensor, name)))
    return calls


@torch.no_grad()
def rounds_as_torch(device: str = "cpu") -> bool:
    """Tell by three small steps whether this torch's fused Adam on `device` rounds as amp_patch's kernel does.

    On CUDA it does not: torch decays by `param -= lr * weight_decay * param`, and nvcc chooses which products it fuses.
    """
    generator = torch.Generator().manual_seed(0)
    ours, theirs = ([torch.full([77], value, device=device) for value in (0.3, 0.0, 0.0)] for _ in range(2))
    counts = [torch.zeros((), device=device) for _ in range(2)]
    options = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1}
    for _ in range(3):
        grad = torch.randn(77, generator=generator).to(device)
        (p, m, v), (q, n, w) = ours, theirs
        multi_tensor.multi_tensor_adam([grad], [p], [m], [v], None, [counts[0]], **options, decoupled=True)
        counts[1].add_(1)
        torch._fused_adamw_([q], [grad], [n], [w], [], [counts[1]], **options, amsgrad=False, maximize=False)
    return all(map(torch.equal, ours, theirs))
