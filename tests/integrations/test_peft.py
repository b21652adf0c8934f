"""LoRA adapters of peft over frozen models of transformers: the base costs nothing, and adapters train at a level."""

from __future__ import annotations

import pytest
import torch
from adapters import (
    CAST,
    LR,
    OLDER_NAME,
    TYPES,
    base_model,
    begun,
    every_adapter,
    every_training,
    frozen,
    lora,
    of_adapters,
    peft,
    run_adapters,
)
from checkpoints import (
    TOLERANCE,
    TRAININGS,
    adamw,
    batch,
    iterate,
    same_by_name,
    types,
)
from crossed import crossed
from frameworks import PACKAGES_WARN
from low_models import Peak
from safetensors.torch import load_file
from torch import nn
from training import masters_of, same, trained

from amp_patch import amp
from amp_patch.masters.masters import master_of

pytestmark = [*PACKAGES_WARN, pytest.mark.filterwarnings(f"ignore:{OLDER_NAME}:FutureWarning")]


every_base = pytest.mark.parametrize("base", TYPES)


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**batch("Llama", 0)).logits.float()


# ---------------------------------------------------------------------------------------------------------------------
# The numbers, and the bytes


@crossed(every_training, every_base, every_adapter, meet=1)
def test_adapters_train_over_a_frozen_base(training, base, adapters):
    fp32 = lora("FP32", adapters).float()
    plain = iterate(*amp.initialize(fp32, adamw(fp32, LR), enabled=False))
    wide, wide_masters = run_adapters(training, lora(base, adapters).float(), 6)

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
        assert losses == wide and same(masters_of(optimizer), wide_masters)
    else:  # embeddings and norms give the type of their weights, in which the layers are added up
        assert losses != wide and losses == pytest.approx(wide, rel=TOLERANCE[training])
    amp.restore()
    assert types(model) == before
    if low in (None, TYPES[base]):
        assert same(frozen(model), values)


@pytest.mark.parametrize("base", ["BF16", "FP16"])
@every_training
def test_a_base_that_the_optimizer_has_too_has_no_masters(training, base):
    losses, found = run_adapters(training, lora(base))
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
    wide = run_adapters(training, lora(base).float(), keep_fp32=kept)
    losses, found = run_adapters(training, lora(base), keep_fp32=kept)
    assert losses == wide[0] and same(found, wide[1])


@pytest.mark.parametrize(("training", "base"), [("O1", "BF16"), ("O4", "BF16"), ("O2", "FP16"), ("O5", "BF16")])
def test_a_base_in_the_levels_type_takes_no_byte(training, base):
    model = lora(base)
    low = sum(2 * p.numel() for p in trained(model)) if training in CAST else 0  # FP32 adapters become masters
    with Peak(model) as peak:
        begun(training, model)
    assert low <= peak.peak < low + 100 < min(2 * p.numel() for p in frozen(model) if p.dim() > 1) + low


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints, merged and further adapters


@crossed(every_training, every_adapter, meet=1)
def test_adapters_are_saved_in_fp32_and_read_back(training, adapters, tmp_path):
    model, optimizer = begun(training, lora("BF16", adapters))
    iterate(model, optimizer, steps=3)
    exact = of_adapters(model.state_dict())
    assert same(exact.values(), masters_of(optimizer)) and {v.dtype for v in exact.values()} == {torch.float32}
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert same_by_name(saved, {key.replace(".default", ""): value for key, value in exact.items()})
    amp.restore()
    back = peft.PeftModel.from_pretrained(base_model("BF16"), tmp_path, is_trainable=True)
    assert same_by_name(of_adapters(back.state_dict()), exact)
    # A state dict has the base as it is, and loads to the bit.
    again, optimizer = begun(training, lora("BF16", adapters))
    again.load_state_dict({**again.state_dict(), **exact})
    assert same(masters_of(optimizer), exact.values())
    state = again.state_dict()
    assert all(state[key].data_ptr() == p.data_ptr() for key, p in again.named_parameters() if not p.requires_grad)


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
