"""Gradient clipping: an LSTM reads each digit row by row, and its gradients are held to a norm of `--max-norm`.

After `scale_loss` the gradients are unscaled, so clipping is what it is in FP32. `amp.master_params(optimizer)` are the
tensors that the optimizer steps: the FP32 masters at O2, the model's own parameters elsewhere.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from data import digits
from torch import Tensor, nn

from amp_patch import amp

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--opt-level", default="O2", help="O0 to O5")
parser.add_argument("--max-norm", type=float, default=0.5)
parser.add_argument("--epochs", type=int, default=8)
args = parser.parse_args()


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 64, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        rows, _ = self.lstm(images.squeeze(1))
        return self.head(rows[:, -1])


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
(images, labels), (test_images, test_labels) = digits(device)

model = Reader().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)

largest, clipped, steps = 0.0, 0, 0
for _ in range(args.epochs):
    for batch in torch.randperm(len(images), device=device).split(64):
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.max_norm)
        optimizer.step()
        # An overflow makes the norm inf or NaN, and the step is skipped: there is nothing to clip then.
        if norm.isfinite():
            largest, clipped, steps = max(largest, norm.item()), clipped + int(norm > args.max_norm), steps + 1

model.eval()
with torch.no_grad():
    accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
print(f"{args.opt_level}: {clipped} of {steps} steps clipped to {args.max_norm:g}, largest norm {largest:.2f}")
print(f"{args.opt_level}: held-out accuracy {accuracy:.2%}")
