"""Kinds of script that torch.autocast runs and levels have failed on, through `compare` without an edit."""

from __future__ import annotations

import pytest
from scripts import start_script

from amp_patch.lab.recording.run import Run, loads

pytestmark = pytest.mark.slow

LEVELS = ["O0", "O1", "O2", "O4", "O5"]
HEAD = """
import math
import torch
from torch import einsum, nn
from torch.nn import functional as F
from torch.nn.functional import linear, softmax

torch.manual_seed(0)
"""
TAIL = """
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for step in range(4):
    optimizer.zero_grad()
    loss = loss_of(net)
    loss.backward()
    optimizer.step()
"""
KINDS = {
    "imported names": """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Parameter(torch.randn(3, 16, 16) / 4), nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x):
        q, k, v = (linear(x, w) for w in self.qkv)
        mixed = softmax(einsum("bid,bjd->bij", q, k) / 4, dim=-1)
        return linear(einsum("bij,bjd->bid", mixed, v), self.out)

net = Attention()
loss_of = lambda net: F.mse_loss(net(torch.randn(4, 8, 16)), torch.ones(4, 8, 16))
""",
    "sparse": """
class GraphConvolution(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs) / 4), nn.Parameter(torch.zeros(outputs))

    def forward(self, x, adjacency):
        return torch.spmm(adjacency, torch.mm(x, self.weight)) + self.bias

class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = GraphConvolution(16, 8), GraphConvolution(8, 3)

    def forward(self, x, adjacency):
        return F.log_softmax(self.second(F.dropout(F.relu(self.first(x, adjacency)), 0.5), adjacency), dim=1)

edges = (torch.rand(32, 32) < 0.1).float() + torch.eye(32)
features, classes, adjacency = torch.rand(32, 16), torch.randint(3, (32,)), (edges / edges.sum(1)[:, None]).to_sparse()
net = GCN()
loss_of = lambda net: F.nll_loss(net(features, adjacency), classes)
""",
    "vae": """
class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.mu, self.logvar, self.dec = (nn.Linear(*s) for s in ((32, 16), (16, 4), (16, 4), (4, 32)))

    def encode(self, x):
        h = F.relu(self.enc(x))
        return self.mu(h), self.logvar(h)

    def decode(self, z):
        return torch.sigmoid(self.dec(z))

    def forward(self, x):
        mu, logvar = self.encode(x)
        return self.decode(mu + torch.randn_like(mu) * (logvar / 2).exp()), mu, logvar

net = VAE()

def loss_of(net):
    x = torch.rand(16, 32)
    out, mu, logvar = net(x)
    with torch.no_grad():
        net.decode(torch.randn(8, 4)).mean().item()
    return F.binary_cross_entropy(out, x) - 0.01 * (1 + logvar - mu.pow(2) - logvar.exp()).mean()
""",
    "objects": """
class Batch:
    def __init__(self, x, edge_index, y):
        self.x, self.edge_index, self.y = x, edge_index, y

    def to(self, device):
        return Batch(self.x.to(device=device), self.edge_index.to(device=device), self.y.to(device=device))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, data):
        source, target = data.edge_index
        h = self.first(data.x).relu()
        return self.second(torch.zeros_like(h).index_add(0, target, h[source]))

net = Net()
batch = Batch(torch.rand(20, 8), torch.randint(20, (2, 60)), torch.randint(3, (20,)))
loss_of = lambda net: F.cross_entropy(net(batch), batch.y)
""",
    "diffusion": """
class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16))
        self.into, self.out = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, x, t):
        angles = t[:, None] * torch.exp(torch.arange(8) * -(math.log(10000) / 7))
        return self.out(F.silu(self.into(x) + self.time(torch.cat([angles.sin(), angles.cos()], -1))[:, :, None, None]))

net = Denoiser()

def loss_of(net):
    noise = torch.randn(4, 1, 8, 8)
    return F.mse_loss(net(torch.rand(4, 1, 8, 8) + noise, torch.randint(100, (4,))), noise)
""",
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_unedited_kind_of_script_trains_at_every_level(kind, tmp_path):
    script = HEAD + KINDS[kind] + TAIL
    levels = ["--levels", ",".join(LEVELS), "--seeds", "1"]
    done = start_script(tmp_path, script, "-m", "amp_patch", "compare", *levels)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = [Run.from_dict(run) for run in loads((tmp_path / "amp_compare/report.json").read_text())["runs"]]
    assert [(run.level, run.error, run.steps) for run in runs] == [(level, None, 4) for level in LEVELS]
    o0, *others = runs
    for run in others:
        assert run.loss != o0.loss == pytest.approx(run.loss, rel=0.1)
    noted = [run.level for run in runs if any("binary_cross_entropy runs in FP32" in note for note in run.notes)]
    assert noted == (["O1", "O4"] if kind == "vae" else [])
    assert ("binary_cross_entropy runs in FP32" in " ".join(done.stdout.split())) is (kind == "vae")
    mixed = [run.level for run in runs if any("mixes FP32 with" in note for note in run.notes)]
    assert mixed == (["O2", "O5"] if kind == "diffusion" else [])
