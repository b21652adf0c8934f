"""scaled_dot_product_attention with torch's CausalBias, which tests whether it is called by this very function."""

from __future__ import annotations

import pytest
import torch
from conftest import DEVICES
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from amp_patch import amp


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore:Graph break")  # Dynamo, at the bias
@pytest.mark.parametrize("backend", [None, "eager"])
@pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize(("level", "dtype"), [("O1", torch.float16), ("O4", torch.bfloat16), ("O5", torch.bfloat16)])
@pytest.mark.parametrize("device", DEVICES)
def test_a_causal_bias_is_that_of_torch(device, level, dtype, bias, backend):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x):
            q, k, v = self.qkv(x)[:, None].chunk(3, -1)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias(x.shape[1], x.shape[1]))

    torch.manual_seed(0)
    model, x = Attention().to(device), torch.randn(2, 6, 8, device=device)
    q, k, v = model.qkv(x)[:, None].chunk(3, -1)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    model, _ = amp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level=level, verbosity=0)
    found = (model if backend is None else torch.compile(model, backend=backend))(x)
    torch.testing.assert_close(found.float(), expected, atol=0.02, rtol=0.02)
    assert found.dtype is (torch.float32 if level == "O5" else dtype)
    with amp.disable_casts():
        exact = F.scaled_dot_product_attention(q, k, v, attn_mask=bias(6, 6))
    torch.testing.assert_close(exact, expected)
    amp.restore()
    torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v, attn_mask=bias(6, 6)), expected)
