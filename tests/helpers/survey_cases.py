"""Small trainings that break at some levels: a comment in the line says at which.

Each function returns (model, loss_fn, inputs) as `amp.survey` takes them. A line without a comment breaks nowhere. The
comment "breaks" marks a line that a rule names. The comment "off" marks lines of which the measurement names one: the
line that breaks, or an earlier one from which on the numbers must be FP32.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

FLOAT32 = torch.finfo(torch.float32)


class Layer(nn.Module):
    def __init__(self, features=4, results=4):
        super().__init__()
        self.layer = nn.Linear(features, results)


def marked(case: Callable, word: str = "breaks") -> dict[int, set[str]]:
    """Return {line number: levels} from the comments of a case."""
    lines, first = inspect.getsourcelines(case)
    wanted = re.compile(rf"# .*{word}: ([O\d ]+)(;|$)")
    found = ((number, wanted.search(line.rstrip())) for number, line in enumerate(lines, first))
    return {number: set(match[1].split()) for number, match in found if match}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def scores(self, x):
        return self.q(x) @ self.k(x).transpose(-1, -2)


class BiasedAttention(Attention):
    """As DeBERTa: at O1 the sum with a parameter is FP32, and a product of sums is FP16."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(8))

    def biased(self, x):
        return self.q(x) + self.bias


def dead_row(number: float) -> torch.Tensor:
    """A causal mask; in the second sequence the first row is masked throughout."""
    mask = torch.full((2, 4, 4), number).triu(1)
    mask[1, 0] = number
    return mask


def times():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("frequencies", torch.exp(-math.log(1e4) * torch.arange(8) / 8))
            self.out = nn.Linear(20, 4)

        def forward(self, x, t):
            angles = t[:, None] * self.frequencies  # off: O5 O7
            sines = angles.sin()  # off: O5 O7
            return self.out(torch.cat([x, sines, angles.cos()], -1))  # off: O5 O7

    return Net(), F.mse_loss, (torch.randn(4, 4), torch.tensor([937.0, 11.0, 503.0, 999.0]), torch.randn(4, 4))


def times_as_integers():
    def embedding(t, width):
        places = torch.arange(
            width // 2,
            dtype=torch.float32,
            device=t.device,
        )
        frequencies = torch.exp(-math.log(1e4) * places / width)
        angles = t[:, None].float() * frequencies
        return torch.cat([angles.sin(), angles.cos()], -1)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.time, self.out = nn.Linear(16, 8), nn.Linear(12, 4)

        def forward(self, x, t):
            low = x.dtype
            return self.out(torch.cat([x, self.time(embedding(t, 16).to(low))], -1))

    return Net(), F.mse_loss, (torch.randn(4, 4), torch.tensor([937, 11, 503, 999]), torch.randn(4, 4))


def years():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 1)
            nn.init.constant_(self.layer.bias, 1995.0)

        def forward(self, x, year):
            return (self.layer(x)[:, 0] - year).square().mean()  # breaks: O4 O5 O6 O7

    return Net(), lambda loss: loss, (torch.randn(8, 4), torch.arange(1980.0, 2012.0, 4.0))


def years_near_the_first_prediction():
    class Net(Layer):
        def forward(self, x, y):
            return F.l1_loss(input=self.layer(x) + 3000, target=y)  # breaks: O1 O2 O3 O4 O5 O6 O7

    return Net(), lambda loss: loss, (torch.randn(8, 4), 3000 + torch.randn(8, 4))


def mask_of_the_smallest_number():
    class Net(Attention):
        def forward(self, x, mask):
            weights = (self.scores(x) + mask).softmax(-1)
            return weights @ self.v(x)

    return Net(), F.mse_loss, (torch.randn(2, 4, 8), dead_row(FLOAT32.min), torch.randn(2, 4, 8))


def mask_without_a_dead_row():
    class Net(Attention):
        def forward(self, x, mask):
            return (self.scores(x) + mask).softmax(-1) @ self.v(x)

    return Net(), F.mse_loss, (torch.randn(2, 4, 8), dead_row(FLOAT32.min)[:1], torch.randn(2, 4, 8))


def mask_of_the_types_smallest_number():
    class Net(Attention):
        def forward(self, x, hidden):
            scores = self.scores(x)
            return scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1) @ self.v(x)

    return Net(), F.mse_loss, (torch.randn(2, 4, 8), dead_row(1.0) == 1, torch.randn(2, 4, 8))


def mask_of_another_tensors_smallest_number():
    class Net(BiasedAttention):
        def forward(self, x, hidden):
            q = self.biased(x)
            scores = q @ self.k(x).transpose(-1, -2)
            return scores.masked_fill(hidden, torch.finfo(q.dtype).min).softmax(-1) @ self.v(x)  # breaks: O1 O4 O6

    return Net(), F.mse_loss, (torch.randn(2, 4, 8), dead_row(1.0) == 1, torch.randn(2, 4, 8))


