"""Models for tests of `amp.inspect`."""

from __future__ import annotations

import torch
import training
from torch import nn

from amp_patch import amp
from amp_patch.diagnose.inspect import inspect


class RMSNorm(nn.Module):
    """A hand-written RMS norm: in FP16 the square of a number above 255 is infinite."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 2.0**-30) * self.weight


class NormedNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.norm = RMSNorm(4)
        self.block = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        self.head = nn.Linear(4, 2, bias=False)

    def forward(self, x):
        return self.head(self.block(self.norm(self.first(x))))


def identity(model, **factors):
    """Set weights so that each layer returns its input times its factor."""
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_(torch.eye(*module.weight.shape) * factors.get(name.replace(".", "_"), 1.0))
    return model


class Deep(nn.Module):
    """A layer, a block of three layers, and a layer. Numbers that overflow inside the block are small after it."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.block = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
        self.head = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.head(self.block(self.first(x)))


def look_deep(level, device, factors, weight=1.0, value=1.0, model=None, **options):
    model = identity(Deep() if model is None else model, **factors).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    options = {"loss_scale": 1.0, "verbosity": 0, **options}
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, **options)
    with inspect(model, optimizer) as seen:
        for value_now in (0.0, value):
            loss = model(torch.full((1, 4), value_now, device=device)).float().sum() * weight * value_now
            training.backward(loss, optimizer)
            finite = all(bool(p.grad.isfinite().all()) for p in amp.master_params(optimizer))
            optimizer.step()
    amp.restore()
    return seen, finite


# direction -> the factors of the layers, the weight of the loss, what flowed in and out of where it overflows.
PLANTED = {
    "forward": ({"block_0": 2.0**12, "block_1": 2.0**12, "block_2": 2.0**-24}, 1.0, "block.1", (0.0, 2.0**12)),
    "backward": ({"block_0": 2.0**-12, "block_1": 2.0**6, "block_2": 2.0**6}, 2.0**8, "block.1", (2.0**14,) * 2),
}
