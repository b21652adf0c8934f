"""Checkpoints: train, save, start anew from the file, and end with the very bits of the run that never stopped.

At O2 the model's state_dict holds the FP32 masters' values, so the file loads at any other level too, and without amp.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from data import digits
from torch import nn

from amp_patch import amp

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--opt-level", default="O2", help="O0 to O5")
parser.add_argument("--epochs", type=int, default=10, help="the run is saved and resumed half way")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
(images, labels), (test_images, test_labels) = digits(device)


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-4)
    return amp.initialize(model, optimizer, opt_level=args.opt_level)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, epochs: range) -> None:
    for epoch in epochs:
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch)).to(device)
        for batch in order.split(64):
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()


half = args.epochs // 2
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "checkpoint.pt")

    model, optimizer = build()
    train(model, optimizer, range(half))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}, path)

    model, optimizer = build()
    checkpoint = torch.load(path)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    amp.load_state_dict(checkpoint["amp"])
    train(model, optimizer, range(half, args.epochs))

uninterrupted, optimizer = build()
train(uninterrupted, optimizer, range(args.epochs))

pairs = list(zip(model.state_dict().values(), uninterrupted.state_dict().values(), strict=True))
same = all(torch.equal(resumed, straight) for resumed, straight in pairs)
with torch.no_grad():
    accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
print(f"{args.opt_level}: held-out accuracy {accuracy:.2%}")
verdict = "the same bits" if same else "NOT THE SAME BITS"
print(f"{args.opt_level}: {len(pairs)} tensors, {verdict} with and without the stop")
