"""Small trainings that break at some levels by functions and libraries; as in survey_cases.py."""

from __future__ import annotations

import warnings

import torch
from survey_cases import Layer
from torch import nn
from torch.nn import functional as F


def linear_algebra():
    class Net(Layer):
        def forward(self, x):
            m = self.layer(x).view(-1, 4, 4)
            return torch.linalg.inv(m @ m.mT + torch.eye(4, dtype=m.dtype, device=m.device))  # breaks: O2 O3 O5 O7

    return Net(4, 16), F.mse_loss, (torch.randn(8, 4), torch.randn(8, 4, 4))


def ctc():
    class Net(Layer):
        def forward(self, x, y):
            inputs, targets = torch.full((2,), 12), torch.full((2,), 3)
            return F.ctc_loss(self.layer(x).log_softmax(-1), y, inputs, targets)  # breaks: O2 O3 O5 O7

    return Net(4, 5), lambda loss: loss, (torch.randn(12, 2, 4), torch.randint(1, 5, (2, 3)))


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

    class Net(Layer):
        def forward(self, x):
            return Cube.apply(self.layer(x))  # breaks: O2 O3 O5 O7

    return Net(), F.mse_loss, (torch.randn(8, 4), torch.randn(8, 4))


def autocast_to_fp32():
    class Net(Layer):
        def forward(self, x):
            h = self.layer(x)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a CPU's autocast takes no FP32: it is off then
                region = torch.autocast(x.device.type, dtype=torch.float32)
            with region:  # breaks: O1 O2 O3 O4 O5 O6 O7
                return h * h.exp()

    return Net(), F.mse_loss, (torch.randn(8, 4), torch.randn(8, 4))


def spectrogram():
    class Net(Layer):
        def forward(self, x):
            return self.layer(torch.fft.rfft(x).abs())  # breaks: O2 O3 O5 O7

    return Net(16, 4), F.mse_loss, (torch.randn(8, 30), torch.randn(8, 4))


def categorical_of_many():
    class Net(Layer):
        def forward(self, x):
            policy = torch.distributions.Categorical(self.layer(x).softmax(-1))
            return policy.log_prob(torch.arange(len(x), device=x.device))  # off: O2 O3 O5 O7

    return Net(4, 1000), F.mse_loss, (torch.randn(8, 4), torch.zeros(8))


def categorical_of_few():
    class Net(Layer):
        def forward(self, x):
            return torch.distributions.Categorical(self.layer(x).softmax(-1)).log_prob(torch.arange(6, device=x.device))

    return Net(4, 6), F.mse_loss, (torch.randn(6, 4), torch.zeros(6))


def categorical_of_logits():
    class Net(Layer):
        def forward(self, x):
            return torch.distributions.Categorical(logits=self.layer(x)).log_prob(torch.arange(len(x), device=x.device))

    return Net(4, 1000), F.mse_loss, (torch.randn(8, 4), torch.zeros(8))


def matrix_exponential():
    class Net(Layer):
        def forward(self, x):
            m = self.layer(x).view(-1, 4, 4)
            return torch.matrix_exp(m - m.mT)

    return Net(4, 16), F.mse_loss, (torch.randn(8, 4), torch.randn(8, 4, 4))


def large_matrix_exponential():
    class Net(Layer):
        def forward(self, x):
            m = self.layer(x).view(-1, 4, 4) + 12 * torch.eye(4, dtype=x.dtype, device=x.device)
            return torch.matrix_exp(m).log()  # breaks: O2 O3

    return Net(4, 16), lambda y, target: y.nan_to_num().square().mean(), (torch.randn(8, 4) / 4, torch.randn(8, 4, 4))


def numpy_of_outputs():
    def loss(outputs, targets):
        outputs.detach().cpu().numpy().mean()  # breaks: O4 O6
        return F.mse_loss(outputs, targets)

    return nn.Sequential(nn.Linear(4, 4)), loss, (torch.randn(8, 4), torch.randn(8, 4))


