"""denoising-diffusion-pytorch: its diffusion over sequences."""

from __future__ import annotations

import torch
from denoising_diffusion_pytorch import GaussianDiffusion1D, Unet1D

torch.manual_seed(0)
model = Unet1D(dim=16, dim_mults=(1, 2), channels=8)
diffusion = GaussianDiffusion1D(model, seq_length=32, timesteps=100, objective="pred_v")
optimizer = torch.optim.Adam(diffusion.parameters(), lr=8e-5)
for _ in range(20):
    loss = diffusion(torch.rand(4, 8, 32))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
