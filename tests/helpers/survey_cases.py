"""Small trainings that break at some levels: a comment in the line says at which.

Each function returns (model, loss_fn, inputs) as `amp.survey` takes them. A line without the comment breaks nowhere.
"""

from __future__ import annotations

import inspect
import math
import re
import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

FLOAT32 = torch.finfo(torch.float32)


def marked(case: Callable) -> dict[int, set[str]]:
    """The levels in the comments of a case, by the numbers of lines."""
    lines, first = inspect.getsourcelines(case)
    found = ((number, re.search(r"# breaks: ([O\d ]+)$", line.rstrip())) for number, line in enumerate(lines, first))
    return {number: set(match[1].split()) for number, match in found if match}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def scores(self, x):
        return self.q(x) @ self.k(x).transpose(-1, -2)


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
            angles = t[:, None] * self.frequencies
            sines = angles.sin()  # breaks: O5 O7
            return self.out(torch.cat([x, sines, angles.cos()], -1))  # breaks: O5 O7

    return Net(), F.mse_loss, (torch.randn(4, 4), torch.tensor([937.0, 11.0, 503.0, 999.0]), torch.randn(4, 4))


def times_as_integers():
    def embedding(t, width):
        frequencies = torch.exp(-math.log(1e4) * torch.arange(width // 2, dtype=torch.float32, device=t.device) / width)
        angles = t[:, None].float() * frequencies
        return torch.cat([angles.sin(), angles.cos()], -1)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.time, self.out = nn.Linear(16, 8), nn.Linear(12, 4)

        def forward(self, x, t):
            return self.out(torch.cat([x, self.time(embedding(t, 16).to(x.dtype))], -1))

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


def mask_of_the_smallest_number():
    class Net(Attention):
        def forward(self, x, mask):
            weights = (self.scores(x) + mask).softmax(-1)  # breaks: O2 O3 O5 O7
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


def mask_in_fused_attention():
    class Net(Attention):
        def forward(self, x, mask):
            q = self.q(x)
            return F.scaled_dot_product_attention(q, q, q, attn_mask=mask.to(q.dtype))  # breaks: O1 O2 O3 O4 O5 O6 O7

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
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            guarded = self.layer(x).relu() + 1e-8  # breaks: O1 O2 O3
            return guarded.log()

    return Net(), F.mse_loss, (torch.randn(8, 4), torch.randn(8, 4))


def epsilon_that_is_not_needed():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

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
            angles = torch.arange(x.shape[1], device=x.device)[:, None] * self.frequencies
            a, b = self.q(x).chunk(2, -1)
            c, s = angles.cos(), angles.sin()  # breaks: O2 O3 O5 O7
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


def linear_algebra():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 16)

        def forward(self, x):
            m = self.layer(x).view(-1, 4, 4)
            return torch.linalg.inv(m @ m.mT + torch.eye(4, dtype=m.dtype, device=m.device))  # breaks: O2 O3 O5 O7

    return Net(), F.mse_loss, (torch.randn(8, 4), torch.randn(8, 4, 4))


def ctc():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 5)

        def forward(self, x, y):
            inputs, targets = torch.full((2,), 12), torch.full((2,), 3)
            return F.ctc_loss(self.layer(x).log_softmax(-1), y, inputs, targets)  # breaks: O2 O3 O5 O7

    return Net(), lambda loss: loss, (torch.randn(12, 2, 4), torch.randint(1, 5, (2, 3)))


def custom_fwd():
    class Cube(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x * x

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return 3 * x * x * gradient

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return Cube.apply(self.layer(x))  # breaks: O2 O3 O5 O7

    return Net(), F.mse_loss, (torch.randn(8, 4), torch.randn(8, 4))


def autocast_to_fp32():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            h = self.layer(x)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a CPU's autocast takes no FP32: it is off then
                region = torch.autocast(x.device.type, dtype=torch.float32)
            with region:  # breaks: O1 O2 O3 O4 O5 O6 O7
                return h * h.exp()

    return Net(), F.mse_loss, (torch.randn(8, 4), torch.randn(8, 4))


def matrix_exponential():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 16)

        def forward(self, x):
            m = self.layer(x).view(-1, 4, 4)
            return torch.matrix_exp(m - m.mT)

    return Net(), F.mse_loss, (torch.randn(8, 4), torch.randn(8, 4, 4))


def large_matrix_exponential():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 16)

        def forward(self, x):
            m = self.layer(x).view(-1, 4, 4) + 12 * torch.eye(4, dtype=x.dtype, device=x.device)
            return torch.matrix_exp(m).log()  # breaks: O2 O3

    return Net(), lambda y, target: y.nan_to_num().square().mean(), (torch.randn(8, 4) / 4, torch.randn(8, 4, 4))