def loss_inside():
    class Net(Layer):
        def forward(self, x, y):
            return F.cross_entropy(self.layer(x), y)

    return Net(4, 5), lambda loss: loss, (torch.randn(64, 4), torch.randint(0, 5, (64,)))


def low_temperature():
    class Net(Layer):
        def forward(self, x):
            logits = self.layer(x) / 1e-4
            return logits.softmax(-1)  # breaks: O1 O2 O3 O4 O5 O6 O7

    return Net(4, 5), F.mse_loss, (torch.randn(8, 4), torch.randn(8, 5).softmax(-1))


def norm_of_small_variances():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm, self.head = nn.Linear(4, 4), nn.BatchNorm1d(4, eps=1e-12), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.norm(self.layer(x)))  # breaks: O1 O2 O3 O4 O5 O6 O7

    return Net(), F.mse_loss, (torch.randn(32, 4) * 6e-5, torch.randn(32, 2))


def norm_of_equal_numbers():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.token = nn.Parameter(torch.zeros(1, 4))
            self.norm, self.head = nn.LayerNorm(4, eps=1e-12), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.norm(torch.cat([self.token, x])))  # off: O2 O3

    return Net(), F.mse_loss, (torch.randn(7, 4), torch.randn(8, 2))


def norm_of_equal_numbers_with_a_larger_eps():
    model, loss, batch = norm_of_equal_numbers()
    model.norm.eps = 1e-5
    return model, loss, batch


def norm_of_small_numbers():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(4, eps=1e-12), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.norm(x))

    return Net(), F.mse_loss, (torch.randn(32, 4) * 3e-5, torch.randn(32, 2))


def squares():
    class Net(Layer):
        def forward(self, x):
            h = self.layer(x)
            return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)  # breaks: O1 O2 O3

    return Net(), F.mse_loss, (torch.randn(8, 4) * 2000, torch.randn(8, 4))


def large_inputs():
    class Net(Layer):
        def forward(self, x):
            return self.layer(torch.log1p(x) / 14)

    return Net(), F.mse_loss, (torch.rand(8, 4) * 1e6 + 1e5, torch.randn(8, 4))


def small_gradients():
    class Net(Layer):
        def forward(self, x):
            return self.layer(x)  # breaks: O3

    return Net(), lambda y, target: F.mse_loss(y, target) * 1e-6, (torch.randn(64, 4), torch.randn(64, 4))


def mixed_types():
    class Net(Layer):
        def forward(self, x):
            return self.layer(x + torch.arange(4.0, device=x.device))  # breaks: O2 O3 O5 O7

    return Net(), F.mse_loss, (torch.randn(8, 4), torch.randn(8, 4))


def fp32_that_stays():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.head(self.layer(x).float().exp())  # breaks: O2 O3 O5 O7

    return Net(), F.mse_loss, (torch.randn(8, 4), torch.randn(8, 4))


def fp32_that_is_converted_back():
    """A branch that an FP32 step does not take converts the numbers back."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            h = self.layer(x)
            wide = h.float().exp()
            if h.dtype is not torch.float32:
                wide = wide.to(h.dtype)
            return self.head(wide)

    return Net(), F.mse_loss, (torch.randn(8, 4), torch.randn(8, 4))


def small_products():
    class Net(Layer):
        def forward(self, x):
            h = self.layer(x) * 1e-9  # off: O1 O2 O3
            return h.relu() * 1e9

    return Net(), F.mse_loss, (torch.randn(8, 4), torch.randn(8, 4))


FUNCTION_CASES = (
    *(linear_algebra, ctc, custom_fwd, autocast_to_fp32, matrix_exponential, large_matrix_exponential),
    *(numpy_of_outputs, loss_inside, low_temperature, norm_of_small_variances, norm_of_small_numbers, squares),
    *(norm_of_equal_numbers, norm_of_equal_numbers_with_a_larger_eps),
    *(spectrogram, categorical_of_many, categorical_of_few, categorical_of_logits),
    *(small_gradients, mixed_types, fp32_that_stays, small_products),
)
