"""Small trainings that break at some levels by sums, differences and pixels; as in survey_cases.py."""

from __future__ import annotations

import warnings

import torch
from survey_cases import Layer
from torch import nn
from torch.nn import functional as F


class Averaging(Layer):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(4))


def variance_as_a_difference():
    class Net(Layer):
        def forward(self, x):
            h = self.layer(x) + 30  # off: O1 O2 O3 O4 O5 O6 O7
            mean = h.mean(-1, keepdim=True)
            variance = h.square().mean(-1, keepdim=True) - mean * mean  # off: O1 O2 O3 O4 O5 O6 O7
            return (h - mean) / (variance.clamp(min=0) + 1e-3).sqrt()

    return Net(8, 8), F.mse_loss, (torch.randn(16, 8), torch.randn(16, 8))


def variance_of_fp32():
    class Net(Layer):
        def forward(self, x):
            h = self.layer(x).float() + 2
            mean = h.mean(-1, keepdim=True)
            return (h - mean) / (h.square().mean(-1, keepdim=True) - mean * mean + 1e-3).sqrt()

    return Net(8, 8), F.mse_loss, (torch.randn(16, 8), torch.randn(16, 8))


def logarithm_of_one_minus_x():
    class Net(Layer):
        def forward(self, x):
            rest = 1 - torch.sigmoid(8 * self.layer(x))  # off: O1 O2 O3 O4 O5 O6 O7
            return -torch.log(rest + 1e-4)

    return Net(8, 8), F.mse_loss, (torch.randn(64, 8), torch.randn(64, 8))


def logarithm_of_one_minus_small_x():
    class Net(Layer):
        def forward(self, x):
            return -torch.log(1 - torch.sigmoid(self.layer(x)) + 1e-4)

    return Net(8, 8), F.mse_loss, (torch.randn(64, 8), torch.randn(64, 8))


def clamp_below_one():
    class Net(Layer):
        def forward(self, x):
            cosines = torch.cos(self.layer(x)).clamp(-1 + 1e-6, 1 - 1e-6)  # off: O1 O2 O3 O4 O5 O6 O7
            return torch.acos(cosines)  # off: O1 O2 O3 O4 O5 O6 O7

    return Net(8, 8), F.mse_loss, (torch.randn(64, 8), torch.randn(64, 8))


def logarithm_of_minus_x():
    class Net(Layer):
        def forward(self, x):
            below = torch.sigmoid(9 * self.layer(x)).clamp(max=0.999999)  # off: O1 O2 O3 O4 O5 O6 O7
            return -torch.log1p(-below)  # off: O1 O2 O3 O4 O5 O6 O7

    return Net(8, 8), F.mse_loss, (torch.randn(64, 8), torch.randn(64, 8))


def clamp_of_fp32():
    class Net(Layer):
        def forward(self, x):
            return torch.acos(torch.cos(self.layer(x).float() + 1).clamp(-0.99, 0.99))

    return Net(8, 8), F.mse_loss, (torch.randn(64, 8), torch.randn(64, 8))


def total_of_a_loop():
    class Net(Layer):
        def forward(self, x):
            total = 0.0
            for step in range(2500):
                total = total + self.layer(x[step % 8]).square().mean()  # off: O1 O2 O3 O4 O5 O6 O7
            return total / 2500

    return Net(), lambda loss, scale: scale[0] * loss.float(), (torch.randn(8, 4), torch.ones(1))


def total_of_a_short_loop():
    class Net(Layer):
        def forward(self, x):
            total = 0.0
            for row in x:
                total = total + self.layer(row).square().mean()
            return total[None] / len(x)

    return Net(), F.mse_loss, (torch.randn(64, 4), torch.zeros(1))


def hours_of_seconds():
    class Net(Layer):
        def forward(self, x, seconds):
            hour = seconds % 24  # off: O2 O3 O5 O7
            return self.layer(torch.stack([x, hour / 24], -1))

    seconds = torch.arange(50000.25, 50032.0)
    return Net(2, 4), F.mse_loss, (torch.randn(32), seconds, ((seconds % 24) / 24)[:, None].expand(-1, 4))


def hours_between_times():
    class Net(Layer):
        def forward(self, x, t):
            since = torch.diff(t, prepend=t[:1])  # off: O2 O3 O5 O7
            return self.layer(torch.stack([x, since], -1))

    t = torch.cumsum(torch.rand(64), 0) + 5000
    return Net(2, 4), F.mse_loss, (torch.randn(64), t, torch.diff(t, prepend=t[:1])[:, None].expand(-1, 4))


def standard_deviation():
    class Net(Layer):
        def forward(self, x):
            h = self.layer(x) + 700  # off: O1 O2 O3 O4 O5 O6 O7
            spread, mean = torch.std_mean(h, dim=-1, keepdim=True)  # off: O1 O2 O3 O4 O5 O6 O7
            return (h - mean) / (spread + 1e-3)

    return Net(8, 8), F.mse_loss, (torch.randn(16, 8), torch.randn(16, 8))


def standard_deviation_of_small_numbers():
    class Net(Layer):
        def forward(self, x):
            h = self.layer(x)
            return (h - h.mean(-1, keepdim=True)) / (h.std(dim=(-1,), keepdim=True) + 1e-3)

    return Net(8, 8), F.mse_loss, (torch.randn(16, 8), torch.randn(16, 8))


def times_from_the_first():
    class Net(Layer):
        def forward(self, x, t):
            since = t - t[:1]
            return self.layer(torch.stack([x, since / 500], -1))

    t = torch.arange(0.25, 2000.0, 10.0)
    return Net(2, 4), F.mse_loss, (torch.randn(200), t, torch.randn(200, 4))


