"""Forwards of public programs that fail at a level unless their calls are cast, as small scripts."""

from __future__ import annotations

import pytest
import torch
from unedited import run_source

from amp_patch.lab.unedited.script import UneditedScript


def run(script: str, level: str) -> dict[str, object]:
    with UneditedScript(level):
        return run_source(script)


# Each has what one kind of public program does, in a forward or around it.
FRAME = """
import math
import torch
from torch import nn
from torch.nn import functional as F
from types import SimpleNamespace

torch.manual_seed(0)
losses = []

class Net(nn.Module):
{net}
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=51.2)
for step in range(3):
    {loss}
    optimizer.zero_grad()
    (loss / 1024).backward()  # else the first scale overflows
    optimizer.step()
    losses.append(loss.detach())
"""
FORWARDS = {
    # nanoGPT, makemore, minGPT: a mask of -inf, a head that is the embedding
    "masked attention, tied head": (
        """
    def __init__(self):
        super().__init__()
        self.table, self.qkv, self.head = nn.Embedding(16, 8), nn.Linear(8, 24), nn.Linear(8, 16, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("mask", torch.tril(torch.ones(5, 5)))

    def forward(self, tokens):
        q, k, v = self.qkv(self.table(tokens)).split(8, dim=2)
        scores = (q @ k.transpose(1, 2) / math.sqrt(8)).masked_fill(self.mask == 0, float("-inf"))
        return self.head(F.softmax(scores, dim=-1) @ v)
""",
        "t = torch.randint(16, (4, 6)); loss = F.cross_entropy(net(t[:, :-1]).reshape(-1, 16), t[:, 1:].reshape(-1))",
    ),
    # gat: a mask of -9e15, which FP16 cannot hold
    "a mask of a large number": (
        """
    def __init__(self):
        super().__init__()
        self.layer, self.score = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x, edges):
        h = self.layer(x)
        scores = F.leaky_relu(self.score(h) + self.score(h).T)
        return F.log_softmax(torch.where(edges > 0, scores, -9e15 * torch.ones_like(scores)).softmax(1) @ h, 1)
""",
        "loss = F.nll_loss(net(torch.randn(6, 4), torch.eye(6)), torch.arange(6))",
    ),
    # gcn, pygcn: a sparse FP32 matrix times what a layer has made
    "a sparse product": (
        """
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3) / 2)

    def forward(self, x, edges):
        return F.log_softmax(torch.spmm(edges, torch.mm(x, self.weight)), 1)
""",
        "loss = F.nll_loss(net(torch.randn(6, 4), torch.eye(6).to_sparse()), torch.arange(6) % 3)",
    ),
    # PyTorch Geometric: an object as the batch, messages that are added at indices
    "an object as the batch": (
        """
    def __init__(self):
        super().__init__()
        self.layer, self.out = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, data):
        h = self.layer(data.x)
        h = torch.zeros_like(h).index_add_(0, data.edges[1], h[data.edges[0]]).relu()
        h = h.new_zeros(2, 8).scatter_add_(0, data.batch[:, None].expand(-1, 8), h)
        return self.out(h)
""",
        "data = SimpleNamespace(x=torch.randn(6, 4), edges=torch.randint(6, (2, 9)), batch=torch.arange(6) % 2); "
        "loss = F.cross_entropy(net(data), torch.tensor([0, 2]))",
    ),
    # Pytorch-UNet, super_resolution, dcgan
    "images of several sizes": (
        """
    def __init__(self):
        super().__init__()
        self.down, self.norm = nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8)
        self.up, self.out = nn.ConvTranspose2d(8, 8, 2, 2), nn.Conv2d(11, 12, 3, padding=1)

    def forward(self, x):
        h = self.up(F.max_pool2d(F.leaky_relu(self.norm(self.down(x)), 0.2), 2))
        h = F.interpolate(F.pad(h, [0, 1, 0, 1]), size=x.shape[2:], mode="bilinear", align_corners=True)
        return F.pixel_shuffle(self.out(torch.cat([x, h], 1)), 2)
""",
        "net = net.to(memory_format=torch.channels_last); x = torch.randn(2, 3, 8, 8); "
        "loss = F.mse_loss(net(x), F.interpolate(x, scale_factor=2))",
    ),
    # TCN
    "weight norm": (
        """
    def __init__(self):
        super().__init__()
        self.first = torch.nn.utils.parametrizations.weight_norm(nn.Conv1d(2, 8, 2, padding=2, dilation=2))
        self.out = nn.Linear(8, 1)

    def forward(self, x):
        return self.out(self.first(x)[:, :, :-2].contiguous().relu()[:, :, -1])
""",
        "x = torch.rand(4, 2, 9); loss = F.mse_loss(net(x), x[:, :1, -1])",
    ),
    # deepvit: attention that is mixed between heads
    "einsum of a parameter": (
        """
    def __init__(self):
        super().__init__()
        self.qkv, self.mix, self.norm = nn.Linear(8, 24), nn.Parameter(torch.randn(2, 2)), nn.LayerNorm(2)

    def forward(self, x):
        q, k, v = (t.reshape(2, 5, 2, 4).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        scores = torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1)
        scores = self.norm(torch.einsum("bhij,hg->bgij", scores, self.mix).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return torch.einsum("bhij,bhjd->bhid", scores, v).transpose(1, 2).reshape(2, 5, 8)
""",
        "loss = F.mse_loss(net(torch.randn(2, 5, 8)), torch.zeros(2, 5, 8))",
    ),
    # denoising-diffusion-pytorch: a schedule in buffers, and a model that returns its loss
    "a model that returns its loss": (
        """
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 4)
        kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 50, dtype=torch.float64), 0)
        self.register_buffer("kept", kept.float())

    def forward(self, x):
        t, noise = torch.randint(50, (len(x),)), torch.randn(x.shape).to(x)  # randn_like draws others for each type
        kept = self.kept.gather(0, t)[:, None]
        noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise
        return F.mse_loss(self.body(torch.cat([noisy, t[:, None] / 50], 1)), noise)
""",
        "loss = net(torch.randn(8, 4))",
    ),
    # torchdiffeq: a solver that calls the model at FP32 times
    "a solver around the model": (
        """
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, t, y):
        return self.body(torch.cat([y**3, t.expand(len(y), 1)], 1))

def solve(y, times):
    path = [y]
    for before, after in zip(times[:-1], times[1:]):
        half = path[-1] + (after - before) / 2 * net(before, path[-1])
        path.append(path[-1] + (after - before) * net((before + after) / 2, half))
    return torch.stack(path)
""",
        "y = torch.rand(4, 2); loss = (solve(y, torch.linspace(0, 1, 4)) - y).abs().mean()",
    ),
    # GPyTorch: linear algebra outside of the forward
    "a Gaussian process": (
        """
    def __init__(self):
        super().__init__()
        self.scale, self.noise, self.mean = (nn.Parameter(torch.full((1,), v)) for v in (0.3, 0.5, 0.0))

    def forward(self, x):
        return self.mean.expand(len(x)), x / F.softplus(self.scale), F.softplus(self.noise)
""",
        "x = torch.rand(8, 1); mean, z, noise = net(x); kernel = torch.exp(-(z - z.T).square()); loss = -torch."
        "distributions.MultivariateNormal(mean, kernel + noise * torch.eye(8)).log_prob(x[:, 0].sin()) / 8",
    ),
    # pytorch-metric-learning
    "triplets": (
        """
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 8)

    def forward(self, x):
        return F.normalize(self.layer(x))
""",
        "a, b, c = net(torch.randn(18, 4)).split(6); loss = F.triplet_margin_loss(a, b, c) + torch.cdist(a, b).mean()",
    ),
    # siamese_network: one branch, twice, by a method
    "two branches": (
        """
    def __init__(self):
        super().__init__()
        self.branch, self.head = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2)), nn.Linear(72, 1)

    def once(self, x):
        return self.branch(x).flatten(1)

    def forward(self, a, b):
        return torch.sigmoid(self.head(torch.cat((self.once(a), self.once(b)), 1)))
""",
        "loss = nn.BCELoss()(net(*torch.randn(2, 4, 1, 8, 8)).squeeze(), torch.tensor([0.0, 1.0, 1.0, 0.0]))",
    ),
}


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("kind", FORWARDS)
def test_what_a_public_programs_forward_does_trains_at_each_level(kind: str, level: str) -> None:
    net, loss = FORWARDS[kind]
    script = FRAME.format(net=net, loss=loss)
    plain, found = run_source(script)["losses"], run(script, level)["losses"]
    torch.testing.assert_close(found, plain, rtol=0.05, atol=0.02, check_dtype=False)
    assert (found == plain) is (kind == "a Gaussian process" and level == "O1")  # which has no product to cast
