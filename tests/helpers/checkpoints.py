"""Small random models of transformers in BF16, as `from_pretrained` gives them, and how the tests train them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import transformers
from torch import Tensor, nn
from training import backward

TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
IMAGE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": 5,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}

# Name -> (model class, config class, its arguments). Qwen3 has norms of queries and keys.
MODELS = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", TEXT),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**TEXT, "head_dim": 8}),
    "ViT": ("ViTForImageClassification", "ViTConfig", IMAGE),
}
# Name -> arguments of `initialize`. The loss is scaled by what overflows nowhere: a skipped step is another curve.
TRAININGS: dict[str, dict[str, Any]] = {
    "O1": {"opt_level": "O1", "loss_scale": 8.0},
    "O2": {"opt_level": "O2", "loss_scale": 8.0},
    "O4": {"opt_level": "O4"},
    "O5": {"opt_level": "O5"},
    "O5, split": {"opt_level": "O5", "master_weights": "split"},
}
# Distance of the losses to FP32's over a few steps: the error of rounding to 11 and to 8 bits. Seeds of FP32 move the
# GPT's loss by 4% in docs/accuracy.md.
TOLERANCE = {"O1": 2e-3, "O2": 2e-3, "O4": 1e-2, "O5": 1e-2, "O5, split": 1e-2}


def random_model(name: str) -> transformers.PreTrainedModel:
    model_class, config_class, options = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, model_class)(getattr(transformers, config_class)(**options))


def written(name: str, folder: Path) -> Path:
    """Return the path of a BF16 checkpoint of the model; it is written once."""
    path = folder / name
    if not path.exists():
        random_model(name).bfloat16().save_pretrained(path)
    return path


def loaded(path: Path, name: str, dtype: torch.dtype | str = torch.bfloat16) -> transformers.PreTrainedModel:
    key = "dtype" if transformers.__version__ >= "5" else "torch_dtype"
    return getattr(transformers, MODELS[name][0]).from_pretrained(path, **{key: dtype}).train()


def batch(name: str, step: int) -> dict[str, Tensor]:
    """Return the batch of a step: four rows. Every second step has the same batch."""
    generator = torch.Generator().manual_seed(step % 2)
    if name == "ViT":
        images = torch.randn(4, 3, 16, 16, generator=generator)
        return {"pixel_values": images, "labels": torch.randint(5, (4,), generator=generator)}
    ids = torch.randint(3, 64, (4, 16), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def rows(name: str) -> list[dict[str, Tensor]]:
    """The rows of eight batches."""
    batches = [batch(name, step) for step in range(8)]
    return [{key: value[i] for key, value in each.items()} for each in batches for i in range(4)]


def adamw(model: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, eps=1e-4)


def iterate(
    model: Any, optimizer: Any, name: str = "Llama", steps: int = 6, between: Callable[[Any, int], Any] | None = None
) -> list[float]:
    """Train by a plain loop; return the losses. `between(model, step)` is called after each step."""
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(**batch(name, step)).loss
        backward(loss, optimizer)
        optimizer.step()
        losses.append(loss.item())
        if between is not None:
            between(model, step)
    return losses


def types(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def by_name(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def same_by_name(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(
        value.dtype is others[key].dtype and torch.equal(value, others[key]) for key, value in some.items()
    )


class Lit(pl.LightningModule):
    """A model of transformers in Lightning; its state dict at the end of the training is kept."""

    def __init__(self, model: nn.Module, lr: float = 1e-3) -> None:
        super().__init__()
        self.model, self.lr = model, lr
        self.losses: list[float] = []
        self.ended: dict[str, Tensor] = {}

    def training_step(self, batch, index):
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def on_train_end(self):
        self.ended = by_name(self)

    def configure_optimizers(self):
        return adamw(self, self.lr)


def loader(name: str = "Llama") -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(rows(name), batch_size=8)
