"""LoRA adapters of peft over frozen models of transformers: the base costs nothing, and adapters train at a level."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankError
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

EXTRAS = "pip install amp_patch[lightning,transformers,ecosystem]; `make test-all` does"
pytest.importorskip("lightning.pytorch", reason=EXTRAS)
pytest.importorskip("accelerate", reason=EXTRAS)
os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported: nothing here comes from the network
pytest.importorskip("transformers", reason=EXTRAS)
peft = pytest.importorskip("peft", reason=EXTRAS)

# After the skips: these import the packages.
from checkpoints import (  # noqa: E402
    TOLERANCE,
    TRAININGS,
    Lit,
    adamw,
    batch,
    by_name,
    count_calls,
    iterate,
    loader,
    masters,
    prompt,
    random_model,
    rows,
    same_by_name,
    types,
)
from frameworks import PACKAGES_WARN, hf_trainer, trainer  # noqa: E402
from peak import Peak  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from training import backward, same  # noqa: E402

from amp_patch import amp  # noqa: E402
from amp_patch.integrations.lightning import OptLevelPrecision  # noqa: E402
from amp_patch.masters.masters import master_of  # noqa: E402

# The newer name is that of transformers 5.23, and peft and scripts have this one.
OLDER_NAME = ".*gradient_checkpointing.* is deprecated"
pytestmark = [*PACKAGES_WARN, pytest.mark.filterwarnings(f"ignore:{OLDER_NAME}:FutureWarning")]

TYPES = {"FP32": torch.float32, "BF16": torch.bfloat16, "FP16": torch.float16}
CAST = {"O2": torch.float16, "O5": torch.bfloat16, "O5, split": torch.bfloat16}
LR = 1e-2
every_training = pytest.mark.parametrize("training", TRAININGS)
every_base = pytest.mark.parametrize("base", TYPES)
every_adapter = pytest.mark.parametrize("adapters", ["FP32", "BF16"])


def base_model(base: str, name: str = "Llama") -> Any:
    """Its values are those of BF16, whatever it is in."""
    return random_model(name).bfloat16().to(TYPES[base])


def lora(base: str = "BF16", adapters: str = "FP32", name: str = "Llama", **options: Any) -> Any:
    """FP32 is what peft makes of adapters by itself, over any base."""
    config = {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0, **options}
    kind = {} if name == "ViT" else {"task_type": "CAUSAL_LM"}
    model = base_model(base, name)
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(**kind, **config), autocast_adapter_dtype=False)
    for param in trained(model):
        param.data = param.data.bfloat16().to(TYPES[adapters])
    return model.train()


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def frozen(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if not p.requires_grad]


def of_adapters(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value.detach().clone() for key, value in state.items() if "lora_" in key or "modules_to_save" in key}


def begun(training: str, model: Any, **options: Any) -> tuple[Any, Any]:
    return amp.initialize(model, adamw(model, LR), **TRAININGS[training], verbosity=0, **options)


def run(training: str, model: Any, steps: int = 4, **options: Any) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and masters of a training, which is over then."""
    between, name = options.pop("between", None), options.pop("name", "Llama")
    model, optimizer = begun(training, model, **options)
    losses = iterate(model, optimizer, name, steps, between)
    found = masters(optimizer)
    amp.restore()
    return losses, found


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**batch("Llama", 0)).logits.float()


# ---------------------------------------------------------------------------------------------------------------------
# The numbers, and the bytes


@every_adapter
@every_base
@every_training
def test_adapters_train_over_a_frozen_base(training, base, adapters):
    fp32 = lora("FP32", adapters).float()
    plain = iterate(*amp.initialize(fp32, adamw(fp32, LR), enabled=False))
    wide, wide_masters = run(training, lora(base, adapters).float(), 6)

    model = lora(base, adapters)
    before, places, count = types(model), [p.data_ptr() for p in frozen(model)], len(trained(model))
    values = [p.detach().clone() for p in frozen(model)]
    model, optimizer = begun(training, model)
    assert all(master_of(p) is None for p in frozen(model))
    assert len(list(amp.master_params(optimizer))) == count == 8
    assert {m.dtype for m in amp.master_params(optimizer)} == {torch.float32}
    low = CAST.get(training)
    assert {p.dtype for p in frozen(model)} == {low or TYPES[base]}
    assert {p.dtype for p in trained(model)} == {low or torch.float32}
    losses = iterate(model, optimizer)
    if low in (None, TYPES[base]):
        assert [p.data_ptr() for p in frozen(model)] == places and same(frozen(model), values)
    assert losses == pytest.approx(plain, rel=TOLERANCE[training]) and losses[-1] < losses[0]
    if low is not None or base == "FP32":
        assert losses == wide and same(masters(optimizer), wide_masters)
    else:  # embeddings and norms give the type of their weights, in which the layers are added up
        assert losses != wide and losses == pytest.approx(wide, rel=TOLERANCE[training])
    amp.restore()
    assert types(model) == before
    if low in (None, TYPES[base]):
        assert same(frozen(model), values)


