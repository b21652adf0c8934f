"""Steps of scripts that are measured: the loss is the script's own, outside of the model."""

from __future__ import annotations

import copy
from contextlib import suppress

import numpy as np
import pytest
import torch
from conftest import DEVICES
from survey_cases import marked
from torch import nn
from torch.nn import functional as F

from amp_patch import amp
from amp_patch.diagnose.survey.first_step import FirstStepOver
from amp_patch.run.check_run import SurveyedScript


def trained(model, loss_fn, batches, device, held=()):
    """Train as a script that knows torch alone. Return what the survey measures in the first step."""
    with SurveyedScript() as first, suppress(FirstStepOver):
        model.to(device)
        optimizer = torch.optim.SGD([*model.parameters(), *held], lr=0.0)
        for batch in batches:
            loss = loss_fn(model, *(each.to(device) for each in batch))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    first.measure()
    return first.report


def sum_of_log_probabilities():
    """Two policies that hardly differ: the difference of their sums counts."""
    net = nn.Linear(8, 6)

    def loss(model, x, y):
        scores = model(x) - 200  # off: O1 O4
        sums = scores.log_softmax(-1).gather(-1, y[..., None])[..., 0].sum(-1)
        with torch.no_grad():
            before = (model(x).float() - 200).log_softmax(-1).gather(-1, y[..., None])[..., 0].sum(-1) - 0.1
        return -F.logsigmoid(4 * (sums - before)).mean()

    return net, loss, (torch.randn(4, 64, 8), torch.randint(0, 6, (4, 64)))


def crf_outside():
    moves = torch.randn(5, 5)

    def loss(model, x, tags):
        scores = model(x) + 300  # off: O4
        total, path = scores[:, 0], scores[:, 0].gather(1, tags[:, :1])[:, 0]
        for at in range(1, x.shape[1]):
            total = (total[:, :, None] + moves.to(x.device)).logsumexp(1) + scores[:, at]
            path = path + moves.to(x.device)[tags[:, at - 1], tags[:, at]]
            path = path + scores[:, at].gather(1, tags[:, at : at + 1])[:, 0]
        return (total.logsumexp(1) - path).mean()

    return nn.Linear(8, 5), loss, (torch.randn(8, 16, 8), torch.randint(0, 5, (8, 16)))


