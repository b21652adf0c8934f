"""Models of the transformers library, tiny and made in code, at the opt levels: right without an option."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from amp_patch import amp

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
pytestmark = pytest.mark.slow

LOW = {"O2": torch.float16, "O5": torch.bfloat16}
# Eight steps from one start: what rounding to 11 and to 8 bits may do to a loss between 1 and 5.
TOLERANCE = {"plain": 0.0, "O0": 0.0, "O1": 2e-3, "O2": 2e-3, "O4": 1e-2, "O5": 1e-2}
FAR = 900  # positions from here on: angles that a rounded frequency gets wrong by a radian

_TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_TEXT, "num_key_value_heads": 2, "pad_token_id": 0}
_DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
_T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
_IMAGE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": 5,
}
_SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 2}

# Name -> (model class, config class, its arguments).
MODELS = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", _GROUPED),
    "Llama, eager attention": ("LlamaForCausalLM", "LlamaConfig", {**_GROUPED, "attn_implementation": "eager"}),
    "Llama, dynamic": ("LlamaForCausalLM", "LlamaConfig", {**_GROUPED, "rope_parameters": _DYNAMIC}),
    "Mistral": ("MistralForCausalLM", "MistralConfig", {**_GROUPED, "sliding_window": 16}),
    "GPT-NeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _TEXT),
    "T5": ("T5ForConditionalGeneration", "T5Config", {**_T5, "decoder_start_token_id": 0}),
    "T5, gated": (
        "T5ForConditionalGeneration",
        "T5Config",
        {**_T5, "decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu"},
    ),
    "ViT": ("ViTForImageClassification", "ViTConfig", _IMAGE),
    "DINOv2": ("Dinov2ForImageClassification", "Dinov2Config", _IMAGE),
    "Swin": ("SwinForImageClassification", "SwinConfig", {**_SWIN, "num_labels": 5}),
}
ROTARY = ("Llama", "Llama, eager attention", "Mistral", "GPT-NeoX")


def made(name):
    model_class, config_class, options = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**options))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # the same numbers at every level
        if hasattr(module, "dropout_rate"):
            module.dropout_rate = 0.0
    return model


def batch(name):
    generator = torch.Generator().manual_seed(0)
    if "image_size" in MODELS[name][2]:
        images = torch.randn(4, 3, 16, 16, generator=generator)
        return {"pixel_values": images, "labels": torch.randint(5, (4,), generator=generator)}
    ids = torch.randint(3, 64, (2, 24), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, 20:] = 0
    if name.startswith("T5"):
        return {"input_ids": ids, "attention_mask": mask, "labels": ids[:, :12].contiguous()}
    positions = torch.arange(24)[None] + FAR
    return {"input_ids": ids, "attention_mask": mask, "labels": ids, "position_ids": positions}


def trained(name, level, **options):
    """The model after eight steps, its losses, its buffers before, and the cosines of its last forward."""
    model = made(name)
    buffers, cosines = {key: value.clone() for key, value in model.named_buffers()}, []
    for path, module in model.named_modules():
        if path.endswith("rotary_emb"):
            module.register_forward_hook(lambda module, args, output: cosines.append(output[0]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    if level != "plain":
        # A scale at which nothing overflows: a skipped step is another curve.
        scale = {"loss_scale": 8.0} if level in ("O1", "O2") else {}
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, **scale, **options)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = model(**batch(name)).loss
        if level == "plain":
            loss.backward()
        else:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses, buffers, cosines[-1] if cosines else None


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("name", MODELS)
def test_losses_follow_fp32_and_the_buffers_come_back(name, level):
    _, expected, _, cosines = trained(name, "plain")
    model, losses, buffers, found = trained(name, level)
    assert losses == pytest.approx(expected, rel=TOLERANCE[level])
    assert losses[-1] < losses[0]
    assert (found is None) == (cosines is None) and (name not in ROTARY or found is not None)
    if found is not None:
        assert found.dtype is LOW.get(level, torch.float32) and torch.equal(found, cosines.to(found.dtype))

    plain = amp.fp32_copy(model)
    with torch.no_grad():
        exact, cast = plain.eval()(**batch(name)), model.eval()(**batch(name))
    assert exact.logits.dtype is torch.float32 and exact.loss.item() == pytest.approx(cast.loss.item(), rel=1e-2)
    dynamic = "rope_parameters" in MODELS[name][2]  # computes its table anew
    for each in (plain, model):
        if each is model:
            amp.restore()
        assert {p.dtype for p in each.parameters()} == {torch.float32}
        for key, value in each.named_buffers():
            assert value.dtype is buffers[key].dtype and (dynamic or torch.equal(value, buffers[key]))
    with torch.no_grad():
        assert torch.equal(model(**batch(name)).logits, exact.logits)


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("name", ["Llama", "Llama, eager attention", "T5", "ViT"])
def test_masks_and_residuals_whose_type_is_read_from_a_weight_fit_where_modules_stay_fp32(name, level):
    """`model.dtype` is that of the first weight, which is FP32 here, and T5 asks the type of `wo`."""
    _, expected, *_ = trained(name, "plain")
    kept = [nn.Embedding, lambda path, module: path.endswith((".wo", ".q_proj", ".projection"))]
    _, losses, *_ = trained(name, level, keep_fp32=kept if name != "ViT" else kept[1:])
    assert losses == pytest.approx(expected, rel=TOLERANCE[level])