@pytest.mark.parametrize("base", ["BF16", "FP16"])
@every_training
def test_a_base_that_the_optimizer_has_too_has_no_masters(training, base):
    losses, found = run(training, lora(base))
    model = lora(base)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-4)
    model, optimizer = amp.initialize(model, optimizer, **TRAININGS[training], verbosity=0)
    assert iterate(model, optimizer, steps=4) == losses
    held = list(amp.master_params(optimizer))
    assert all(master_of(p) is None and p in set(held) for p in frozen(model))
    assert same([m for m in held if m.requires_grad], found)


@pytest.mark.parametrize("base", ["BF16", "FP16"])
@every_training
def test_with_embeddings_and_norms_in_fp32_they_have_the_bits_at_each_level(training, base):
    kept = [nn.Embedding, lambda path, module: type(module).__name__.endswith("RMSNorm")]
    wide = run(training, lora(base).float(), keep_fp32=kept)
    losses, found = run(training, lora(base), keep_fp32=kept)
    assert losses == wide[0] and same(found, wide[1])


@pytest.mark.parametrize(("training", "base"), [("O1", "BF16"), ("O4", "BF16"), ("O2", "FP16"), ("O5", "BF16")])
def test_a_base_in_the_levels_type_takes_no_byte(training, base):
    model = lora(base)
    low = sum(2 * p.numel() for p in trained(model)) if training in CAST else 0  # FP32 adapters become masters
    with Peak(model) as peak:
        begun(training, model)
    assert low <= peak.peak < low + 100 < min(2 * p.numel() for p in frozen(model) if p.dim() > 1) + low


@pytest.mark.parametrize("reentrant", [False, True])
@every_training
def test_gradient_checkpointing_changes_nothing(training, reentrant):
    model = lora()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    calls = count_calls(model)
    losses, found = run(training, model)
    expected = run(training, lora())
    assert losses == expected[0] and same(found, expected[1])
    assert len(calls) == 2 * len(losses), "each forward comes again in backward"


@every_training
def test_generate_and_the_base_by_itself_between_steps_change_nothing(training):
    bare = amp.initialize(base_model("BF16").requires_grad_(False), **TRAININGS[training], verbosity=0)
    alone = logits(bare)
    amp.restore()

    def use(model, step):
        before = by_name(model)
        assert model.eval().generate(**prompt(step)).shape == (4, 8)
        adapted = logits(model)
        with model.disable_adapter():
            assert torch.equal(logits(model), alone)
            model.generate(**prompt(step))
        assert torch.equal(logits(model), adapted) and not torch.equal(adapted, alone)
        assert same_by_name(by_name(model), before)
        model.train()

    losses, found = run(training, lora(), between=use)
    expected = run(training, lora())
    assert losses == expected[0] and same(found, expected[1])


@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
@every_training
def test_a_head_that_is_trained_whole_trains_with_the_adapters(training, dora):
    options = {"name": "ViT", "modules_to_save": ["classifier"], "use_dora": dora}
    wide = run(training, lora(**options).float(), name="ViT")
    model = lora(**options)
    losses, found = run(training, model, name="ViT")
    assert len(found) == len(trained(model)) == (14 if dora else 10)
    assert losses[-1] < losses[0]
    if training in CAST:
        assert losses == wide[0] and same(found, wide[1])
    else:
        assert losses == pytest.approx(wide[0], rel=TOLERANCE[training])


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_frozen_value_that_fp16_cannot_hold_is_refused_with_the_line_that_works(level):
    model = lora()
    weight = model.base_model.model.model.layers[1].mlp.up_proj.weight
    weight.data[0, 0] = 1e5
    with pytest.raises(ValueError, match=r"'base_model.model.model.layers.1.mlp.up_proj.weight'.*opt_level='O5'"):
        amp.initialize(model, adamw(model), opt_level=level)
    amp.initialize(model, adamw(model), opt_level="O5")


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints, merged and further adapters


@every_adapter
@every_training
def test_adapters_are_saved_in_fp32_and_read_back(training, adapters, tmp_path):
    model, optimizer = begun(training, lora("BF16", adapters))
    iterate(model, optimizer, steps=3)
    exact = of_adapters(model.state_dict())
    assert same(exact.values(), masters(optimizer)) and {v.dtype for v in exact.values()} == {torch.float32}
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert same_by_name(saved, {key.replace(".default", ""): value for key, value in exact.items()})
    amp.restore()
    back = peft.PeftModel.from_pretrained(base_model("BF16"), tmp_path, is_trainable=True)
    assert same_by_name(of_adapters(back.state_dict()), exact)
    # A state dict has the base as it is, and loads to the bit.
    again, optimizer = begun(training, lora("BF16", adapters))
    again.load_state_dict({**again.state_dict(), **exact})
    assert same(masters(optimizer), exact.values())
    state = again.state_dict()
    assert all(state[key].data_ptr() == p.data_ptr() for key, p in again.named_parameters() if not p.requires_grad)


