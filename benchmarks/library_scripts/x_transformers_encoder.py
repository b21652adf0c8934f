"""x-transformers: an encoder and a decoder, with ALiBi and a mask."""

from __future__ import annotations

import torch
from x_transformers import XTransformer

torch.manual_seed(0)
model = XTransformer(
    dim=64,
    enc_num_tokens=256,
    enc_depth=2,
    enc_heads=4,
    enc_max_seq_len=64,
    dec_num_tokens=256,
    dec_depth=2,
    dec_heads=4,
    dec_max_seq_len=64,
    tie_token_emb=True,
    enc_alibi_pos_bias=True,
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in range(20):
    source, target = torch.randint(0, 256, (4, 32)), torch.randint(0, 256, (4, 32))
    loss = model(source, target, mask=torch.ones_like(source).bool())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
