"""A script for two processes of torchrun: Lightning, Accelerate and transformers' Trainer under DDP, at O1 and O2.

    torchrun --standalone --nproc-per-node 2 tests/helpers/ddp_integrations.py <folder>

Rank r writes <folder>/r.pt: {name of the training: its weights}.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from frameworks import CLASSES, INPUTS, Classifier, adam, hf_trainer, trainer
from torch import nn

from amp_patch import amp
from amp_patch.integrations.lightning import OptLevelPrecision


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def share(rank: int, world: int) -> torch.utils.data.DataLoader:
    """Return this rank's rows of each batch of eight."""
    rows = torch.utils.data.TensorDataset(INPUTS[rank::world], CLASSES[rank::world])
    return torch.utils.data.DataLoader(rows, batch_size=8 // world)


def lightning(level: str, rank: int, world: int) -> nn.Module:
    """Each process begins with other weights: DDP takes those of the first, and the masters must be those."""
    module = Classifier()
    module.net = net(seed=rank)
    options = {"strategy": "ddp", "devices": world} if world > 1 else {}
    options |= {"use_distributed_sampler": False, "accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    trainer(OptLevelPrecision(level), **options).fit(module, share(rank, world))
    return module.net


def accelerate(level: str, rank: int, world: int) -> nn.Module:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = net(seed=rank)
    optimizer = adam(model)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(2):
        for batch, classes in share(rank, world):
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(batch), classes)
                with amp.scale_loss(loss, optimizer, delay_unscale=not accelerator.sync_gradients) as scaled_loss:
                    accelerator.backward(scaled_loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
                optimizer.zero_grad()
    return accelerator.unwrap_model(model)


def transformers(level: str, rank: int, world: int, folder: Path) -> nn.Module:
    parallel = {"ddp_backend": "gloo", "ddp_find_unused_parameters": False} if world > 1 else {}
    hf = hf_trainer(folder, level, per_device_train_batch_size=4 // world, **parallel)
    hf.train()
    return hf.model


def run_rank(rank: int, world: int, folder: Path) -> dict[str, list[torch.Tensor]]:
    result = {}
    for level in ("O1", "O2"):
        for name, train in {"lightning": lightning, "accelerate": accelerate}.items():
            result[f"{name} {level}"] = train(level, rank, world)
        result[f"transformers {level}"] = transformers(level, rank, world, folder)
        amp.restore()
    return {name: [value.detach() for value in model.state_dict().values()] for name, model in result.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    here, folder = int(os.environ["RANK"]), Path(sys.argv[1])
    torch.save(run_rank(here, int(os.environ["WORLD_SIZE"]), folder), folder / f"{here}.pt")
    os._exit(0)  # Gloo's threads sometimes abort a process that has done all its work
