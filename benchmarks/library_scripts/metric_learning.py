"""pytorch-metric-learning: a triplet loss with a miner, on embeddings of a torch model."""

from __future__ import annotations

import torch
from pytorch_metric_learning import losses, miners

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
loss_func, miner = losses.TripletMarginLoss(), miners.MultiSimilarityMiner()
for _ in range(20):
    data, labels = torch.randn(32, 32), torch.randint(0, 4, (32,))
    embeddings = model(data)
    loss = loss_func(embeddings, labels, miner(embeddings, labels))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
