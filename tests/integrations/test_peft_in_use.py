"""peft's adapters with the Trainer, Lightning and two processes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from adapters import (
    CAST,
    LR,
    OLDER_NAME,
    base_model,
    begun,
    every_adapter,
    every_training,
    frozen,
    lora,
    of_adapters,
    peft,
)
from checkpoints import (
    TOLERANCE,
    TRAININGS,
    Lit,
    batch,
    loader,
    rows,
    same_by_name,
    types,
)
from frameworks import PACKAGES_WARN, hf_trainer, logged, trainer
from ranks import RankError
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from training import iterate, masters_of, same

from amp_patch import amp
from amp_patch.integrations.lightning import OptLevelPrecision
from amp_patch.masters.masters import master_of

pytestmark = [*PACKAGES_WARN, pytest.mark.filterwarnings(f"ignore:{OLDER_NAME}:FutureWarning")]


# ---------------------------------------------------------------------------------------------------------------------
# The Trainer and Lightning


def with_trainer(out: Path, training: str, model: Any, resume: Any = None, **options: Any) -> Any:
    amp_options = {**TRAININGS[training], "verbosity": 0}
    level = amp_options.pop("opt_level")
    made = hf_trainer(out, level, model=model, rows=rows("Llama"), amp_options=amp_options, **options)
    made.train(resume_from_checkpoint=resume)
    return made


@every_training
def test_the_trainer_trains_adapters(training, tmp_path):
    runs = []
    for model, options in ((lora().float(), {}), (lora(), {}), (lora(), {"gradient_checkpointing": True})):
        made = with_trainer(tmp_path, training, model, **options)
        assert all(master_of(p) is None for p in frozen(model))
        runs.append((logged(made), of_adapters(model.state_dict())))
        made.save_model(str(tmp_path / "saved"))
        amp.restore()
    back = peft.PeftModel.from_pretrained(base_model("BF16"), tmp_path / "saved")
    assert same_by_name(of_adapters(back.state_dict()), runs[1][1])
    assert runs[2][0] == runs[1][0] and same_by_name(runs[2][1], runs[1][1])
    if training in CAST:
        assert runs[1][0] == runs[0][0] and same_by_name(runs[1][1], runs[0][1])
    else:
        losses, wide = ([loss for loss, _ in run[0]] for run in (runs[1], runs[0]))
        assert losses == pytest.approx(wide, rel=TOLERANCE[training])


@every_adapter
@every_training
def test_the_trainer_resumes_adapters_to_the_same_bits(training, adapters, tmp_path):
    saves = {"save_strategy": "steps", "save_steps": 2}
    whole = with_trainer(tmp_path, training, lora("BF16", adapters), **saves)
    states = logged(whole), of_adapters(whole.model.state_dict())
    amp.restore()
    resumed = with_trainer(tmp_path, training, lora("BF16", adapters), str(tmp_path / "checkpoint-2"), **saves)
    assert logged(resumed) == states[0]
    assert same_by_name(of_adapters(resumed.model.state_dict()), states[1])
    assert "load_adapter" not in vars(resumed.model)


@every_training
def test_the_trainer_ends_with_the_best_adapters_exactly(training, tmp_path):
    each = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    made = with_trainer(tmp_path, training, lora(), **each, load_best_model_at_end=True)
    best = load_file(Path(made.state.best_model_checkpoint, "adapter_model.safetensors"))
    found = of_adapters(made.model.state_dict())
    assert same_by_name({key.replace(".default", ""): value for key, value in found.items()}, best)


@every_training
def test_lightning_trains_adapters_and_restores_the_incoming_type(training):
    modules = [Lit(lora().float(), LR), Lit(lora(), LR)]
    before = [types(module) for module in modules]
    for module in modules:
        trainer(OptLevelPrecision(**TRAININGS[training], verbosity=0), max_epochs=1).fit(module, loader())
    assert [types(module) for module in modules] == before
    wide, module = modules
    assert same_by_name(of_adapters(module.state_dict()), of_adapters(module.ended))
    if training in CAST:
        assert module.losses == wide.losses
        assert same_by_name(of_adapters(module.ended), of_adapters(wide.ended))
    else:
        assert module.losses == pytest.approx(wide.losses, rel=TOLERANCE[training])


# ---------------------------------------------------------------------------------------------------------------------
# Two processes


def share(step: int) -> dict[str, torch.Tensor]:
    """This process's half of a batch."""
    return {key: value[dist.get_rank() :: dist.get_world_size()] for key, value in batch("Llama", step).items()}


def steps_of(model: Any, optimizer: Any, steps: int = 3) -> list[float]:
    return iterate(optimizer, lambda step: model(**share(step)).loss, range(steps))


def in_ddp(training: str, widen: bool, wrapped_first: bool) -> tuple[list[float], list[torch.Tensor]]:
    warnings.filterwarnings("ignore", OLDER_NAME, FutureWarning)
    model = lora()
    if widen:
        model.float()
    ddp = DistributedDataParallel(model) if wrapped_first else None
    model, optimizer = begun(training, model)
    losses = steps_of(ddp or DistributedDataParallel(model), optimizer)
    assert all(master_of(p) is None for p in frozen(model))
    return losses, masters_of(optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("wrapped_first", [False, True])
@pytest.mark.parametrize("training", ["O1", "O2", "O5"])
def test_adapters_in_ddp_are_the_same_on_both_ranks(ranks, training, wrapped_first):
    mine, others = ranks(in_ddp, training, False, wrapped_first, timeout=120.0)
    assert same(mine[1], others[1]) and mine[0] != others[0]
    if training in CAST:
        wide, _ = ranks(in_ddp, training, True, wrapped_first)
        assert mine[0] == wide[0] and same(mine[1], wide[1])


def sharded(training: str, adapters: str) -> tuple[list[float], int]:
    warnings.filterwarnings("ignore", OLDER_NAME, FutureWarning)
    level = TRAININGS[training]["opt_level"]
    model = lora("BF16", adapters)
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mp_policy=amp.fsdp_policy(level))
    fully_shard(model, mp_policy=amp.fsdp_policy(level))
    values = [p.to_local().clone() for p in frozen(model)]
    model, optimizer = begun(training, model)
    losses = steps_of(model, optimizer, 4)
    assert all(map(torch.equal, values, (p.to_local() for p in frozen(model))))
    return losses, len(list(amp.master_params(optimizer)))


@pytest.mark.slow
@pytest.mark.parametrize("training", ["O1", "O2", "O5"])
def test_sharded_adapters_train_over_a_sharded_base(ranks, training):
    results = ranks(sharded, training, "FP32", timeout=120.0)
    for losses, count in results:
        assert losses[2] < losses[0] and losses[3] < losses[1] and count == 8


@pytest.mark.slow
def test_sharded_adapters_in_bf16_are_refused_with_the_line_that_works(ranks):
    with pytest.raises(
        RankError, match=r"lora_A.default.weight' of .* is sharded and torch.bfloat16; .*model.float\(\)"
    ):
        ranks(sharded, "O5", "BF16", timeout=120.0)
