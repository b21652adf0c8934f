"""Models with peft's adapters. If a package is missing, tests that import this file are skipped."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

EXTRAS = "pip install amp_patch[lightning,transformers,ecosystem]; `make test-all` does"
pytest.importorskip("lightning.pytorch", reason=EXTRAS)
pytest.importorskip("accelerate", reason=EXTRAS)
os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported: nothing here comes from the network
pytest.importorskip("transformers", reason=EXTRAS)
peft = pytest.importorskip("peft", reason=EXTRAS)

# After the skips: these import the packages.
from checkpoints import TRAININGS, adamw, iterate, random_model  # noqa: E402
from training import masters_of, trained  # noqa: E402

from amp_patch import amp  # noqa: E402

# The newer name is that of transformers 5.23, and peft and scripts have this one.
OLDER_NAME = ".*gradient_checkpointing.* is deprecated"


TYPES = {"FP32": torch.float32, "BF16": torch.bfloat16, "FP16": torch.float16}
CAST = {"O2": torch.float16, "O5": torch.bfloat16, "O5, split": torch.bfloat16}
LR = 1e-2
every_training = pytest.mark.parametrize("training", TRAININGS)

every_adapter = pytest.mark.parametrize("adapters", ["FP32", "BF16"])


def base_model(base: str, name: str = "Llama") -> Any:
    """Return a model in the type `base`, with values that are exact in BF16."""
    return random_model(name).bfloat16().to(TYPES[base])


def lora(base: str = "BF16", adapters: str = "FP32", name: str = "Llama", **options: Any) -> Any:
    """Return a base model with adapters. FP32 is the type that peft gives adapters over any base."""
    config = {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0, **options}
    kind = {} if name == "ViT" else {"task_type": "CAUSAL_LM"}
    model = base_model(base, name)
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(**kind, **config), autocast_adapter_dtype=False)
    for param in trained(model):
        param.data = param.data.bfloat16().to(TYPES[adapters])
    return model.train()


def frozen(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if not p.requires_grad]


def of_adapters(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value.detach().clone() for key, value in state.items() if "lora_" in key or "modules_to_save" in key}


def begun(training: str, model: Any, **options: Any) -> tuple[Any, Any]:
    return amp.initialize(model, adamw(model, LR), **TRAININGS[training], verbosity=0, **options)


def run_adapters(training: str, model: Any, steps: int = 4, **options: Any) -> tuple[list[float], list[torch.Tensor]]:
    """Run a training to its end; return its losses and masters."""
    between, name = options.pop("between", None), options.pop("name", "Llama")
    model, optimizer = begun(training, model, **options)
    losses = iterate(model, optimizer, name, steps, between)
    found = masters_of(optimizer)
    amp.restore()
    return losses, found
