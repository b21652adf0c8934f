"""Hugging Face Accelerate at an opt level: initialize before prepare, scale_loss around accelerator.backward.

    python examples/integrations/accelerate_loop.py --opt-level O2

Leave `mixed_precision` at "no": the opt level is the mixed precision.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from amp_patch import amp


def train(
    opt_level: str, micro_batches: int = 2, epochs: int = 2, save: str | Path = "", resume: str | Path = ""
) -> tuple[nn.Module, list[float]]:
    """Train on random data; the model and the loss of every batch. `save` and `resume` are folders of a checkpoint."""
    accelerator = Accelerator(mixed_precision="no", gradient_accumulation_steps=micro_batches)
    torch.manual_seed(0)
    inputs, targets = torch.randn(32, 8), torch.randint(3, (32,))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=8)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).to(accelerator.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)

    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(amp)  # the loss scale, in save_state and load_state
    if resume:
        accelerator.load_state(str(resume))

    losses = []
    for _ in range(epochs):
        for batch, classes in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(batch), classes)
                # The gradients of an iteration are unscaled once, when the processes have added theirs up.
                with amp.scale_loss(loss, optimizer, delay_unscale=not accelerator.sync_gradients) as scaled_loss:
                    accelerator.backward(scaled_loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    if save:
        accelerator.save_state(str(save))
    return accelerator.unwrap_model(model), losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--opt-level", default="O2")
    level = parser.parse_args().opt_level
    _, losses = train(level, epochs=10)
    print(f"{level}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
