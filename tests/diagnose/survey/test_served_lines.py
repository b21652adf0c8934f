"""Lines that `run` and `compare` serve: notes in the survey of an unedited script, and its levels train as FP32."""

from __future__ import annotations

import copy
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amp_patch import amp
from amp_patch.diagnose.survey.first_step import FirstStepOver
from amp_patch.run.check_run import SurveyedScript
from amp_patch.run.unedited.script import UneditedScript


class Net(nn.Module):
    def __init__(self, size=1.0):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.layer.weight.data.mul_(size)

    def forward(self, x):
        return self.layer(x)


def array_of_outputs():
    def loss(output, y):
        output.detach().numpy().mean()
        return F.mse_loss(output, y)

    return Net(), loss


def array_inside():
    class Own(Net):
        def forward(self, x):
            h = self.layer(x)
            return h + torch.from_numpy(0.1 * h.detach().numpy())

    return Own(), F.mse_loss


def places_of_fp32():
    class Own(Net):
        def forward(self, x):
            return self.layer(x + torch.arange(4.0))

    return Own(), F.mse_loss


def queries_of_fp32():
    class Own(Net):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2)

        def forward(self, x):
            return self.attention(torch.ones(8, 1, 4), x[:, None], x[:, None])[0][:, 0] + self.layer(x)

    return Own(), F.mse_loss


def pairs_of_fp32():
    class Own(Net):
        def forward(self, x):
            return torch.complex(self.layer(x), torch.zeros(8, 4)).real

    return Own(), F.mse_loss


def inverse():
    class Own(Net):
        def forward(self, x):
            return torch.linalg.inv(self.layer(x).T @ x + 9 * torch.eye(4, dtype=x.dtype)).sum(0).expand(8, 4)

    return Own(), F.mse_loss


def probabilities_of_a_sigmoid():
    return Net(16.0), lambda output, y: F.binary_cross_entropy(torch.sigmoid(output).view(-1), y.view(-1))


def probabilities_of_a_model():
    return nn.Sequential(Net(16.0), nn.Sigmoid()), lambda output, y: F.binary_cross_entropy(output.view(-1), y.view(-1))


def probabilities_of_a_tangent():
    return Net(16.0), lambda output, y: F.binary_cross_entropy(0.5 * (1 + output.tanh()), y)


def average_of_weights():
    class Own(Net):
        def __init__(self):
            super().__init__()
            self.average = copy.deepcopy(self.layer).requires_grad_(False)
            self.average.weight.data.add_(0.1)

        def forward(self, x):
            with torch.no_grad():
                for mean, new in zip(self.average.parameters(), self.layer.parameters(), strict=True):
                    mean.lerp_(new, 0.001)
            return self.layer(x) - 5 * self.average(x)

    return Own(), F.mse_loss


def average_that_the_optimizer_holds():
    model, loss_fn = average_of_weights()
    return model, loss_fn, model.parameters()


def frozen_average_of_outputs():
    model, loss_fn = average_of_outputs()
    del model.mean
    model.mean = nn.Parameter(torch.ones(4), requires_grad=False)
    return model, loss_fn, model.parameters()


def average_of_outputs():
    class Own(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.ones(4))

        def forward(self, x):
            h = self.layer(x)
            self.mean.mul_(0.9998).add_(h.detach().mean(0), alpha=0.0002)
            return h - self.mean

    return Own(), F.mse_loss


FUNCTIONS, MODELS = ["O1", "O4", "O6"], ["O2", "O3", "O5", "O7"]
CASES = {  # case -> levels of its served lines, and of its other lines
    array_of_outputs: (["O4", "O6"], []),
    array_inside: (["O4", "O5", "O6", "O7"], []),
    places_of_fp32: (MODELS, []),
    queries_of_fp32: (MODELS, []),
    pairs_of_fp32: (["O2", "O3"], ["O5", "O7"]),
    inverse: ([], MODELS),
    probabilities_of_a_sigmoid: (FUNCTIONS, []),
    probabilities_of_a_model: (FUNCTIONS, MODELS),
    probabilities_of_a_tangent: ([], FUNCTIONS),
    average_of_weights: (["O5", "O7"], []),
    average_of_outputs: ([], MODELS),
    average_that_the_optimizer_holds: (["O5", "O7"], []),
    frozen_average_of_outputs: ([], MODELS),
}


def trained(case, steps=12):
    """Train a case as a script that knows torch alone. Return its last losses."""
    torch.manual_seed(0)
    model, loss_fn, *held = case()
    x, y = torch.randn(8, 4), torch.rand(8, 4)
    params = held[0] if held else [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.SGD(params, lr=0.01), []
    for _ in range(steps):
        loss = loss_fn(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[-3:]


def by_served(report):
    served = {level for line in report.lines if line.served for level in line.levels}
    return sorted(served), sorted({level for line in report.lines if not line.served for level in line.levels})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_served_line_of_an_unedited_script_breaks_no_level(case, recwarn):
    with SurveyedScript() as first, suppress(FirstStepOver):
        trained(case)
    first.measure()
    assert by_served(first.report) == CASES[case], str(first.report)
    assert first.report.broken == CASES[case][1]
    assert all(line.breaks is not line.served for line in first.report.lines)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_same_line_breaks_a_script_that_calls_initialize(case):
    torch.manual_seed(0)
    model, loss_fn, *_ = case()
    report = amp.survey(model, loss_fn, (torch.randn(8, 4), torch.rand(8, 4)), measure=False)
    assert by_served(report) == CASES[case], str(report)
    assert report.broken == sorted(CASES[case][0] + CASES[case][1])


@pytest.mark.filterwarnings("ignore:.* 0 or 1")
@pytest.mark.parametrize(("case", "level"), [
    *((case, level) for case, (served, _) in CASES.items() for level in ("O4", "O5") if level in served),
    (pairs_of_fp32, "O3"),
], ids=lambda value: value if isinstance(value, str) else value.__name__)  # fmt: skip
def test_a_served_line_trains_as_fp32(case, level):
    exact = trained(case)
    with UneditedScript(level):
        assert trained(case) == pytest.approx(exact, rel=0.02)
    amp.restore()


@pytest.mark.parametrize(("case", "level"), [
    (pairs_of_fp32, "O5"),
    (inverse, "O2"),
    (probabilities_of_a_tangent, "O4"),
], ids=lambda value: value if isinstance(value, str) else value.__name__)  # fmt: skip
def test_a_line_that_is_served_in_part_does_not_train_as_fp32(case, level):
    exact = trained(case)
    with UneditedScript(level), suppress(RuntimeError):
        assert trained(case) != pytest.approx(exact, rel=0.1)
    amp.restore()
