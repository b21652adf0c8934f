"""Small trainings that break at no level: (model, loss_fn, inputs), as `amp.survey` takes them."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.drop = heads, nn.Dropout(0.1)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.first(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(w // self.heads)
        hidden = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        weights = self.drop(scores.masked_fill(hidden, float("-inf")).softmax(-1))
        x = x + self.out((weights @ v).transpose(1, 2).reshape(b, t, w))
        return x + self.mlp(self.second(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(64, 32), nn.Embedding(32, 32)
        self.blocks, self.norm = nn.Sequential(Block(32, 4), Block(32, 4)), nn.LayerNorm(32)
        self.head = nn.Linear(32, 64, bias=False)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(places))))


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.lstm, self.head = (
            nn.Embedding(64, 16),
            nn.LSTM(16, 32, 2, batch_first=True),
            nn.Linear(32, 64),
        )

    def forward(self, tokens):
        return self.head(self.lstm(self.tokens(tokens))[0])


def next_token(logits, tokens):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def mlp():
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10))
    return model, F.cross_entropy, (torch.randn(64, 20), torch.randint(0, 10, (64,)))


def cnn():
    first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
    second = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    model = nn.Sequential(first, second, nn.Flatten(), nn.Linear(32, 10))
    return model, F.cross_entropy, (torch.randn(8, 3, 16, 16), torch.randint(0, 10, (8,)))


def transformer():
    tokens = torch.randint(0, 64, (4, 32))
    return Transformer(), next_token, (tokens, tokens)


def lstm():
    tokens = torch.randint(0, 64, (4, 32))
    return Lstm(), next_token, (tokens, tokens)


def digits():
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    default = torch.get_default_device()
    return model, F.cross_entropy, (torch.tensor(images[:256]).float().to(default), torch.tensor(labels[:256]))


def layer_scale():
    """As ConvNeXt begins: the branch is 0 in FP16, and less than a step of FP16 in its sum."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.scale = nn.Linear(4, 4, bias=False), nn.Parameter(torch.full((4,), 1e-6))
            self.layer.weight.data.mul_(0.01)

        def forward(self, x):
            return x + F.dropout(self.scale * self.layer(x), 0.1, self.training)

    return Net(), F.mse_loss, (torch.randn(8, 4), torch.randn(8, 4))


def small_branch():
    """A branch whose gradients are 0 in FP16, and which hardly learns in FP32 either, as attention at its beginning."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.branch = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x) + 2.0**-20 * self.branch(x)

    return Net(), F.mse_loss, (torch.randn(64, 4), torch.randn(64, 4))


def dropped_paths():
    """As timm's DropPath: memory that holds what freed tensors have left in it, until random numbers are written."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.left = nn.Linear(64, 64), [torch.full((512, 64), -1e30) for _ in range(8)]

        def forward(self, x):
            y = self.layer(x)
            self.left.clear()
            masks = [y.new_empty(512, 64) for _ in range(8)]
            return x + y * sum(mask.bernoulli_(0.9) for mask in masks) / 8

    return Net(), F.mse_loss, (torch.randn(512, 64), torch.randn(512, 64))


def mask_of_ones():
    """As graph attention: scores without an edge are a number far below FP16's, and no row is without an edge."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x, edges):
            scores = self.q(x) @ self.k(x).T
            far = -9e15 * torch.ones_like(scores)
            return torch.where(edges > 0, scores, far).softmax(-1) @ x

    edges = torch.eye(6) + torch.randint(0, 2, (6, 6))
    return Net(), F.mse_loss, (torch.randn(6, 8), edges, torch.randn(6, 8))


def batch_object():
    """As a graph net of PyTorch Geometric: forward takes an object, whose tensors a cast model receives in its type."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, batch):
            return self.layer(batch.x)

    return Net(), F.mse_loss, (SimpleNamespace(x=torch.randn(6, 8)), torch.randn(6, 4))


def ratio_of_probabilities():
    """As PPO: the old probabilities differ little from each other, and not at all from the first new ones."""
    policy, x = nn.Linear(8, 2), torch.randn(64, 8)
    policy.weight.data.mul_(0.01)

    def loss(logits, before):
        return (logits.log_softmax(-1)[:, 0] - before).exp().mean()

    return policy, loss, (x, policy(x).log_softmax(-1)[:, 0].detach())


def sorted_distances():
    """As a miner of pytorch-metric-learning: what is not to be found gets the largest number of the tensor's type."""

    def loss(points, labels):
        distances = (points @ points.T).flatten(1)
        most = torch.finfo(distances.dtype).max
        distances[labels[:, None] != labels] = most
        nearest = distances.fill_diagonal_(most).sort(-1).values[:, 0]
        return (nearest - 1).square().mean()

    return nn.Linear(8, 4), loss, (torch.randn(12, 8), torch.arange(12) % 3)


def solver():
    """As an ODE solver: a function of autograd's and an assignment write into memory that holds what was there before.

    Numbers that neither has written are far beyond FP16 and BF16, and are never read.
    """

    class Write(torch.autograd.Function):
        @staticmethod
        def forward(ctx, memory, value):
            memory.data[0] = value
            return memory

        @staticmethod
        def backward(ctx, grad):
            return grad, grad[0]

    def without_numbers(*shape):
        memory = torch.empty(*shape)
        memory.untyped_storage().copy_(torch.full(shape, 1e38).untyped_storage())
        return memory

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            slopes = Write.apply(without_numbers(2, 6, 8).to(x.dtype), self.layer(x))
            states = without_numbers(2, 6, 8).to(x.dtype)
            states[0] = x + 16 * slopes[0]
            return states[0]

    return Net(), F.mse_loss, (torch.randn(6, 8), torch.randn(6, 8))


def one_action():
    """As the actor of SAC in one environment: a model whose output, no loss, has one element."""
    return nn.Linear(3, 1), F.mse_loss, (torch.randn(1, 3), torch.randn(1, 1))


CLEAN = (
    *(mlp, cnn, transformer, lstm, digits, layer_scale, small_branch),
    *(dropped_paths, mask_of_ones, batch_object, ratio_of_probabilities, sorted_distances, solver, one_action),
)
