"""Casts in torch's modules, in their gradients and on several threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from casting import (
    FULL,
    LOW,
    clean_fixture,  # noqa: F401  the fixture `_clean`
    installed_fixture,  # noqa: F401  the fixture `installed`
    needs_install,
    o1,
)
from conftest import DEVICES
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from amp_patch.casts import regions


def close(result: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """A few roundings to `dtype` of numbers of the size of 1: eps is 2**-10 for FP16, 2**-7 for BF16; we allow 8."""
    torch.testing.assert_close(result.float(), expected, rtol=0, atol=8 * torch.finfo(dtype).eps)


@needs_install
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
@pytest.mark.parametrize("given", ["float32", "low", "packed"])
def test_recurrent_networks(kind: Any, given: str, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    network = kind(4, 5, num_layers=2, bidirectional=True).to(device)
    x = torch.randn(6, 3, 4, device=device)
    expected = network(x)[0]
    with regions.region(o1(dtype)):
        if given == "packed":
            packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([6, 6, 6]))
            result = nn.utils.rnn.pad_packed_sequence(network(packed)[0])[0]
        else:
            result = network(x.to(dtype) if given == "low" else x)[0]
    assert result.dtype is dtype
    close(result, expected, dtype)
    result.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype is FULL for p in network.parameters())


@needs_install
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("training", [True, False])
def test_attention(training: bool, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8, device=device)
    attention = nn.MultiheadAttention(8, 2, batch_first=True, device=device).train(training)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, device=device)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    expected = attention(x, x, x)[0], encoder(x)
    with torch.set_grad_enabled(training), regions.region(o1(dtype)), Products() as products:
        result = attention(x, x, x)[0], encoder(x)
    close(result[0], expected[0], dtype)
    close(result[1], expected[1], dtype)
    assert result[0].dtype is dtype
    assert result[1].dtype is FULL, "a layer norm comes last"
    assert set(products.types) == {dtype} and len(products.types) >= 10, "a fused path went round the lists"


class Products(TorchDispatchMode):
    """The types of the matrix products in the block, each as torch's kernel gave it."""

    def __init__(self) -> None:
        super().__init__()
        self.types: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(name in str(func) for name in ("mm.", "dot_product", "attention", "encoder_layer")):
            self.types.append((result[0] if isinstance(result, tuple) else result).dtype)
        return result