def average_that_is_assigned():
    class Net(Averaging):
        def forward(self, x):
            h = self.layer(x)
            self.mean = 0.9999 * self.mean + 0.0001 * h.detach().mean(0)  # breaks: O2 O3 O5 O7
            return h - self.mean

    return Net(), F.mse_loss, (torch.randn(8, 4), torch.randn(8, 4))


def average_that_is_assigned_in_fp32():
    class Net(Averaging):
        def forward(self, x):
            h = self.layer(x)
            self.mean = 0.9999 * self.mean.float() + 0.0001 * h.detach().float().mean(0)
            return h - self.mean.to(h.dtype)

    return Net(), F.mse_loss, (torch.randn(8, 4), torch.randn(8, 4))


def pixels():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv2d(1, 1, 1)

        def forward(self, image, grid):
            return F.grid_sample(self.layer(image), grid, align_corners=False)  # breaks: O5 O7

    return Net(), F.mse_loss, (torch.randn(1, 1, 170, 170), torch.rand(1, 9, 9, 2) * 2 - 1, torch.randn(1, 1, 9, 9))


def complex_numbers():
    class Net(Layer):
        def forward(self, x):
            h = self.layer(x)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of complex numbers in FP16, which are experimental
                return torch.complex(h[:, :2], h[:, 2:]).abs()  # breaks: O4 O5 O6 O7

    return Net(), F.mse_loss, (torch.randn(16, 4), torch.randn(16, 2))


def decay_by_hand():
    model = nn.Sequential(nn.Linear(8, 8))

    def loss(output, target):
        with torch.no_grad():
            model[0].weight.mul_(1 - 1e-4)  # breaks: O2 O3 O5 O7
        return F.mse_loss(output, target)

    return model, loss, (torch.randn(16, 8), torch.randn(16, 8))


def norm_by_hand():
    model = nn.Sequential(nn.Linear(8, 8))
    model[0].weight.data /= model[0].weight.data.norm()

    def loss(output, target):
        with torch.no_grad():
            model[0].weight.div_(model[0].weight.norm() * 0.9999)
        return F.mse_loss(output, target)

    return model, loss, (torch.randn(16, 8), torch.randn(16, 8))


def predictions_far_from_0():
    def loss(output, target):
        return F.mse_loss(output * 3 + 5000, target)  # breaks: O1 O4 O6

    return nn.Sequential(nn.Linear(4, 1)), loss, (torch.randn(64, 4), 5000 + 3 * torch.randn(64, 1))


def likelihoods_far_from_0():
    def loss(output, target):
        return F.gaussian_nll_loss(output * 3 + 5000, target, torch.ones_like(target))  # breaks: O1 O4 O6

    return nn.Sequential(nn.Linear(4, 1)), loss, (torch.randn(64, 4), 5000 + 3 * torch.randn(64, 1))


def hyperbolic_distance():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.points = nn.Parameter(torch.randn(16, 4) / 100)

        def forward(self, x):
            return torch.acosh(1 + 2 * (self.points - x).square().sum(-1) + 1e-7)  # off: O2 O3 O5 O7

    return Net(), F.mse_loss, (torch.randn(16, 4) / 100, torch.zeros(16))


def kernel_of_distances():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.centers = nn.Parameter(8 + torch.randn(8, 2))

        def forward(self, x):
            c = self.centers
            distances = (x * x).sum(-1, keepdim=True) + (c * c).sum(-1) - 2 * x @ c.T  # off: O1 O2 O3 O4 O5 O6 O7
            return torch.exp(-distances)

    return Net(), F.mse_loss, (8 + torch.randn(256, 2), torch.zeros(256, 8))


def kernel_of_small_distances():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.centers = nn.Parameter(torch.randn(8, 2) / 4)

        def forward(self, x):
            c = self.centers
            return torch.exp(2 * x @ c.T - (x * x).sum(-1, keepdim=True) - (c * c).sum(-1))

    return Net(), F.mse_loss, (torch.randn(64, 2) / 4, torch.zeros(64, 8))


def focal_loss():
    def loss(output, target):
        p = torch.where(target > 0, torch.sigmoid(output), 1 - torch.sigmoid(output))
        return (-(1 - p).square() * p.clamp(min=1e-3).log() - (1 - p).pow(2)).mean() * 100

    model = nn.Sequential(nn.Linear(8, 8))
    nn.init.constant_(model[0].bias, -6.0)
    return model, loss, (torch.randn(64, 8), torch.zeros(64, 8))


SUM_CASES = (
    *(variance_as_a_difference, variance_of_fp32, total_of_a_loop, total_of_a_short_loop, hours_of_seconds),
    *(logarithm_of_one_minus_x, logarithm_of_one_minus_small_x, logarithm_of_minus_x, clamp_below_one, clamp_of_fp32),
    *(hours_between_times, standard_deviation, standard_deviation_of_small_numbers),
    *(times_from_the_first, average_that_is_assigned, pixels, complex_numbers),
    *(predictions_far_from_0, likelihoods_far_from_0, hyperbolic_distance),
    *(kernel_of_distances, kernel_of_small_distances, decay_by_hand, norm_by_hand),
)


def norm_of_two_samples():
    """As EfficientNet with a batch of two: in a few channels the samples are alike."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm = nn.Linear(4, 16), nn.BatchNorm1d(16)

        def forward(self, x):
            return self.norm(self.layer(x))

    model, x = Net(), torch.randn(2, 4)
    with torch.no_grad():
        model.layer.bias[:3] = 4.0
        model.layer.weight[:3] = 1e-3
    return model, F.mse_loss, (x, torch.randn(2, 16))


SUM_CLEAN = (average_that_is_assigned_in_fp32, focal_loss, norm_of_two_samples)
