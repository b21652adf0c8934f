"""Gradient accumulation: a batch that would not fit is taken in micro-batches, with one optimizer step for all.

`delay_unscale=True` leaves the gradients scaled for the next micro-batch to add to, and the last micro-batch unscales
the sum: one pass over the gradients a step. Without the flag every micro-batch unscales and adds, which is right too.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from data import digits
from torch import nn

from amp_patch import amp

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--opt-level", default="O2", help="O0 to O5")
parser.add_argument("--micro-batches", type=int, default=4)
parser.add_argument("--epochs", type=int, default=10)
args = parser.parse_args()

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
(images, labels), (test_images, test_labels) = digits(device)

model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)

for _ in range(args.epochs):
    for batch in torch.randperm(len(images), device=device).split(64):
        optimizer.zero_grad()
        micro_batches = batch.chunk(args.micro_batches)
        for i, micro in enumerate(micro_batches):
            # The mean over the batch is the sum of the micro-batches' shares of it.
            loss = F.cross_entropy(model(images[micro]), labels[micro]) * len(micro) / len(batch)
            last = i == len(micro_batches) - 1
            with amp.scale_loss(loss, optimizer, delay_unscale=not last) as scaled_loss:
                scaled_loss.backward()
        optimizer.step()

model.eval()
with torch.no_grad():
    outputs = model(test_images)
accuracy = (outputs.argmax(1) == test_labels).float().mean().item()
print(
    f"{args.opt_level}, {args.micro_batches} micro-batches a step: "
    f"held-out loss {F.cross_entropy(outputs, test_labels).item():.5f}, accuracy {accuracy:.2%}"
)
