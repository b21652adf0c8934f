"""PyTorch Geometric: graphs in batches, GATConv and GraphConv, a pool."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GATConv, GraphConv, global_mean_pool


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = GATConv(8, 8, heads=2)
        self.conv2 = GraphConv(16, 16)
        self.lin = torch.nn.Linear(16, 2)

    def forward(self, batch):
        x = self.conv1(batch.x, batch.edge_index).relu()
        x = self.conv2(x, batch.edge_index, batch.edge_attr).relu()
        return self.lin(global_mean_pool(x, batch.batch))


torch.manual_seed(0)
graphs = [
    Data(
        x=torch.randn(10, 8),
        edge_index=torch.randint(0, 10, (2, 30)),
        edge_attr=torch.rand(30),
        y=torch.tensor([n % 2]),
    )
    for n in range(64)
]
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(5):
    for batch in DataLoader(graphs, batch_size=16, shuffle=True):
        loss = F.cross_entropy(model(batch), batch.y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
