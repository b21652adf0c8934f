"""Small trainings that are wrong at a level by a kind of line that no rule of the survey knows.

Each function returns (model, loss_fn, inputs) as `amp.survey` takes them. A comment `# off: O4 O5` marks the line that
the measurement names at these levels. It is the first line of a function if no single line mends the numbers.
"""

from __future__ import annotations

import torch
from survey_cases import Layer
from torch import nn
from torch.nn import functional as F


class Crf(nn.Module):
    """A linear chain: the score of a path is a small difference of two large sums."""

    def __init__(self):
        super().__init__()
        self.emit, self.moves = nn.Linear(8, 5), nn.Parameter(torch.randn(5, 5))

    def forward(self, x, tags):
        scores = self.emit(x) + 40
        total, path = scores[:, 0], scores[:, 0].gather(1, tags[:, :1])[:, 0]
        for at in range(1, x.shape[1]):
            total = (total[:, :, None] + self.moves).logsumexp(1) + scores[:, at]  # off: O2 O5
            step = scores[:, at].gather(1, tags[:, at : at + 1])[:, 0]
            path = path + self.moves[tags[:, at - 1], tags[:, at]] + step
        return (total.logsumexp(1) - path).mean()


def crf():
    return Crf(), lambda loss: loss, (torch.randn(8, 16, 8), torch.randint(0, 5, (8, 16)))


def decay():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("keep", torch.full((8,), 0.9985))

        def forward(self, x):
            h, state = self.layer(x), 0
            for at in range(x.shape[1]):
                state = self.keep * state + h[:, at]  # off: O5
            return state

    return Net(), lambda out, y: F.mse_loss(out.float() / 100, y), (1 + torch.randn(4, 200, 8), torch.randn(4, 8))


def linear_attention():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
            nn.init.constant_(self.k.bias, -9.0)

        def forward(self, x):
            q, k = F.elu(self.q(x)) + 1, F.elu(self.k(x)) + 1  # off: O1 O2 O4 O5
            mixed = q @ (k.transpose(1, 2) @ self.v(x))
            return mixed / (q @ k.sum(1)[:, :, None])

    return Net(), F.mse_loss, (torch.randn(4, 6, 8), torch.randn(4, 6, 8))


def moving_average():
    class Net(Layer):
        def forward(self, x):
            sums = (self.layer(x) + 3).cumsum(1)  # off: O2 O5
            return (sums[:, 8:] - sums[:, :-8]) / 8 - 3

    return Net(), F.mse_loss, (torch.randn(4, 600, 4), torch.randn(4, 592, 4))


def near_pairs():
    """Two views that hardly differ: one minus their cosine is below a step of BF16."""

    class Net(Layer):
        def forward(self, x):
            one, other = self.layer(x), self.layer(x + 0.02 * x.roll(1, 0))  # off: O5
            return 1 - F.cosine_similarity(one, other, dim=-1)  # off: O2

    return Net(16, 16), lambda out: out.mean(), (torch.randn(16, 16),)


def slopes():
    """A derivative by a difference of two forwards."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))

        def forward(self, x):
            return (self.net(x + 1e-3) - self.net(x)) / 1e-3

    return Net(), F.mse_loss, (torch.randn(32, 2), torch.randn(32, 1))


def transmittance():
    """As volume rendering: a product of numbers just below one."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.density = nn.Linear(8, 1)

        def forward(self, x):
            alpha = 1e-3 * self.density(x)[..., 0].sigmoid()
            return 1 - (1 - alpha).cumprod(1)[:, -1]  # off: O1 O2 O4 O5

    return Net(), lambda out, y: F.mse_loss(100 * out, y), (torch.randn(8, 64, 8), 3 * torch.rand(8))


def far_positions():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(1, 16), nn.SiLU(), nn.Linear(16, 1))

        def forward(self, places):
            gaps = places[:, :, None] - places[:, None]  # off: O2 O5
            return self.layer(gaps.square().sum(-1, keepdim=True)).sum((1, 2))

    return Net(), F.mse_loss, (300 + torch.rand(8, 6, 3), torch.randn(8, 1))


