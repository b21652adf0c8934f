"""denoising-diffusion-pytorch: what its README begins with."""

from __future__ import annotations

import torch
from denoising_diffusion_pytorch import GaussianDiffusion, Unet

torch.manual_seed(0)
model = Unet(dim=16, dim_mults=(1, 2), flash_attn=False)
diffusion = GaussianDiffusion(model, image_size=16, timesteps=100)
optimizer = torch.optim.Adam(diffusion.parameters(), lr=8e-5)
for _ in range(20):
    loss = diffusion(torch.rand(4, 3, 16, 16))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
