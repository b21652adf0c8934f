"""Lightning Fabric at an opt level: initialize before setup, scale_loss around fabric.backward.

    python examples/integrations/fabric_loop.py --opt-level O2

Leave Fabric's `precision` alone: the opt level is the mixed precision.
"""

from __future__ import annotations

import argparse

import torch
from lightning.fabric import Fabric
from torch import nn

from amp_patch import amp


def train(opt_level: str, epochs: int = 2, **fabric_options: object) -> tuple[nn.Module, list[float]]:
    """Train on random data; the model and the loss of every batch."""
    fabric = Fabric(**fabric_options)
    fabric.launch()
    torch.manual_seed(0)
    inputs, targets = torch.randn(32, 8), torch.randint(3, (32,))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=8)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).to(fabric.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)

    plain, _ = amp.initialize(model, optimizer, opt_level=opt_level)
    model, optimizer = fabric.setup(plain, optimizer)
    loader = fabric.setup_dataloaders(loader)

    losses = []
    for _ in range(epochs):
        for batch, classes in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch), classes)
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                fabric.backward(scaled_loss)
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            losses.append(loss.item())
    return plain, losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--opt-level", default="O2")
    level = parser.parse_args().opt_level
    _, losses = train(level, epochs=10, accelerator="auto", devices=1)
    print(f"{level}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