def fine_quantizer():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.out = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x):
            h = self.layer(x) + 8  # off: O1 O2
            return self.out(32 * (h * 64 - (h * 64).floor()))

    return Net(), F.mse_loss, (torch.randn(32, 8), torch.randn(32, 4))


def residual_of_a_solver():
    """Many relaxations, each of which changes little: they stand still in low precision."""

    class Net(Layer):
        def forward(self, x):
            goal, state = self.layer(x) + 4, torch.zeros_like(x)  # off: O4 O5
            for _ in range(150):
                state = state + 0.01 * (goal - state)
            return state

    return Net(8, 8), F.mse_loss, (torch.randn(8, 8), torch.randn(8, 8))


def loss_of_a_ratio():
    """A loss whose terms nearly cancel, in a function of its own."""

    def loss(out, target):
        ratio = (out - target).exp()  # off: O4
        return ((ratio - 1) - (out - target)).mean() * 1e4

    model = nn.Linear(8, 1)
    nn.init.normal_(model.weight, std=3e-3), nn.init.zeros_(model.bias)
    return model, loss, (torch.randn(64, 8), torch.zeros(64, 1))


def teacher_inside():
    """An average of the weights in a parameter that is not trained stands still in low precision."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.center = nn.Parameter(torch.ones(8), requires_grad=False)

        def forward(self, x):  # off: O2 O5
            out = self.layer(x)
            with torch.no_grad():
                self.center.data = self.center.data * 0.9999 + out.mean(0).to(self.center.dtype) * 0.0001
            return out - self.center

    return Net(), F.mse_loss, (torch.randn(8, 8), torch.randn(8, 8))


def load_of_experts():
    """A bias of experts that a hook of the backward moves by less than a step of the type."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.out = nn.Linear(8, 4), nn.Linear(4, 4)
            self.register_buffer("bias", torch.full((4,), 2.0))

        def forward(self, x):  # off: O2 O5
            h = (self.gate(x) + self.bias).softmax(-1)
            if h.requires_grad:
                h.register_hook(self.balance)
            return self.out(h)

        def balance(self, grad):
            with torch.no_grad():
                self.bias += 1e-4 * torch.tensor([1, -1, 1, -1], dtype=self.bias.dtype)

    return Net(), F.mse_loss, (torch.randn(8, 8), torch.randn(8, 4))


def determinant_by_hand():
    class Net(Layer):
        def forward(self, x):
            a, b, c, d = (1 + 0.02 * self.layer(x)).unbind(-1)  # off: O4 O5
            return (a * d - b * c)[:, None]

    return Net(), lambda out, y: F.mse_loss(50 * out, y), (torch.randn(64, 4), torch.randn(64, 1))


def softmin_of_energies():
    class Net(Layer):
        def forward(self, x):
            energy = 900 + self.layer(x)  # off: O1 O2 O4 O5
            return (-energy).softmax(-1) - torch.eye(6, device=x.device, dtype=energy.dtype)[0]

    return Net(8, 6), F.mse_loss, (torch.randn(16, 8), torch.randn(16, 6))


def residual_stream():
    """Activations around a large number, whose differences a norm takes."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.out = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

        def forward(self, x):
            h = 500 + self.first(x)  # off: O1 O4
            return self.out(self.norm(h))

    return Net(), F.mse_loss, (torch.randn(32, 8), torch.randn(32, 4))


def product_of_many():
    """A product whose factors are ordinary numbers, and which is below the smallest one of FP16."""

    class Net(Layer):
        def forward(self, x):
            likelihoods = self.layer(x).sigmoid()
            return likelihoods.prod(-1) * 1e9  # off: O2

    return Net(8, 32), F.mse_loss, (torch.randn(16, 8), torch.randn(16))


CASES = (
    *(crf, decay, linear_attention, moving_average, near_pairs, transmittance, far_positions, fine_quantizer),
    *(residual_of_a_solver, loss_of_a_ratio, teacher_inside, load_of_experts, determinant_by_hand),
    *(softmin_of_energies, residual_stream, product_of_many),
)
