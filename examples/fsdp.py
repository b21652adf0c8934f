"""FSDP2: a small GPT whose weights, gradients and optimizer state are divided among the processes, with checkpoints.

    torchrun --nproc-per-node 2 examples/fsdp.py --opt-level O2

runs on two GPUs (NCCL), or where there is none in two processes on the CPU (Gloo). At O2 the shards stay FP32, and are
the masters. A checkpoint may be resumed by another number of processes. Lines marked
"amp" are all that mixed precision adds.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tasks import TopicsGPT
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from amp_patch import amp

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--opt-level", default="O2", help="O0, O1, O2, O4 or O5")
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--checkpoints", type=Path, help="folder, written to every 50 steps; resumes from what is there")
args = parser.parse_args()

torch.manual_seed(0)
if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()

task = TopicsGPT(device)
model = task.model()
policy = amp.fsdp_policy(args.opt_level)  # amp
for block in model.blocks:
    fully_shard(block, mp_policy=policy)  # amp: the policy
fully_shard(model, mp_policy=policy)  # amp: the policy
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)  # amp: after the model is sharded


def state() -> dict[str, object]:
    """What a checkpoint holds: each process writes and reads its shards."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer, "amp": amp.state_dict()}


# A checkpoint's .metadata is written last: one without it was not finished.
saved = [int(path.parent.name) for path in args.checkpoints.glob("*/.metadata")] if args.checkpoints else []
first = max(saved, default=0)
if first:
    loaded = state()
    dcp.load(loaded, checkpoint_id=args.checkpoints / str(first))
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    amp.load_state_dict(loaded["amp"])  # amp

for step in range(first, args.steps):
    inputs, targets = task.batch(torch.Generator().manual_seed(step))  # the same on every rank, which takes its part
    loss = task.loss(model(inputs[rank::world]), targets[rank::world])
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:  # amp
        scaled_loss.backward()  # amp: was loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if (step + 1) % 50 == 0:
        dist.all_reduce(loss := loss.detach() / world)
        if rank == 0:
            print(f"step {step + 1:4}  loss {loss.item():.4f}", flush=True)
        if args.checkpoints:
            dcp.save(state(), checkpoint_id=args.checkpoints / str(step + 1))

model.eval()
with torch.no_grad():
    bits = task.evaluate(model)["bits"]
if rank == 0:
    print(f"{args.opt_level}: {world} ranks, held-out {bits:.3f} bits per character")
dist.destroy_process_group()
