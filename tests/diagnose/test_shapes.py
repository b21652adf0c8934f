"""Advice on sizes: multiply-adds equal torch's count, and the advice names layers with a real share of them."""

from __future__ import annotations

import pytest
import torch
from conftest import DEVICES
from crossed import crossed
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from amp_patch import explain, initialize
from amp_patch.diagnose import shapes
from amp_patch.diagnose.explain import Explanation
from amp_patch.diagnose.shapes import Product, advice


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.qkv, self.heads = nn.Linear(width, 3 * width), heads

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Same(nn.Module):
    """Attention of a tensor to itself, by torch's module."""

    def __init__(self, **options):
        super().__init__()
        self.inner = nn.MultiheadAttention(12, 3, **options)

    def forward(self, x):
        return self.inner(x, x, x)[0]


class Writes(nn.Module):
    """Products by functions, methods and operators."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 6))

    def forward(self, x):
        y = x @ self.weight
        y = torch.addmm(y, x, self.weight).mm(self.weight.t())
        return torch.bmm(y.expand(2, *y.shape), y.new_ones(2, 4, 3)), y @ y.new_ones(4)  # the last one is with a vector


CASES = {
    "linear": (lambda: nn.Linear(4, 6), (3, 5, 4)),
    "conv": (lambda: nn.Conv2d(4, 6, 3, groups=2, stride=2), (2, 4, 9, 9)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1), (2, 4, 9)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2), (2, 4, 5, 5)),
    "attention": (lambda: Attention(12, 3), (2, 5, 12)),
    "module": (Same, (5, 2, 12)),
    "batch first": (lambda: Same(batch_first=True), (2, 5, 12)),
    "functions": (Writes, (5, 4)),
}


@crossed({"case": list(CASES), "level": [None, "O0", "O1", "O4", "O5"]}, meet=1)
def test_the_count_of_multiply_adds_equals_that_of_torch(case, level):
    make, shape = CASES[case]
    model, x = make(), torch.randn(shape)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(x)
    if level is not None:
        initialize(model, opt_level=level, verbosity=0)
    found = explain(model, x).products
    assert 2 * sum(product.multiply_adds for product in found) == counter.get_total_flops()
    assert all(product.low is (level in ("O1", "O4", "O5")) for product in found)


def test_products_of_recurrent_layers_are_counted():
    model, x = nn.LSTM(5, 7), torch.randn(3, 2, 5)
    (of_input, of_hidden) = explain(model, x).products
    assert of_input.multiply_adds == 6 * 5 * 28 and of_hidden.multiply_adds == 6 * 7 * 28


def layer(into, out, rows=4096, name="head", low=True):
    return Product(name, "linear", (("in features", into), ("out features", out)), rows * into * out, low, rows)


def test_advice_pads_a_vocabulary():
    (line,) = advice([layer(768, 50257, name="lm_head"), layer(768, 3072)])
    assert line == (
        "50257 is no multiple of 8: out features of lm_head; 94 % of the multiply-adds. "
        "Pad it to 50264, or 50304 (a multiple of 64)"
    )


def test_advice_has_one_line_for_equal_layers_and_their_multiples():
    stack = [layer(63 * 12, 3 * 63 * 12, name=f"blocks.{i}.qkv") for i in range(3)]
    stack += [Product(f"blocks.{i}.attend", "scaled", (("head size", 63),), 10**9) for i in range(3)]
    (line,) = advice(stack)
    assert line.startswith("63 (and 756, 2268) is no multiple of 8: in features of blocks.*.qkv; out features of ")
    assert line.endswith("head size of blocks.*.attend; 100 % of the multiply-adds. Pad it to 64")


NOT_NAMED = {
    "multiples": [layer(768, 50304)],
    "fp32": [layer(765, 50257, low=False)],
    "classes": [layer(512, 512), layer(4096, 10, rows=10**6)],
    "a small share": [layer(4096, 4096), layer(4096, 99)],
    "a small model": [layer(63, 65, rows=128)],
    "a few rows": [layer(4096, 4096, rows=31)],
}


@pytest.mark.parametrize("case", NOT_NAMED)
def test_advice_omits_sizes_that_gain_nothing(case):
    assert advice(NOT_NAMED[case]) == []
    assert advice([]) == []


def test_advice_omits_the_channels_of_an_image():
    sizes = (("in channels", 3), ("out channels", 64))
    assert advice([Product("stem", "conv2d", sizes, 10**12)]) == []


def test_advice_names_rows_that_all_layers_share():
    (line,) = advice([layer(1024, 1024, rows=1797), layer(1024, 4096, rows=1797)])
    assert line.startswith("1797 rows (batch times tokens) is no multiple of 8: 100 % of") and line.endswith(": 1800")
    assert advice([layer(1024, 1024, rows=1797), layer(1024, 4096, rows=1800)]) == []


@pytest.mark.parametrize("device", DEVICES)
def test_explain_ends_with_the_advice(device, monkeypatch):
    monkeypatch.setattr(shapes, "_MULTIPLY_ADDS", 0)
    model = nn.Sequential(nn.Linear(64, 99), nn.ReLU(), nn.Linear(99, 64)).to(device)
    initialize(model, opt_level="O5", verbosity=0)
    found = explain(model, torch.ones(16, 64, device=device))
    *_, header, line = str(found).splitlines()
    assert line.startswith("99 is no multiple of 8: out features of *; in features of *; 100 %") and "104" in line
    assert ("gains little" in header) is (device == "cpu")
    assert found.advice == [line]
    assert str(explain(model.to("cpu"), torch.ones(16, 64))).count("sizes:") == 1
    assert "sizes:" not in str(Explanation(None))
