"""transformers: a GPT-2 from a configuration in a loop, with a BatchEncoding as a tokenizer gives it."""

from __future__ import annotations

import torch
from transformers import BatchEncoding, GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=500, n_positions=64, n_embd=64, n_layer=2, n_head=4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = get_linear_schedule_with_warmup(optimizer, 2, 20)
for _ in range(20):
    ids = torch.randint(0, 500, (4, 32))
    batch = BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    loss = model(**batch, labels=ids).loss
    loss.backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
