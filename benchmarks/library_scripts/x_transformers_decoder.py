"""x-transformers: a GPT with rotary positions, rms norm and GLU, trained through its autoregressive wrapper."""

from __future__ import annotations

import torch
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

torch.manual_seed(0)
layers = Decoder(dim=64, depth=2, heads=4, rotary_pos_emb=True, use_rmsnorm=True, ff_glu=True, attn_flash=True)
model = AutoregressiveWrapper(TransformerWrapper(num_tokens=256, max_seq_len=128, attn_layers=layers))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in range(20):
    loss = model(torch.randint(0, 256, (4, 65)))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
