"""Two models, two optimizers, three losses: a GAN draws digits, as in Apex's dcgan example.

Each loss has a `loss_id`, and with it a scale of its own: the three gradients differ in size. The generator's backward
also fills the discriminator's gradients; amp_patch keeps them out of the discriminator's next step.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from data import digits
from torch import Tensor, nn

from amp_patch import amp

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--opt-level", default="O1", help="O0 to O5")
parser.add_argument("--steps", type=int, default=1500)
args = parser.parse_args()

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
(images, _), (held_out, _) = digits(device)

generator = nn.Sequential(
    nn.Linear(16, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid(), nn.Unflatten(1, (1, 8, 8))
).to(device)
discriminator = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1)).to(device)
# eps=1e-4: the usual 1e-8 is 0 in FP16, where O3 keeps the optimizer's state.
optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99), eps=1e-4)
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.99), eps=1e-4)

(generator, discriminator), (optimizer_g, optimizer_d) = amp.initialize(
    [generator, discriminator], [optimizer_g, optimizer_d], opt_level=args.opt_level, num_losses=3
)


def bce(logits: Tensor, real: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, real))


for step in range(args.steps):
    real = images[torch.randint(len(images), (64,), device=device)]
    fake = generator(torch.randn(64, 16, device=device))

    optimizer_d.zero_grad()
    loss_real = bce(discriminator(real), 0.9)  # 0.9: one-sided label smoothing
    with amp.scale_loss(loss_real, optimizer_d, loss_id=0) as scaled_loss:
        scaled_loss.backward()
    loss_fake = bce(discriminator(fake.detach()), 0.0)
    with amp.scale_loss(loss_fake, optimizer_d, loss_id=1) as scaled_loss:
        scaled_loss.backward()
    optimizer_d.step()

    optimizer_g.zero_grad()
    loss_g = bce(discriminator(fake), 1.0)
    with amp.scale_loss(loss_g, optimizer_g, loss_id=2) as scaled_loss:
        scaled_loss.backward()
    optimizer_g.step()

    if (step + 1) % max(1, args.steps // 5) == 0:
        print(f"step {step + 1:4}  discriminator {(loss_real + loss_fake).item():.3f}  generator {loss_g.item():.3f}")

generator.eval()
with torch.no_grad():
    drawn = generator(torch.randn(450, 16, device=device))


def distance(samples: Tensor) -> float:
    """Mean distance of the samples to the training image nearest to each."""
    return torch.cdist(samples.flatten(1), images.flatten(1)).min(1).values.mean().item()


for row in range(8):
    lines = (image[0, row].tolist() for image in drawn[:4])
    print("   ".join("".join(" .:-=+*#%@"[round(9 * pixel)] * 2 for pixel in line) for line in lines))
scales = [entry["loss_scale"] for entry in amp.state_dict().values()]
print(f"{args.opt_level}: loss scales {scales}")
print(
    f"{args.opt_level}: distance to the nearest real digit: drawn {distance(drawn):.2f}, "
    f"held-out digits {distance(held_out):.2f}, noise {distance(torch.rand_like(drawn)):.2f}"
)