def numpy_of_outputs():
    def loss(outputs, targets):
        outputs.detach().cpu().numpy().mean()  # breaks: O4 O6
        return F.mse_loss(outputs, targets)

    return nn.Sequential(nn.Linear(4, 4)), loss, (torch.randn(8, 4), torch.randn(8, 4))


def loss_inside():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 5)

        def forward(self, x, y):
            return F.cross_entropy(self.layer(x), y)  # breaks: O5 O7

    return Net(), lambda loss: loss, (torch.randn(64, 4), torch.randint(0, 5, (64,)))


def low_temperature():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 5)

        def forward(self, x):
            logits = self.layer(x) / 1e-4
            return logits.softmax(-1)  # breaks: O1 O2 O3 O4 O5 O6 O7

    return Net(), F.mse_loss, (torch.randn(8, 4), torch.randn(8, 5).softmax(-1))


def norm_of_small_variances():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm, self.head = nn.Linear(4, 4), nn.BatchNorm1d(4, eps=1e-12), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.norm(self.layer(x)))  # breaks: O1 O2 O3 O4 O5 O6 O7

    return Net(), F.mse_loss, (torch.randn(32, 4) * 6e-5, torch.randn(32, 2))


def norm_of_small_numbers():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(4, eps=1e-12), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.norm(x))

    return Net(), F.mse_loss, (torch.randn(32, 4) * 3e-5, torch.randn(32, 2))


def squares():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            h = self.layer(x)
            return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)  # breaks: O1 O2 O3

    return Net(), F.mse_loss, (torch.randn(8, 4) * 2000, torch.randn(8, 4))


def large_inputs():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(torch.log1p(x) / 14)

    return Net(), F.mse_loss, (torch.rand(8, 4) * 1e6 + 1e5, torch.randn(8, 4))


def small_gradients():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x)  # breaks: O3

    return Net(), lambda y, target: F.mse_loss(y, target) * 1e-6, (torch.randn(64, 4), torch.randn(64, 4))


def mixed_types():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x + torch.arange(4.0, device=x.device))  # breaks: O2 O3 O5 O7

    return Net(), F.mse_loss, (torch.randn(8, 4), torch.randn(8, 4))


CASES = (
    *(times, times_as_integers, years, mask_of_the_smallest_number, mask_without_a_dead_row),
    *(mask_of_the_types_smallest_number, mask_in_fused_attention, mask_of_a_billion, mask_times_a_billion),
    *(epsilon_in_a_quotient, epsilon_in_a_logarithm, epsilon_that_is_not_needed, rotary_buffer, rotary_module),
    *(float_indices, saturated_bce, average_inside, linear_algebra, ctc, custom_fwd, autocast_to_fp32),
    *(matrix_exponential, large_matrix_exponential, numpy_of_outputs, loss_inside, low_temperature),
    *(norm_of_small_variances, norm_of_small_numbers, squares, small_gradients, mixed_types),
)


# ----------------------------------------------------------------------------------------------------------------------
# Trainings that break nowhere


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.drop = heads, nn.Dropout(0.1)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.first(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(w // self.heads)
        hidden = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        weights = self.drop(scores.masked_fill(hidden, float("-inf")).softmax(-1))
        x = x + self.out((weights @ v).transpose(1, 2).reshape(b, t, w))
        return x + self.mlp(self.second(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(64, 32), nn.Embedding(32, 32)
        self.blocks, self.norm = nn.Sequential(Block(32, 4), Block(32, 4)), nn.LayerNorm(32)
        self.head = nn.Linear(32, 64, bias=False)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(places))))


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.lstm, self.head = (
            nn.Embedding(64, 16),
            nn.LSTM(16, 32, 2, batch_first=True),
            nn.Linear(32, 64),
        )

    def forward(self, tokens):
        return self.head(self.lstm(self.tokens(tokens))[0])


def next_token(logits, tokens):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def mlp():
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10))
    return model, F.cross_entropy, (torch.randn(64, 20), torch.randint(0, 10, (64,)))


def cnn():
    first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
    second = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    model = nn.Sequential(first, second, nn.Flatten(), nn.Linear(32, 10))
    return model, F.cross_entropy, (torch.randn(8, 3, 16, 16), torch.randint(0, 10, (8,)))


def transformer():
    tokens = torch.randint(0, 64, (4, 32))
    return Transformer(), next_token, (tokens, tokens)


def lstm():
    tokens = torch.randint(0, 64, (4, 32))
    return Lstm(), next_token, (tokens, tokens)


def digits():
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    default = torch.get_default_device()
    return model, F.cross_entropy, (torch.tensor(images[:256]).float().to(default), torch.tensor(labels[:256]))


CLEAN = (mlp, cnn, transformer, lstm, digits)