@every_training
def test_an_adapter_that_is_loaded_in_its_own_type_is_exact(training, tmp_path):
    model, optimizer = begun(training, lora())
    iterate(model, optimizer, steps=3)
    model.save_pretrained(tmp_path)
    exact = masters(optimizer)
    amp.restore()
    model, optimizer = begun(training, lora())
    iterate(model, optimizer, steps=1)
    model.load_adapter(tmp_path, "default", is_trainable=True, autocast_adapter_dtype=False)
    assert same(masters(optimizer), exact)
    assert {p.dtype for p in trained(model)} == {CAST.get(training, torch.float32)}
    iterate(model, optimizer, steps=1)


@every_training
def test_merged_adapters_are_the_trained_ones(training):
    model, optimizer = begun(training, lora("FP32"))
    iterate(model, optimizer)
    exact = of_adapters(model.state_dict())
    amp.restore()
    assert same_by_name(of_adapters(model.state_dict()), exact)
    adapted, plain = logits(model), logits(base_model("FP32"))
    merged = model.merge_and_unload()
    assert type(merged) is type(base_model("FP32")) and not any("lora" in key for key in merged.state_dict())
    torch.testing.assert_close(logits(merged), adapted, rtol=0, atol=1e-6)
    assert (adapted - plain).abs().max() > 1e-3


@every_training
def test_adapters_can_be_merged_while_a_training_lives(training):
    model, optimizer = begun(training, lora())
    iterate(model, optimizer)
    adapted = logits(model)
    merged = model.merge_and_unload()
    # The sum of weight and adapters is rounded to the type of the weight.
    torch.testing.assert_close(logits(merged), adapted, rtol=0, atol=1e-2)
    amp.restore()
    assert {p.dtype for p in merged.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(logits(merged), adapted, rtol=0, atol=1e-2)


@pytest.mark.parametrize("autocast", [True, False], ids=["FP32", "the base's type"])
@every_training
def test_an_adapter_that_is_added_later_trains_and_leaves_the_first_alone(training, autocast):
    model, optimizer = begun(training, lora())
    iterate(model, optimizer, steps=3)
    first = of_adapters(model.state_dict())
    second = peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")
    model.add_adapter("second", second, autocast_adapter_dtype=autocast)
    model.set_adapter("second")
    optimizer.add_param_group({"params": trained(model)})
    new = list(optimizer.param_groups[-1]["params"])
    assert len(new) == 4 and {p.dtype for p in new} == {torch.float32}  # masters, or their own
    low = CAST.get(training) if not autocast else None
    assert {p.dtype for p in trained(model)} == {low or torch.float32}
    values = [p.detach().clone() for p in new]
    losses = iterate(model, optimizer, steps=4)
    assert losses[2] < losses[0] and losses[3] < losses[1]
    assert not any(map(torch.equal, new, values))
    state = of_adapters(model.state_dict())
    assert all(torch.equal(state[key], value) for key, value in first.items())
    # And in the type of the level, once `initialize` is called again.
    model, optimizer = amp.initialize(model, optimizer, **TRAININGS[training], verbosity=0)
    assert {p.dtype for p in trained(model)} == {CAST.get(training, torch.float32)}
    assert same_by_name(of_adapters(model.state_dict()), state)
    iterate(model, optimizer, steps=2)
    model.set_adapter("default")
    iterate(model, optimizer, steps=2)
    now = of_adapters(model.state_dict())
    assert not any(torch.equal(now[key], value) for key, value in first.items())


# ---------------------------------------------------------------------------------------------------------------------
# The Trainer and Lightning


def with_trainer(out: Path, training: str, model: Any, resume: Any = None, **options: Any) -> Any:
    amp_options = {**TRAININGS[training], "verbosity": 0}
    level = amp_options.pop("opt_level")
    made = hf_trainer(out, level, model=model, rows=rows("Llama"), amp_options=amp_options, **options)
    made.train(resume_from_checkpoint=resume)
    return made


def logged(trainer: Any) -> list[Any]:
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]


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
def test_lightning_trains_adapters_and_gives_back_what_came(training):
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
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(**share(step)).loss
        backward(loss, optimizer)
        optimizer.step()
        losses.append(loss.item())
    return losses


def in_ddp(training: str, widen: bool, wrapped_first: bool) -> tuple[list[float], list[torch.Tensor]]:
    warnings.filterwarnings("ignore", OLDER_NAME, FutureWarning)
    model = lora()
    if widen:
        model.float()
    ddp = DistributedDataParallel(model) if wrapped_first else None
    model, optimizer = begun(training, model)
    losses = steps_of(ddp or DistributedDataParallel(model), optimizer)
    assert all(master_of(p) is None for p in frozen(model))
    return losses, masters(optimizer)


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
