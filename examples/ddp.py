"""DistributedDataParallel: the loop of minimal.py in one process per device, with a checkpoint to resume from.

    torchrun --nproc-per-node 2 examples/ddp.py --opt-level O2

runs on two GPUs (NCCL), or where there is none in two processes on the CPU (Gloo). The batch is divided among them, so
they train what one process trains. Lines marked "amp" are all that mixed precision adds.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from data import digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from amp_patch import amp

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--opt-level", default="O1", help="O0 to O5")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch", type=int, default=64, help="of all processes together")
parser.add_argument("--checkpoint", type=Path, help="written after each epoch; if it is there, the run goes on from it")
args = parser.parse_args()

torch.manual_seed(0)
if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()

(images, labels), (test_images, test_labels) = digits(device)
dataset = TensorDataset(images, labels)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, args.batch // world, sampler=sampler, drop_last=True)

model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)  # amp: before the model is wrapped
wrapped = DistributedDataParallel(model, device_ids=[torch.cuda.current_device()] if device == "cuda" else None)

first = 0
if args.checkpoint and args.checkpoint.exists():
    saved = torch.load(args.checkpoint, map_location=device)
    model.load_state_dict(saved["model"])  # at O2 the masters' values, FP32
    optimizer.load_state_dict(saved["optimizer"])
    amp.load_state_dict(saved["amp"])  # amp
    first = saved["epoch"]

for epoch in range(first, args.epochs):
    sampler.set_epoch(epoch)  # another order in each, the same on every rank
    for inputs, targets in loader:
        loss = F.cross_entropy(wrapped(inputs), targets)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:  # amp
            scaled_loss.backward()  # amp: was loss.backward()
        optimizer.step()
    dist.all_reduce(loss := loss.detach() / world)
    if rank == 0:
        print(f"epoch {epoch + 1:2}  loss {loss.item():.4f}", flush=True)
        if args.checkpoint:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}
            new = args.checkpoint.with_suffix(".new")
            torch.save({**state, "epoch": epoch + 1}, new)
            new.replace(args.checkpoint)  # a run that is killed meanwhile leaves the old one whole

if rank == 0:
    model.eval()
    with torch.no_grad():
        accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
    print(f"{args.opt_level}: {world} ranks, held-out accuracy {accuracy:.2%}", flush=True)
dist.destroy_process_group()
os._exit(0)  # Gloo's threads sometimes abort a process that has done all its work
