"""Self-supervised digits in the manner of SwAV: the cluster of one view of an image is predicted from the other.

Shows: LARC around SGD, batch norms synchronized in groups of processes, apex.parallel's DistributedDataParallel,
parameters whose gradients are dropped before the step, Amp's module handed around as something with a state.
Runs as one process, or under torchrun; the ranks share out the batch, so that both give the same curve.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

import apex
import torch
import torch.distributed as dist
import torch.nn as nn
from apex.parallel import DistributedDataParallel
from apex.parallel.LARC import LARC
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description="SwAV on digits")
parser.add_argument("--temperature", default=0.1, type=float)
parser.add_argument("--epsilon", default=0.05, type=float, help="of the assignments")
parser.add_argument("--sinkhorn_iterations", default=3, type=int)
parser.add_argument("--feat_dim", default=32, type=int)
parser.add_argument("--nmb_prototypes", default=30, type=int)
parser.add_argument("--freeze_prototypes_niters", default=5, type=int, help="no gradient for the prototypes before")
parser.add_argument("--batch_size", default=64, type=int, help="of all processes together")
parser.add_argument("--base_lr", default=3.0, type=float)
parser.add_argument("--wd", default=1e-6, type=float)
parser.add_argument("--steps", default=60, type=int)
parser.add_argument("--syncbn_process_group_size", default=0, type=int, help="0: all processes")
parser.add_argument("--opt-level", default="O1", type=str)
parser.add_argument("--seed", default=0, type=int)
parser.add_argument("--dump_checkpoint", default="", type=str, help="read where it exists, written in the end")
parser.add_argument("--curve", default="", type=str, help="where the losses go, one line of JSON")


class Net(nn.Module):
    """A small convnet with a projection head, and the prototypes of the clusters."""

    def __init__(self, feat_dim, nmb_prototypes):
        super(Net, self).__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(inplace=True),
            nn.Flatten(),
        )
        self.projection_head = nn.Sequential(
            nn.Linear(32 * 4 * 4, 64), nn.BatchNorm1d(64), nn.ReLU(inplace=True), nn.Linear(64, feat_dim)
        )
        self.prototypes = nn.Linear(feat_dim, nmb_prototypes, bias=False)

    def forward(self, x):
        x = self.projection_head(self.backbone(x))
        x = nn.functional.normalize(x, dim=1, p=2)
        return x, self.prototypes(x)


def main():
    global args
    args = parser.parse_args()
    args.rank = int(os.environ.get("RANK", 0))
    args.world_size = int(os.environ.get("WORLD_SIZE", 1))
    use_cuda = torch.cuda.is_available()
    args.device = "cuda:{}".format(os.environ.get("LOCAL_RANK", 0)) if use_cuda else "cpu"
    if args.world_size > 1:
        dist.init_process_group(backend="nccl" if use_cuda else "gloo", init_method="env://")
    torch.manual_seed(args.seed)

    images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 16

    model = Net(args.feat_dim, args.nmb_prototypes)
    if args.world_size > 1:
        process_group = apex.parallel.create_syncbn_process_group(args.syncbn_process_group_size)
        model = apex.parallel.convert_syncbn_model(model, process_group=process_group)
    model = model.to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.base_lr, momentum=0.9, weight_decay=args.wd)
    optimizer = LARC(optimizer=optimizer, trust_coefficient=0.001, clip=False)

    model, optimizer = apex.amp.initialize(model, optimizer, opt_level=args.opt_level)
    if args.world_size > 1:
        model = DistributedDataParallel(model, delay_allreduce=True)

    to_restore = {"iteration": 0, "losses": []}
    restart_from_checkpoint(
        args.dump_checkpoint,
        run_variables=to_restore,
        state_dict=model,
        optimizer=optimizer,
        amp=apex.amp,
    )
    losses = to_restore["losses"]
    for iteration in range(to_restore["iteration"], args.steps):
        losses.append(train(images, model, optimizer, iteration))
        if args.rank == 0 and (iteration + 1) % 20 == 0:
            print("Iter: [{}]\tLoss {:.4f}".format(iteration + 1, losses[-1]))

    if args.rank == 0:
        if args.dump_checkpoint:
            save_dict = {
                "iteration": args.steps,
                "losses": losses,
                "state_dict": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "amp": apex.amp.state_dict(),
            }
            torch.save(save_dict, args.dump_checkpoint)
        print(json.dumps({"opt_level": args.opt_level, "loss": losses[-1]}))
        if args.curve:
            with open(args.curve, "w") as f:
                f.write(json.dumps({"opt_level": args.opt_level, "losses": losses}) + "\n")
    if args.world_size > 1:
        dist.destroy_process_group()
        sys.stdout.flush()
        os._exit(0)  # Gloo's threads sometimes abort a process that has done all its work


def augment(batch, generator):
    """A view: shifted by up to a pixel, brighter or darker, with noise."""
    dx, dy = torch.randint(-1, 2, (2,), generator=generator).tolist()
    brightness = 0.8 + 0.4 * torch.rand(len(batch), 1, 1, 1, generator=generator)
    noise = 0.1 * torch.randn(batch.shape, generator=generator)
    return torch.roll(batch, (dy, dx), (2, 3)) * brightness + noise


def train(images, model, optimizer, iteration):
    # The views of the whole batch are drawn on every rank alike; each takes its share of them.
    generator = torch.Generator().manual_seed(args.seed * 1000003 + iteration)
    batch = images[torch.randperm(len(images), generator=generator)[: args.batch_size]]
    views = [augment(batch, generator)[args.rank :: args.world_size] for _ in range(2)]
    inputs = torch.cat(views).to(args.device)
    bs = len(views[0])
    for param_group in optimizer.param_groups:
        param_group["lr"] = args.base_lr * min(1.0, (iteration + 1) / 10)

    # normalize the prototypes
    module = model.module if hasattr(model, "module") else model
    with torch.no_grad():
        w = module.prototypes.weight.data.clone()
        w = nn.functional.normalize(w, dim=1, p=2)
        module.prototypes.weight.copy_(w)

    embedding, output = model(inputs)
    loss = 0
    for view in range(2):
        with torch.no_grad():
            q = distributed_sinkhorn(output[bs * view : bs * (view + 1)].detach())
        other = output[bs * (1 - view) : bs * (2 - view)] / args.temperature
        loss -= 0.5 * torch.mean(torch.sum(q * nn.functional.log_softmax(other, dim=1), dim=1))

    optimizer.zero_grad()
    with apex.amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    # cancel gradients for the prototypes
    if iteration < args.freeze_prototypes_niters:
        for name, p in model.named_parameters():
            if "prototypes" in name:
                p.grad = None
    optimizer.step()

    reduced = loss.detach().clone()
    if args.world_size > 1:
        dist.all_reduce(reduced)
    return reduced.item() / args.world_size


@torch.no_grad()
def distributed_sinkhorn(out):
    Q = torch.exp(out.float() / args.epsilon).t()  # prototypes x samples
    B = Q.shape[1] * args.world_size
    K = Q.shape[0]
    Q /= all_sum(torch.sum(Q))
    for _ in range(args.sinkhorn_iterations):
        # each row: weight 1 / K a prototype; each column: weight 1 / B a sample
        Q /= all_sum(torch.sum(Q, dim=1, keepdim=True))
        Q /= K
        Q /= torch.sum(Q, dim=0, keepdim=True)
        Q /= B
    Q *= B
    return Q.t()


def all_sum(tensor):
    if args.world_size > 1:
        dist.all_reduce(tensor)
    return tensor


def restart_from_checkpoint(path, run_variables, **kwargs):
    """Restore each of kwargs, whatever has load_state_dict, from the entry of its name."""
    if not path or not os.path.isfile(path):
        return
    print("Found checkpoint at {}".format(path))
    checkpoint = torch.load(path, map_location=args.device)
    for key, value in kwargs.items():
        if key in checkpoint and value is not None:
            try:
                msg = value.load_state_dict(checkpoint[key], strict=False)
                print(msg)
            except TypeError:
                msg = value.load_state_dict(checkpoint[key])
            print("=> loaded {} from checkpoint '{}'".format(key, path))
    for var_name in run_variables:
        if var_name in checkpoint:
            run_variables[var_name] = checkpoint[var_name]


if __name__ == "__main__":
    main()
