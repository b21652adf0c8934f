"""timm: a model by its name, an optimizer of timm's."""

from __future__ import annotations

import timm
import torch
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2

torch.manual_seed(0)
model = timm.create_model("vit_tiny_patch16_224", num_classes=10, img_size=64, depth=2)
optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
criterion = LabelSmoothingCrossEntropy(smoothing=0.1)
for _ in range(20):
    images, labels = torch.randn(8, 3, 64, 64), torch.randint(0, 10, (8,))
    loss = criterion(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
