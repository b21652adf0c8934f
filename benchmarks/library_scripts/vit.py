"""vit-pytorch: its README's ViT."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from vit_pytorch import ViT

torch.manual_seed(0)
model = ViT(image_size=32, patch_size=8, num_classes=10, dim=64, depth=2, heads=4, mlp_dim=128, dropout=0.1)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in range(20):
    loss = F.cross_entropy(model(torch.randn(8, 3, 32, 32)), torch.randint(0, 10, (8,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
