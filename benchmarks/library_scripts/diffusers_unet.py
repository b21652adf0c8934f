"""diffusers: the loop of its tutorial on training."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup

torch.manual_seed(0)
model = UNet2DModel(
    sample_size=16,
    layers_per_block=1,
    block_out_channels=(32, 32),
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
)
noise_scheduler = DDPMScheduler(num_train_timesteps=1000)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=20)
for _ in range(20):
    clean_images = torch.rand(4, 3, 16, 16) * 2 - 1
    noise = torch.randn(clean_images.shape)
    timesteps = torch.randint(0, 1000, (4,))
    noisy_images = noise_scheduler.add_noise(clean_images, noise, timesteps)
    noise_pred = model(noisy_images, timesteps, return_dict=False)[0]
    loss = F.mse_loss(noise_pred, noise)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
