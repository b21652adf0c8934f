"""Formulas that low precision breaks, each with a healthy twin: the same task, by a formula that keeps its digits.

Each function takes whether the model is the healthy twin, and returns (model, loss_fn, inputs) as `amp.survey` takes
them. A comment `# off: O4 O5` marks a line that the measurement names at these levels, as in measured_cases.py. No rule
of the survey knows these kinds of lines.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from amp_patch import amp


class Formula(nn.Module):
    """A linear layer with a formula behind it: `broken`, or `sound` in the healthy twin."""

    def __init__(self, healthy: bool, inputs: int = 8, outputs: int = 8) -> None:
        super().__init__()
        self.layer, self.healthy = nn.Linear(inputs, outputs), healthy

    def forward(self, *given):
        return self.sound(*given) if self.healthy else self.broken(*given)


def preferences(healthy):
    """As DPO: sums of log-probabilities of two answers that share most of their tokens. Their difference counts."""

    class Net(Formula):
        def broken(self, x, tokens):
            likelihoods = self.layer(x).log_softmax(-1).gather(-1, tokens[..., None])
            total = likelihoods.sum((1, 2)).to(likelihoods.dtype)  # off: O2 O5
            return total[::2] - total[1::2]

        def sound(self, x, tokens):
            likelihoods = self.layer(x).float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
            return (likelihoods[::2] - likelihoods[1::2]).sum(1)

    x, tokens = torch.randn(8, 200, 8).repeat_interleave(2, 0), torch.randint(0, 8, (8, 200)).repeat_interleave(2, 0)
    tokens[1::2, -4:] = 7 - tokens[1::2, -4:]
    return Net(healthy), lambda out: -F.logsigmoid(out).sum(), (x, tokens)


def discretized_logistic(healthy):
    """The logarithm of a difference of two distribution functions: the probability of one of 256 values."""

    class Net(Formula):
        def broken(self, x):
            h = self.layer(x)  # off: O1 O2 O4 O5
            above, below = (h + 0.004).sigmoid(), (h - 0.004).sigmoid()  # off: O1 O2 O4 O5
            return (above - below).clamp(min=1e-5).log()

        def sound(self, x):
            h = self.layer(x)
            return h - 2 * F.softplus(h) + math.log(0.008)

    return Net(healthy), lambda out: -out.mean(), torch.randn(16, 8)


def variance_by_squares(healthy):
    class Net(Formula):
        def broken(self, x):
            h = self.layer(x) + 12
            variance = h.square().mean(-1) - h.mean(-1).square()  # off: O1 O2 O4 O5
            return variance

        def sound(self, x):
            return self.layer(x).var(-1, correction=0)

    return Net(healthy, 8, 64), F.mse_loss, (torch.randn(16, 8), torch.randn(16))


def expanded_distances(healthy):
    """Distances to a codebook around a point that is far from 0, by |a|^2 - 2ab + |b|^2."""

    class Net(Formula):
        def __init__(self, healthy):
            super().__init__(healthy)
            self.codes = nn.Parameter(torch.randn(6, 8))

        def broken(self, x):
            a, b = self.layer(x) + 20, self.codes + 20  # off: O5
            squares = a.square().sum(-1, keepdim=True) - 2 * a @ b.T + b.square().sum(-1)  # off: O1 O2 O4 O5
            return (-squares).exp()

        def sound(self, x):
            return (-(self.layer(x)[:, None] - self.codes).square().mean(-1)).exp()

    return Net(healthy), F.mse_loss, (torch.randn(16, 8), torch.rand(16, 6))


def running_mean(healthy):
    """A mean that each of many samples moves by less than a step."""

    class Net(Formula):
        def broken(self, x):
            h = self.layer(x) + 3
            mean = h[:, 0]
            for count in range(1, h.shape[1]):
                mean = mean + (h[:, count] - mean) / (count + 1)  # off: O1 O2 O4 O5
            return mean - 3

        def sound(self, x):
            return self.layer(x).mean(1)

    return Net(healthy), F.mse_loss, (torch.randn(4, 300, 8), torch.randn(4, 8))


def rotations(healthy):
    """A quaternion that many small rotations turn, and that is normalized after each."""

    class Net(Formula):
        def broken(self, x):
            return self.turned(self.layer(x), 100)

        def sound(self, x):
            return self.turned(self.layer(x), 2)

        def turned(self, rates, steps):
            q = torch.ones_like(rates)
            for _ in range(steps):
                q = F.normalize(q + 0.5 / steps * rates.roll(1, -1) * q.flip(-1), dim=-1)  # off: O2 O5
            return q

    return Net(healthy, 8, 4), F.mse_loss, (torch.randn(16, 8), torch.randn(16, 4))


def positions_in_their_type(healthy):
    """As rotary embeddings: positions above 256 that are made in the type of the activations."""

    class Net(Formula):
        def broken(self, x):
            h = self.layer(x)
            return self.turned(h, torch.arange(x.shape[1], device=x.device).to(h.dtype))  # off: O4 O5

        def sound(self, x):
            return self.turned(self.layer(x), torch.arange(x.shape[1], device=x.device).float())

        def turned(self, h, places):
            angles = places[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001], device=h.device)
            one, other = h.chunk(2, -1)
            return (one.float() * angles.cos() - other.float() * angles.sin()).sum(1)

    return Net(healthy), F.mse_loss, (torch.randn(2, 900, 8), torch.randn(2, 4))


def selective_scan(healthy):
    """As Mamba: the decay exp(step * a) of a state is so near to 1 that it is rounded to 1."""

    class Net(Formula):
        def __init__(self, healthy):
            super().__init__(healthy)
            self.rates = nn.Parameter(torch.linspace(-1.0, -0.2, 8))

        def broken(self, x):
            return self.scanned((0.002 * self.rates).exp(), self.layer(x))  # off: O5

        def sound(self, x):
            return self.scanned(self.rates.exp(), self.layer(x))

        def scanned(self, decay, h):
            state = torch.zeros_like(h[:, 0])
            for at in range(h.shape[1]):
                state = decay * state + h[:, at]
            return state

    return Net(healthy), lambda out, y: F.mse_loss(out / 10, y), (torch.randn(4, 150, 8) + 1, torch.randn(4, 8))


def segment_sums(healthy):
    """Decays between positions, by differences of a cumulative sum over a long sequence."""

    class Net(Formula):
        def broken(self, x):
            rates = F.softplus(self.layer(x))
            total = rates.cumsum(1).to(self.layer.weight.dtype)  # off: O2 O5
            return (total[:, :-4] - total[:, 4:]).exp()

        def sound(self, x):
            rates = F.softplus(self.layer(x))
            return (-rates.unfold(1, 4, 1).sum(-1)[:, 1:]).exp()

    return Net(healthy), lambda out: out.square().mean(), torch.randn(2, 400, 8)


def planes(healthy):
    """A lookup between the pixels of a plane, by hand: the fraction of a large coordinate."""

    class Net(Formula):
        def __init__(self, healthy):
            super().__init__(healthy)
            self.plane = nn.Parameter(torch.randn(200, 4))

        def broken(self, x):
            return self.looked_up(150 + self.layer(x))  # off: O1 O2 O4 O5

        def sound(self, x):
            return self.looked_up(1 + self.layer(x).sigmoid())

        def looked_up(self, places):
            first = places.floor()
            share = (places - first)[..., None]
            return torch.lerp(self.plane[first.long()].to(share), self.plane[first.long() + 1].to(share), share)

    return Net(healthy), F.mse_loss, (torch.randn(32, 8), torch.randn(32, 8, 4))


def whitening(healthy):
    """A root of a covariance by Newton and Schulz: its small eigenvalues drown in the large ones."""

    class Net(Formula):
        def broken(self, x):
            h = self.layer(x)  # off: O4 O5
            return self.whitened(h * torch.logspace(0, -1.5, 8, device=h.device, dtype=h.dtype))

        def sound(self, x):
            with amp.disable_casts():
                h = F.linear(x.float(), self.layer.weight.float(), self.layer.bias.float())
                return self.whitened(h * torch.logspace(0, -1.5, 8, device=h.device))

        def whitened(self, h):
            covariance = h.T @ h / len(h)
            eye = torch.eye(8, device=h.device, dtype=h.dtype)
            y, z = covariance / covariance.diagonal().sum(), eye
            for _ in range(12):
                t = 1.5 * eye - 0.5 * z @ y
                y, z = y @ t, t @ z
            return h @ z

    return Net(healthy), lambda out: out.pow(4).mean(), torch.randn(64, 8)


def advantages(healthy):
    """As in reinforcement learning: discounted sums of rewards minus the values that predict them."""

    class Net(Formula):
        def broken(self, x, rewards):
            h = self.layer(x)
            returns, total = [], h[:, -1] * 0
            for at in reversed(range(h.shape[1])):
                total = rewards[:, at, None].to(h.dtype) + 0.997 * total  # off: O1 O2 O4 O5
                returns.append(total)
            goal = torch.stack(returns[::-1], 1).detach()
            values = h + goal + 0.1  # off: O1 O2 O4 O5
            return goal - values

        def sound(self, x, rewards):
            return rewards[..., None] - self.layer(x)

    return Net(healthy), lambda out, _: out.square().mean(), (torch.randn(2, 200, 8), torch.ones(2, 200), torch.ones(1))


def covariance_update(healthy):
    """As a Kalman filter: a covariance minus almost all of itself."""

    class Net(Formula):
        def broken(self, x):
            p, noise = F.softplus(self.layer(x)).chunk(2, -1)  # off: O2 O5
            noise = 0.003 * noise
            return p - p / (p + noise) * p  # off: O2 O5

        def sound(self, x):
            p, noise = F.softplus(self.layer(x)).chunk(2, -1)
            noise = 0.003 * noise
            return noise * p / (p + noise)

    return Net(healthy), lambda out, y: F.mse_loss(300 * out, y), (torch.randn(16, 8), torch.randn(16, 4))


FORMULAS = (
    *(preferences, discretized_logistic, variance_by_squares, expanded_distances, running_mean, rotations),
    *(positions_in_their_type, selective_scan, segment_sums, planes, whitening, advantages, covariance_update),
)
