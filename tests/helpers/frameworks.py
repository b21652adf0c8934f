"""Models for tests with Lightning and the Trainer of transformers, and these trainers with the tests' settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import transformers
from torch import nn

from amp_patch.integrations.transformers import OptLevelTrainer

# Warnings of the packages, on any script: their own deprecations, and advice on loaders and workers.
PACKAGES_WARN = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated"),
    pytest.mark.filterwarnings("ignore:The number of training batches:UserWarning"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]

INPUTS = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
CLASSES = torch.randint(3, (32,), generator=torch.Generator().manual_seed(2))


def loader(inputs: torch.Tensor = INPUTS) -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, CLASSES), batch_size=8)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, fused=True)  # as the loop at O2 steps it


class Classifier(pl.LightningModule):
    """`training_step` calls a child; the losses, and the type that the child's last layer computed in, are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.losses: list[float] = []
        self.dtypes: set[torch.dtype] = set()
        self.net[-1].register_forward_hook(lambda module, args, output: self.dtypes.add(output.dtype))

    def forward(self, inputs):
        return self.net(inputs)

    def loss(self, batch):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        return self.loss(batch)

    test_step = validation_step

    def predict_step(self, batch, index):
        return self(batch[0])  # the module itself, for once

    def configure_optimizers(self):
        optimizer = adam(self)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def trainer(precision: Any, package: Any = pl, **options: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    checkpoints = {"enable_checkpointing": "callbacks" in options}
    return package.Trainer(
        **{"accelerator": "cpu", "plugins": precision, "max_epochs": 2, **quiet, **checkpoints, **options}
    )


def gpt() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    size = {"vocab_size": 32, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
    silent = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**size, **silent, loss_type="ForCausalLMLoss", attn_implementation="eager")
    )


TEXTS = [{"input_ids": text, "labels": text} for text in torch.randint(32, (32, 8), generator=torch.Generator())]


def hf_trainer(folder: Path, level: str | None, **options: Any) -> transformers.Trainer:
    """Five iterations of two micro-batches; None is transformers' own Trainer."""
    callbacks, amp_options = options.pop("callbacks", []), options.pop("amp_options", {})
    rows = options.pop("rows", TEXTS)
    bases, model = options.pop("bases", ()), options.pop("model", None) or gpt()
    arguments = transformers.TrainingArguments(
        **{
            "output_dir": str(folder),
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "max_steps": 5,
            "max_grad_norm": 0.1,
            "learning_rate": 1e-2,
            "adam_epsilon": 1e-4,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            **options,
        }
    )
    data = {"train_dataset": rows, "eval_dataset": rows, "callbacks": callbacks}
    if level is None:
        return type("Theirs", (*bases, transformers.Trainer), {})(model, arguments, **data)
    return type("Ours", (*bases, OptLevelTrainer), {})(model, arguments, **data, opt_level=level, **amp_options)


def logged(trainer: Any) -> list[Any]:
    """Return the loss and the gradient norm of each step that a transformers Trainer has logged."""
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
