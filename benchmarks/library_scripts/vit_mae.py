"""vit-pytorch: a masked autoencoder around a ViT, whose loss its forward gives."""

from __future__ import annotations

import torch
from vit_pytorch import MAE, ViT

torch.manual_seed(0)
vit = ViT(image_size=32, patch_size=8, num_classes=10, dim=64, depth=2, heads=4, mlp_dim=128)
mae = MAE(encoder=vit, masking_ratio=0.75, decoder_dim=32, decoder_depth=1)
optimizer = torch.optim.Adam(mae.parameters(), lr=1e-3)
for _ in range(20):
    loss = mae(torch.randn(8, 3, 32, 32))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