def row_of_another_tensors_smallest_number():
    class Net(BiasedAttention):
        def forward(self, x, hidden):
            q = self.biased(x)
            scores = torch.where(hidden, torch.finfo(q.dtype).min, q @ self.k(x).transpose(-1, -2))
            return scores.softmax(-1) @ self.v(x)  # breaks: O1 O4 O6

    return Net(), F.mse_loss, (torch.randn(2, 4, 8), dead_row(1.0) == 1, torch.randn(2, 4, 8))


def mask_of_a_tensor():
    """As SEW-D: the smallest number of the scores' type is a tensor."""

    class Net(Attention):
        def forward(self, x, hidden):
            scores = self.scores(x)
            lowest = torch.tensor(torch.finfo(scores.dtype).min, device=x.device)
            return scores.masked_fill(hidden, lowest).softmax(-1) @ self.v(x)

    return Net(), F.mse_loss, (torch.randn(2, 4, 8), dead_row(1.0) == 1, torch.randn(2, 4, 8))


def bias_of_fp32s_smallest_number():
    class Net(Attention):
        def forward(self, x, hidden):
            scores = self.scores(x)
            bias = torch.zeros(hidden.shape, dtype=scores.dtype, device=x.device)
            bias.masked_fill_(hidden, torch.finfo(torch.float32).min)  # breaks: O1 O2 O3 O4 O5 O6 O7
            return (scores + bias).softmax(-1) @ self.v(x)

    return Net(), F.mse_loss, (torch.randn(2, 4, 8), dead_row(1.0) == 1, torch.randn(2, 4, 8))


def mask_that_is_subtracted():
    class Net(Attention):
        def forward(self, x, keep):
            return (self.scores(x) - 1e10 * (1 - keep)).softmax(-1) @ self.v(x)

    return Net(), F.mse_loss, (torch.randn(2, 4, 8), torch.ones(4, 4).tril(), torch.randn(2, 4, 8))


def row_of_a_logsumexp():
    class Net(Layer):
        def forward(self, x, keep):
            return torch.logsumexp(self.layer(x) - (1 - keep) * 1e9, -1)  # breaks: O2 O3

    keep = torch.ones(6, 4)
    keep[2] = 0
    return Net(8, 4), lambda y, target: F.mse_loss(y.clamp(min=-9), target), (torch.randn(6, 8), keep, torch.randn(6))


def mask_in_fused_attention():
    class Net(Attention):
        def forward(self, x, mask):
            q = self.q(x)
            return F.scaled_dot_product_attention(q, q, q, attn_mask=mask.to(q.dtype))  # breaks: O1 O4 O6

    return Net(), F.mse_loss, (torch.randn(2, 4, 8), dead_row(FLOAT32.min), torch.randn(2, 4, 8))


def mask_of_a_billion():
    class Net(Attention):
        def forward(self, x, hidden):
            scores = self.scores(x).masked_fill(hidden, -1e9)  # breaks: O1 O2 O3
            return scores.softmax(-1) @ self.v(x)

    return Net(), F.mse_loss, (torch.randn(2, 4, 8), torch.ones(4, 4, dtype=torch.bool).triu(1), torch.randn(2, 4, 8))


def mask_times_a_billion():
    class Net(Attention):
        def forward(self, x, keep):
            return (self.scores(x) + (1.0 - keep) * -1e9).softmax(-1) @ self.v(x)

    return Net(), F.mse_loss, (torch.randn(2, 4, 8), torch.ones(4, 4).tril(), torch.randn(2, 4, 8))


def mask_in_a_learned_bias():
    """As LongT5: FP32 holds the mask, and loses it where it is added to low-precision scores in place."""

    class Net(Attention):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(4, 4))

        def forward(self, x, hidden):
            scores = self.scores(x)
            scores += self.bias + torch.where(hidden, -1e10, 0.0)
            weights = scores.float().softmax(-1)  # breaks: O1 O2 O3
            return weights.to(x.dtype) @ self.v(x)

    return Net(), F.mse_loss, (torch.randn(2, 4, 8), dead_row(1.0) == 1, torch.randn(2, 4, 8))


def epsilon_in_a_quotient():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)

        def forward(self, x):
            h = self.a(x)
            return self.b(h / (h.abs().sum(-1, keepdim=True) + 1e-12))  # breaks: O2 O3

    x = torch.randn(8, 4)
    x[3] = 0
    return Net(), F.mse_loss, (x, torch.randn(8, 4))


