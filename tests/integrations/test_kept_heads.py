"""Heads in FP32 of transformers' models, as reinforcement learning needs them: log-probabilities to the bit."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from crossed import crossed
from torch import Tensor
from torch.nn import functional
from training import SGD

EXTRAS = "pip install amp_patch[transformers]; `make test-all` does"
os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported: nothing here comes from the network
transformers = pytest.importorskip("transformers", reason=EXTRAS)

from amp_patch import amp  # noqa: E402

VOCABULARY = 64
SMALL = {"vocab_size": VOCABULARY, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None}


def llama(tied: bool) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**SMALL, **sizes, num_key_value_heads=1, tie_word_embeddings=tied)
    return transformers.LlamaForCausalLM(config)


def gpt2(tied: bool) -> Any:
    sizes = {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**SMALL, **sizes, tie_word_embeddings=tied)
    return transformers.GPT2LMHeadModel(config)


def log_probabilities(logits: Tensor, ids: Tensor) -> Tensor:
    return functional.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None])


@crossed({"make": [llama, gpt2], "tied": [False, True], "labels": [False, True], "level": ["O2", "O5", "O5+split"]})
def test_log_probabilities_are_those_of_an_fp32_head_on_the_same_hidden_states(make, tied, labels, level):
    torch.manual_seed(0)
    model = make(tied).train(labels)
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level=level, keep_fp32=["lm_head"])
    hidden: list[Tensor] = []
    model.lm_head.register_forward_pre_hook(lambda module, args: hidden.append(args[0].detach().clone()))
    ids = torch.randint(VOCABULARY, (2, 12))
    output = model(input_ids=ids, labels=ids if labels else None)
    assert hidden[0].dtype in (torch.float16, torch.bfloat16)
    exact = functional.linear(hidden[0].float(), model.lm_head.weight.detach())
    assert torch.equal(log_probabilities(output.logits, ids), log_probabilities(exact, ids))
    loss = functional.cross_entropy(exact[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    if labels:
        torch.testing.assert_close(output.loss, loss, rtol=1e-6, atol=0)
    with amp.scale_loss(output.loss if labels else output.logits.mean(), optimizer) as scaled:
        scaled.backward()
    assert model.lm_head.weight.grad.any() and model.base_model.get_input_embeddings().weight.grad.any()
