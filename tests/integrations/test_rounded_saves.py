"""Calls of transformers and PEFT that round trained values log a warning, which names an exact way."""

from __future__ import annotations

import re

import pytest
import torch
from adapters import CAST, OLDER_NAME, begun, every_training, lora
from checkpoints import TRAININGS, adamw, by_name, iterate, loaded, random_model, same_by_name
from crossed import crossed
from frameworks import PACKAGES_WARN

from amp_patch import amp

pytestmark = [*PACKAGES_WARN, pytest.mark.filterwarnings(f"ignore:{OLDER_NAME}:FutureWarning")]

SAVES = r"^LlamaForCausalLM\.save_pretrained\(\) writes FP32 weights, and a config .* {}: .*amp\.fp32_copy\(model\)"
MERGES = (
    r"^PeftModelForCausalLM\.{}\(\) adds the adapters to weights in {}, .*amp\.restore\(\) first, then model\.float"
)


@pytest.fixture
def said(caplog):
    """The messages of amp_patch since the last call."""

    def since() -> list[str]:
        found = [record.getMessage() for record in caplog.records if record.name == "amp_patch"]
        caplog.clear()
        return found

    return since


def only(messages: list[str], pattern: str) -> bool:
    return len(messages) == 1 and re.search(pattern, messages[0]) is not None


@every_training
def test_save_pretrained_of_a_cast_model_warns_that_its_config_rounds_and_names_an_exact_way(training, tmp_path, said):
    model = random_model("Llama").bfloat16()
    model, optimizer = amp.initialize(model, adamw(model), **TRAININGS[training], verbosity=0)
    iterate(model, optimizer, steps=2)
    exact = by_name(model)
    said()
    model.save_pretrained(tmp_path / "model")
    rounds = not same_by_name(by_name(loaded(tmp_path / "model", "Llama", "auto")), exact)
    assert rounds is (training in CAST)
    messages = said()
    assert only(messages, SAVES.format(CAST[training])) if rounds else not messages
    # Its ways out.
    assert same_by_name(by_name(loaded(tmp_path / "model", "Llama", torch.float32)), exact)
    amp.fp32_copy(model).save_pretrained(tmp_path / "copy")
    assert same_by_name(by_name(loaded(tmp_path / "copy", "Llama", "auto")), exact)
    amp.restore()
    model.save_pretrained(tmp_path / "came")
    assert not said()


@crossed(every_training, {"base": ["BF16", "FP32"], "name": ["merge_and_unload", "merge_adapter"]}, meet=1)
def test_merging_adapters_into_low_weights_warns_and_merges(training, base, name, said, tmp_path):
    model, optimizer = begun(training, lora(base))
    iterate(model, optimizer, steps=2)
    model.save_pretrained(tmp_path)  # adapters alone, in FP32
    assert not said()
    low = CAST.get(training, torch.bfloat16 if base == "BF16" else None)
    weight = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight
    before = weight.detach().clone()
    merged = getattr(model, name)(safe_merge=True)
    assert only(said(), MERGES.format(name, low)) if low is not None else not said()
    assert not torch.equal(weight, before)
    if name == "merge_and_unload":
        assert type(merged).__name__ == "LlamaForCausalLM" and not any("lora" in key for key in merged.state_dict())


@every_training
def test_the_way_out_of_the_warning_merges_exactly(training, said):
    model, optimizer = begun(training, lora())
    iterate(model, optimizer, steps=2)
    amp.restore()
    model.float()
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    wanted = layer.base_layer.weight + layer.get_delta_weight("default")
    merged = model.merge_and_unload()
    assert torch.equal(merged.model.layers[0].self_attn.q_proj.weight, wanted)
    assert not torch.equal(wanted, wanted.bfloat16().float())
    assert not said()
