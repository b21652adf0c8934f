"""What train.py trains: a convnet and a ViT that read digits, and two GPTs and an LSTM that write Python's manual.

None knows about mixed precision: this is the FP32 code that a user has before `amp.initialize`.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from data import digits, topics
from torch import Tensor, nn
from torch.optim import Optimizer


class Task(Protocol):
    name: str
    steps: int  # of a whole training

    def model(self) -> nn.Module: ...
    def optimizer(self, model: nn.Module) -> Optimizer: ...
    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]: ...
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor: ...
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """On the held-out data: "held_out_loss", the mean cross entropy in nats, and what people compare."""
        ...


class Digits:
    name = "digits"
    steps = 400

    def __init__(self, device: str):
        self.device = device
        (self.images, self.labels), self.held_out = digits(device)

    def model(self) -> nn.Module:
        def block(channels_in: int, channels_out: int) -> list[nn.Module]:
            return [nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.BatchNorm2d(channels_out), nn.ReLU()]

        return nn.Sequential(
            *block(1, 16),
            *block(16, 32),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        ).to(self.device)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        drawn = torch.randint(len(self.images), (64,), generator=generator).to(self.device)
        return self.images[drawn], self.labels[drawn]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """The second figure is the accuracy in percent."""
        images, labels = self.held_out
        outputs = model(images)
        accuracy = 100 * (outputs.argmax(1) == labels).float().mean().item()
        return {"held_out_loss": self.loss(outputs, labels).item(), "accuracy": accuracy}


class DigitsViT(Digits):
    name = "vit"
    steps = 300

    def model(self) -> nn.Module:
        return ViT(classes=10, width=64, heads=4, depth=2).to(self.device)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05, eps=Topics.eps)


class Topics:
    """Predict the next character of Python's manual."""

    context = 32
    windows = 8  # of a batch
    held_out_every = 1  # of the held-out windows, one in so many is evaluated
    # Adam's usual eps of 1e-8 is 0 in FP16, and O3 keeps its optimizer state in FP16: 0 / 0 in the first step.
    eps = 1e-4

    def __init__(self, device: str):
        self.device = device
        self.text, held_out, self.vocabulary = topics(device)
        windows = held_out[: (len(held_out) - 1) // self.context * self.context + 1]
        pairs = windows[:-1].view(-1, self.context), windows[1:].view(-1, self.context)
        self.held_out = pairs[0][:: self.held_out_every], pairs[1][:: self.held_out_every]

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(self.text) - self.context, (self.windows, 1), generator=generator).to(self.device)
        window = starts + torch.arange(self.context, device=self.device)
        return self.text[window], self.text[window + 1]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """The second figure is the same loss in bits per character."""
        total = 0.0
        for inputs, targets in zip(*(part.split(128) for part in self.held_out), strict=True):
            total += self.loss(model(inputs), targets).item() * targets.numel()
        loss = total / self.held_out[1].numel()
        return {"held_out_loss": loss, "bits": loss / math.log(2)}


class TopicsGPT(Topics):
    name = "gpt"
    steps = 800

    def model(self) -> nn.Module:
        return GPT(self.vocabulary, self.context, width=64, heads=4, depth=2).to(self.device)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.Adam(model.parameters(), lr=4e-3, betas=(0.9, 0.95), eps=self.eps)


class TopicsWideGPT(Topics):
    """Wide enough for BF16 products to pay on a CPU that has them."""

    name = "wide_gpt"
    steps = 300
    context = 64
    held_out_every = 3  # on a CPU all of them take as long as 25 steps

    def model(self) -> nn.Module:
        return GPT(self.vocabulary, self.context, width=256, heads=8, depth=2).to(self.device)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), eps=self.eps)


class TopicsLSTM(Topics):
    name = "lstm"
    steps = 1200

    def model(self) -> nn.Module:
        return LSTM(self.vocabulary, width=32, hidden=96).to(self.device)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.Adam(model.parameters(), lr=1e-2, eps=self.eps)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool = True):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        heads = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        q, k, v = (part.transpose(1, 2) for part in heads)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, context: int, width: int, heads: int, depth: int):
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, characters: Tensor) -> Tensor:
        x = self.token(characters) + self.position.weight[: characters.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class ViT(nn.Module):
    """Attention over the 16 patches of 2 x 2 pixels in images of 8 x 8."""

    def __init__(self, classes: int, width: int, heads: int, depth: int):
        super().__init__()
        self.patches, self.position = nn.Conv2d(1, width, 2, 2), nn.Parameter(torch.zeros(16, width))
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.blocks(x)).mean(1))


class LSTM(nn.Module):
    def __init__(self, vocabulary: int, width: int, hidden: int):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, hidden, batch_first=True)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, characters: Tensor) -> Tensor:
        outputs, _ = self.lstm(self.token(characters))
        return self.head(outputs)


TASKS = {task.name: task for task in (Digits, DigitsViT, TopicsGPT, TopicsWideGPT, TopicsLSTM)}