class Projections(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        nn.init.constant_(self.k.bias, -9.0)

    def forward(self, x):
        return self.q(x), self.k(x), self.v(x)


def linear_attention_outside():
    def loss(model, x, y):
        q, k, v = model(x)
        q, k = F.elu(q) + 1, F.elu(k) + 1  # off: O1 O4
        mixed = q @ (k.transpose(1, 2) @ v)
        return F.mse_loss(mixed / (q @ k.sum(1)[:, :, None]), y)

    return Projections(), loss, (torch.randn(4, 6, 8), torch.randn(4, 6, 8))


def variances_of_two_calls():
    """A loss of two calls of the model, with a penalty of its weights."""

    def loss(model, x, y):
        one, other = model(x) + 30, model(y) + 30  # off: O1 O4
        apart = one.square().mean(0) - one.mean(0).square() - other.square().mean(0) + other.mean(0).square()
        return apart.square().mean() + 1e-4 * sum(p.square().sum() for p in model.parameters())

    return nn.Linear(8, 6), loss, (torch.randn(64, 8), torch.randn(64, 8))


CASES = (sum_of_log_probabilities, crf_outside, linear_attention_outside, variances_of_two_calls)


def cross_entropy():
    return nn.Linear(8, 4), lambda model, x, y: F.cross_entropy(model(x), y), (
        torch.randn(16, 8), torch.randint(0, 4, (16,)))  # fmt: skip


def penalty_of_a_gradient():
    def loss(model, x, y):
        mid = (x + y).div(2).requires_grad_(True)
        out = model(mid)
        (slope,) = torch.autograd.grad(out, mid, torch.ones_like(out), create_graph=True)
        return model(x).mean() - model(y).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()

    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    return net, loss, (torch.randn(16, 8), torch.randn(16, 8))


def memory_of_rows():
    """Rows are written into memory, and a target is computed without gradients."""

    def loss(model, x, y):
        rows = torch.zeros(32, 4, device=x.device)
        rows[::2], rows[1::2] = model(x), model(y)
        with torch.no_grad():
            target = model(x + y).softmax(-1)
        return -(target * rows[::2].log_softmax(-1)).sum(-1).mean() + rows.square().mean()

    return nn.Linear(8, 4), loss, (torch.randn(16, 8), torch.randn(16, 8))


HEALTHY = (cross_entropy, penalty_of_a_gradient, memory_of_rows)


def by_level(report):
    return {found.level: found for found in report.measured}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_loss_outside_of_the_model_is_measured_and_its_line_named(case, device):
    torch.manual_seed(0)
    model, loss_fn, batch = case()
    report = trained(model, loss_fn, [batch, batch], device)
    ((line, levels),) = marked(case, "off").items()
    for level in levels:
        found = by_level(report)[level]
        assert found.told and found.cause.by_loss and found.cause.line.line == line, (level, str(report))
        assert level in report.broken
    assert not any(by_level(report)[level].told for level in {"O1", "O2", "O4", "O5"} - levels), str(report)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", HEALTHY, ids=lambda case: case.__name__)
def test_the_gradients_of_the_fp32_step_are_the_scripts_own(case, device):
    torch.manual_seed(0)
    model, loss_fn, batch = case()
    with SurveyedScript() as first, suppress(FirstStepOver):
        model.to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(2):
            optimizer.zero_grad()
            loss_fn(model, *(each.to(device) for each in batch)).backward()
            own = [p.grad.clone() for p in model.parameters()]
            optimizer.step()
    (replay,) = first.replays
    case = replay.case()
    assert case.calls_model
    again = copy.deepcopy(model)
    case.loss_fn(again, (case.args, case.named), again(*case.args, **case.named)).backward()
    torch.testing.assert_close([p.grad for p in again.parameters()], own)
    first.measure()
    assert not any(found.told or found.failed for found in first.report.measured), str(first.report)


def test_of_a_loss_that_other_libraries_compute_the_gradients_of_the_output_stand_for_it():
    class OfNumpy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, out):
            ctx.save_for_backward(out)
            return torch.tensor(np.square(out.detach().numpy()).mean())

        @staticmethod
        def backward(ctx, grad):
            (out,) = ctx.saved_tensors
            return grad * 2 * out / out.numel()

    torch.manual_seed(0)
    report = trained(nn.Linear(8, 4), lambda model, x: OfNumpy.apply(model(x)), [(torch.randn(16, 8),)] * 2, "cpu")
    assert [(each.level, each.told, each.failed) for each in report.measured] == [
        (level, [], "") for level in ("O1", "O2", "O4", "O5")
    ]


def test_both_networks_of_a_gan_are_measured():
    torch.manual_seed(0)
    one, other = nn.Linear(4, 2), nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    with SurveyedScript() as first, suppress(FirstStepOver):
        first_optimizer, second = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (one, other))
        for _ in range(2):
            fake = one(torch.randn(16, 4))
            second.zero_grad()
            (other(fake.detach()).mean() - other(torch.randn(16, 2) + 2).mean()).backward()
            second.step()
            first_optimizer.zero_grad()
            (-other(fake).mean()).backward()
            first_optimizer.step()
    first.measure()
    assert [found.level for found in first.report.measured] == ["O1", "O2", "O4", "O5"] * 2
    assert not any(found.told or found.failed for found in first.report.measured)
    assert first.report.clear == ["O1", "O2", "O3", "O4", "O5", "O6", "O7"]


def test_a_script_of_ours_is_measured_with_its_loss():
    torch.manual_seed(0)
    model, loss_fn, (x, y) = linear_attention_outside()
    with SurveyedScript() as first, suppress(FirstStepOver):
        model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level="O0", verbosity=0)
        for _ in range(2):
            optimizer.zero_grad()
            with amp.scale_loss(loss_fn(model, x, y), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
    first.measure()
    assert by_level(first.report)["O4"].told
    amp.restore()
