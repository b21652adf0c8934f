"""The smallest loop: a perceptron tells ten patterns apart in noise. It needs torch alone.

The lines marked "amp" are all that mixed precision adds.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn

from amp_patch import amp

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--opt-level", default="O1", help="O0 to O5")
parser.add_argument("--epochs", type=int, default=10)
args = parser.parse_args()

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
patterns = torch.randn(10, 64).to(device)
labels, test_labels = torch.arange(1500, device=device) % 10, torch.arange(500, device=device) % 10
images, test_images = (patterns[y] + 1.5 * torch.randn(len(y), 64, device=device) for y in (labels, test_labels))

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)  # amp

for epoch in range(args.epochs):
    for batch in torch.randperm(len(images), device=device).split(64):
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:  # amp
            scaled_loss.backward()  # amp: was loss.backward()
        optimizer.step()
    print(f"epoch {epoch + 1:2}  loss {loss.item():.4f}")

model.eval()
with torch.no_grad():
    accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
print(f"{args.opt_level}: held-out accuracy {accuracy:.2%}")
