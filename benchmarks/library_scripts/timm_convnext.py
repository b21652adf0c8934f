"""timm: a ConvNeXt with stochastic depth, mixup and an average of the weights."""

from __future__ import annotations

import timm
import torch
from timm.data.mixup import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.utils import ModelEmaV2

torch.manual_seed(0)
model = timm.create_model("convnext_atto", num_classes=10, drop_path_rate=0.1)
average = ModelEmaV2(model, decay=0.9)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
mixup, criterion = Mixup(mixup_alpha=0.8, num_classes=10), SoftTargetCrossEntropy()
for _ in range(20):
    images, labels = mixup(torch.randn(4, 3, 64, 64), torch.randint(0, 10, (4,)))
    loss = criterion(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    average.update(model)
