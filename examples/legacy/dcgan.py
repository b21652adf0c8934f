"""A small DCGAN on digits, in the manner of Apex's dcgan example: two models, two optimizers, three losses.

Shows: lists in, lists out; num_losses and loss_id; gradients that only the models' zero_grad clears.
"""

from __future__ import annotations

import argparse
import json
import random

import torch
import torch.nn as nn
import torch.optim as optim
from sklearn.datasets import load_digits

try:
    from apex import amp
except ImportError:
    raise ImportError("Please install apex from https://www.github.com/nvidia/apex to run this example.")

parser = argparse.ArgumentParser()
parser.add_argument("--batchSize", type=int, default=32, help="input batch size")
parser.add_argument("--nz", type=int, default=16, help="size of the latent z vector")
parser.add_argument("--ngf", type=int, default=16)
parser.add_argument("--ndf", type=int, default=16)
parser.add_argument("--steps", type=int, default=60, help="number of iterations")
parser.add_argument("--lr", type=float, default=0.001, help="learning rate")
parser.add_argument("--beta1", type=float, default=0.5, help="beta1 for adam")
parser.add_argument("--seed", type=int, default=0, help="manual seed")
parser.add_argument("--opt-level", default="O1", help="amp opt_level, default='O1'")
parser.add_argument("--curve", default="", help="where the losses go, one line of JSON")
opt = parser.parse_args()
print(opt)

random.seed(opt.seed)
torch.manual_seed(opt.seed)
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")

images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 8 - 1
dataloader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(images), batch_size=opt.batchSize, shuffle=True, drop_last=True
)


def weights_init(m):
    classname = m.__class__.__name__
    if classname.find("Conv") != -1:
        m.weight.data.normal_(0.0, 0.02)
    elif classname.find("BatchNorm") != -1:
        m.weight.data.normal_(1.0, 0.02)
        m.bias.data.fill_(0)


class Generator(nn.Module):
    def __init__(self):
        super(Generator, self).__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(opt.nz, opt.ngf * 2, 4, 1, 0, bias=False),  # 4 x 4
            nn.BatchNorm2d(opt.ngf * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(opt.ngf * 2, opt.ngf, 4, 2, 1, bias=False),  # 8 x 8
            nn.BatchNorm2d(opt.ngf),
            nn.ReLU(True),
            nn.Conv2d(opt.ngf, 1, 3, 1, 1),
            nn.Tanh(),
        )

    def forward(self, input):
        return self.main(input)


class Discriminator(nn.Module):
    def __init__(self):
        super(Discriminator, self).__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, opt.ndf, 4, 2, 1, bias=False),  # 4 x 4
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(opt.ndf, opt.ndf * 2, 4, 2, 1, bias=False),  # 2 x 2
            nn.BatchNorm2d(opt.ndf * 2),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(opt.ndf * 2, 1, 2, 1, 0, bias=False),
        )

    def forward(self, input):
        return self.main(input).view(-1, 1).squeeze(1)


netG = Generator().to(device)
netG.apply(weights_init)
netD = Discriminator().to(device)
netD.apply(weights_init)

# With logits: a sigmoid and a BCELoss do not stand FP16, and Amp bans them.
criterion = nn.BCEWithLogitsLoss()
real_label = 1
fake_label = 0

# eps: Adam's own 1e-8 is zero in FP16, where O3 keeps its state.
optimizerD = optim.Adam(netD.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999), eps=1e-4)
optimizerG = optim.Adam(netG.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999), eps=1e-4)

[netD, netG], [optimizerD, optimizerG] = amp.initialize(
    [netD, netG], [optimizerD, optimizerG], opt_level=opt.opt_level, num_losses=3
)

losses, losses_G, iteration = [], [], 0
while iteration < opt.steps:
    for (data,) in dataloader:
        if iteration == opt.steps:
            break
        iteration += 1

        # (1) Update D network: maximize log(D(x)) + log(1 - D(G(z)))
        netD.zero_grad()
        real = data.to(device)
        batch_size = real.size(0)
        label = torch.full((batch_size,), real_label, dtype=torch.float32, device=device)
        output = netD(real)
        errD_real = criterion(output, label)
        with amp.scale_loss(errD_real, optimizerD, loss_id=0) as errD_real_scaled:
            errD_real_scaled.backward()
        D_x = output.mean().item()

        noise = torch.randn(batch_size, opt.nz, 1, 1).to(device)
        fake = netG(noise)
        label.fill_(fake_label)
        output = netD(fake.detach())
        errD_fake = criterion(output, label)
        with amp.scale_loss(errD_fake, optimizerD, loss_id=1) as errD_fake_scaled:
            errD_fake_scaled.backward()
        errD = errD_real + errD_fake
        optimizerD.step()

        # (2) Update G network: maximize log(D(G(z)))
        netG.zero_grad()
        label.fill_(real_label)
        output = netD(fake)
        errG = criterion(output, label)
        with amp.scale_loss(errG, optimizerG, loss_id=2) as errG_scaled:
            errG_scaled.backward()
        optimizerG.step()

        losses.append(errD.item())
        losses_G.append(errG.item())
        if iteration % 20 == 0:
            print(
                "[%d/%d] Loss_D: %.4f Loss_G: %.4f D(x): %.4f" % (iteration, opt.steps, errD.item(), errG.item(), D_x)
            )

print(json.dumps({"opt_level": opt.opt_level, "loss": losses[-1], "loss_G": losses_G[-1]}))
if opt.curve:
    with open(opt.curve, "w") as f:
        f.write(json.dumps({"opt_level": opt.opt_level, "losses": losses, "losses_G": losses_G}) + "\n")
