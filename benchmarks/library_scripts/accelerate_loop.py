"""accelerate: the loop of its first page."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
data = DataLoader(TensorDataset(torch.randn(320, 64), torch.randint(0, 10, (320,))), batch_size=16, shuffle=True)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
model.train()
for source, targets in data:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(source), targets)
    accelerator.backward(loss)
    optimizer.step()