def epsilon_in_a_logarithm():
    class Net(Layer):
        def forward(self, x):
            guarded = self.layer(x).relu() + 1e-8  # breaks: O1 O2 O3
            return guarded.log()

    return Net(), F.mse_loss, (torch.randn(8, 4), torch.randn(8, 4))


def epsilon_that_is_not_needed():
    class Net(Layer):
        def forward(self, x):
            h = self.layer(x)
            return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-8)

    return Net(), F.mse_loss, (torch.randn(8, 4), torch.randn(8, 4))


def rotary_buffer():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("frequencies", 1e4 ** (-torch.arange(0, 8, 2) / 8))
            self.q = nn.Linear(8, 8)

        def forward(self, x):
            angles = torch.arange(x.shape[1], device=x.device)[:, None] * self.frequencies  # off: O2 O3 O5 O7
            a, b = self.q(x).chunk(2, -1)
            c, s = angles.cos(), angles.sin()  # off: O2 O3 O5 O7
            return torch.cat([a * c - b * s, a * s + b * c], -1)

    return Net(), F.mse_loss, (torch.randn(1, 4096, 8), torch.randn(1, 4096, 8))


def rotary_module():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("frequencies", 1e4 ** (-torch.arange(0, 8, 2) / 8))

        def forward(self, x):
            angles = torch.arange(x.shape[1], device=x.device)[:, None] * self.frequencies
            return angles.cos(), angles.sin()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.q = Table(), nn.Linear(8, 8)

        def forward(self, x):
            a, b = self.q(x).chunk(2, -1)
            c, s = self.table(x)
            return torch.cat([a * c - b * s, a * s + b * c], -1)

    return Net(), F.mse_loss, (torch.randn(1, 4096, 8), torch.randn(1, 4096, 8))


def float_indices():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.layer = nn.Embedding(5000, 4), nn.Linear(4, 4)

        def forward(self, rows):
            return self.layer(self.embedding(rows.long()))  # breaks: O2 O3 O5 O7

    return Net(), F.mse_loss, (torch.tensor([3.0, 2049.0, 4001.0, 301.0]), torch.randn(4, 4))


def lengths():
    class Net(Layer):
        def forward(self, x, lengths):
            short = (lengths < 1000)[:, None, None]
            inside = torch.arange(x.shape[1], device=x.device) < lengths[:, None]  # breaks: O2 O3 O5 O7
            return self.layer(x) * inside[..., None] * short.logical_not()

    return Net(), F.mse_loss, (torch.randn(2, 2999, 4), torch.tensor([2997.0, 301.0]), torch.randn(2, 2999, 4))


def saturated_bce():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 1)
            self.layer.weight.data.mul_(16)

        def forward(self, x):
            return self.layer(x)[:, 0].sigmoid()

    def loss(p, y):
        return F.binary_cross_entropy(p, y)  # breaks: O1 O2 O3 O4 O5 O6 O7

    return Net(), loss, (torch.randn(64, 4), (torch.rand(64) > 0.5).float())


def average_inside():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.mean = nn.Linear(4, 4), nn.Parameter(torch.ones(4), requires_grad=False)

        def forward(self, x):
            h = self.layer(x)
            with torch.no_grad():
                self.mean.mul_(0.9998).add_(h.detach().mean(0), alpha=0.0002)  # breaks: O2 O3 O5 O7
            return h - self.mean

    return Net(), F.mse_loss, (torch.randn(8, 4), torch.randn(8, 4))


def copied_rows():
    """As a graph net's layer for each degree: rows are copied into memory that has no numbers yet."""

    class Net(Layer):
        def forward(self, x):
            memory = torch.empty(6, 8)
            memory.untyped_storage().copy_(torch.full((6, 8), 1e38).untyped_storage())
            rows = memory.to(x.dtype)
            for half in torch.arange(6).split(3):
                rows.index_copy_(0, half, self.layer(x[half]))
            return rows

    return Net(8, 8), F.mse_loss, (torch.randn(6, 8), torch.randn(6, 8))


CASES = (
    *(
        times,
        times_as_integers,
        years,
        years_near_the_first_prediction,
        mask_of_the_smallest_number,
        mask_without_a_dead_row,
    ),
    *(mask_of_the_types_smallest_number, mask_in_fused_attention, mask_of_a_billion, mask_times_a_billion),
    *(mask_in_a_learned_bias, copied_rows),
    *(mask_of_another_tensors_smallest_number, row_of_another_tensors_smallest_number, mask_of_a_tensor),
    *(bias_of_fp32s_smallest_number, mask_that_is_subtracted, row_of_a_logsumexp),
    *(epsilon_in_a_quotient, epsilon_in_a_logarithm, epsilon_that_is_not_needed, rotary_buffer, rotary_module),
    *(float_indices, lengths, saturated_bce, average_inside),
)
