"""PyTorch Geometric's introduction: a GCN whose forward takes the whole `Data`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv


class GCN(torch.nn.Module):
    def __init__(self, features, classes):
        super().__init__()
        self.conv1 = GCNConv(features, 16)
        self.conv2 = GCNConv(16, classes)

    def forward(self, data):
        x, edge_index = data.x, data.edge_index
        x = F.dropout(F.relu(self.conv1(x, edge_index)), training=self.training)
        return F.log_softmax(self.conv2(x, edge_index), dim=1)


torch.manual_seed(0)
data = Data(x=torch.randn(200, 32), edge_index=torch.randint(0, 200, (2, 800)), y=torch.randint(0, 4, (200,)))
model = GCN(32, 4)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
model.train()
for _ in range(20):
    optimizer.zero_grad()
    loss = F.nll_loss(model(data)[:100], data.y[:100])
    loss.backward()
    optimizer.step()
