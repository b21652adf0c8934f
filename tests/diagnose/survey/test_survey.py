"""survey: each kind of line that a level would break is named where it is, and nothing else is."""

from __future__ import annotations

import copy
import inspect
import logging
import math
from types import SimpleNamespace

import pytest
import survey_cases
import survey_function_cases
import survey_sum_cases
import torch
from conftest import DEVICES
from survey_cases import marked
from torch import nn
from torch.nn import functional as F

from amp_patch import amp
from amp_patch.diagnose.survey import measured
from amp_patch.diagnose.survey.steps import in_force


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


def layer_scale():
    """As ConvNeXt begins: the branch is 0 in FP16, and less than a step of FP16 in its sum."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.scale = nn.Linear(4, 4, bias=False), nn.Parameter(torch.full((4,), 1e-6))
            self.layer.weight.data.mul_(0.01)

        def forward(self, x):
            return x + F.dropout(self.scale * self.layer(x), 0.1, self.training)

    return Net(), F.mse_loss, (torch.randn(8, 4), torch.randn(8, 4))


def small_branch():
    """A branch whose gradients are 0 in FP16, and which hardly learns in FP32 either, as attention at its beginning."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.branch = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x) + 2.0**-20 * self.branch(x)

    return Net(), F.mse_loss, (torch.randn(64, 4), torch.randn(64, 4))


def dropped_paths():
    """As timm's DropPath: memory that holds what freed tensors have left in it, until random numbers are written."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.left = nn.Linear(64, 64), [torch.full((512, 64), -1e30) for _ in range(8)]

        def forward(self, x):
            y = self.layer(x)
            self.left.clear()
            masks = [y.new_empty(512, 64) for _ in range(8)]
            return x + y * sum(mask.bernoulli_(0.9) for mask in masks) / 8

    return Net(), F.mse_loss, (torch.randn(512, 64), torch.randn(512, 64))


def mask_of_ones():
    """As graph attention: scores without an edge are a number far below FP16's, and no row is without an edge."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x, edges):
            scores = self.q(x) @ self.k(x).T
            far = -9e15 * torch.ones_like(scores)
            return torch.where(edges > 0, scores, far).softmax(-1) @ x

    edges = torch.eye(6) + torch.randint(0, 2, (6, 6))
    return Net(), F.mse_loss, (torch.randn(6, 8), edges, torch.randn(6, 8))


def batch_object():
    """As a graph net of PyTorch Geometric: forward takes an object, whose tensors a cast model receives in its type."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, batch):
            return self.layer(batch.x)

    return Net(), F.mse_loss, (SimpleNamespace(x=torch.randn(6, 8)), torch.randn(6, 4))


def ratio_of_probabilities():
    """As PPO: the old probabilities differ little from each other, and not at all from the first new ones."""
    policy, x = nn.Linear(8, 2), torch.randn(64, 8)
    policy.weight.data.mul_(0.01)

    def loss(logits, before):
        return (logits.log_softmax(-1)[:, 0] - before).exp().mean()

    return policy, loss, (x, policy(x).log_softmax(-1)[:, 0].detach())


def sorted_distances():
    """As a miner of pytorch-metric-learning: what is not to be found gets the largest number of the tensor's type."""

    def loss(points, labels):
        distances = (points @ points.T).flatten(1)
        most = torch.finfo(distances.dtype).max
        distances[labels[:, None] != labels] = most
        nearest = distances.fill_diagonal_(most).sort(-1).values[:, 0]
        return (nearest - 1).square().mean()

    return nn.Linear(8, 4), loss, (torch.randn(12, 8), torch.arange(12) % 3)


def solver():
    """As an ODE solver: a function of autograd's and an assignment write into memory that holds what was there before.

    Numbers that neither has written are far beyond FP16 and BF16, and are never read.
    """

    class Write(torch.autograd.Function):
        @staticmethod
        def forward(ctx, memory, value):
            memory.data[0] = value
            return memory

        @staticmethod
        def backward(ctx, grad):
            return grad, grad[0]

    def without_numbers(*shape):
        memory = torch.empty(*shape)
        memory.untyped_storage().copy_(torch.full(shape, 1e38).untyped_storage())
        return memory

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            slopes = Write.apply(without_numbers(2, 6, 8).to(x.dtype), self.layer(x))
            states = without_numbers(2, 6, 8).to(x.dtype)
            states[0] = x + 16 * slopes[0]
            return states[0]

    return Net(), F.mse_loss, (torch.randn(6, 8), torch.randn(6, 8))


def one_action():
    """As the actor of SAC in one environment: a model whose output, no loss, has one element."""
    return nn.Linear(3, 1), F.mse_loss, (torch.randn(1, 3), torch.randn(1, 1))


@pytest.fixture(autouse=True)
def rules_alone(monkeypatch):
    """Judge by rules: test_measured.py has what is measured."""
    monkeypatch.setattr(measured, "measure", lambda case, **options: ())


CLEAN = (
    *(mlp, cnn, transformer, lstm, digits, layer_scale, small_branch),
    *(dropped_paths, mask_of_ones, batch_object, ratio_of_probabilities, sorted_distances, solver, one_action),
    *(survey_function_cases.fp32_that_is_converted_back, *survey_sum_cases.SUM_CLEAN),
)
CASES = (*survey_cases.CASES, *survey_function_cases.FUNCTION_CASES, *survey_sum_cases.SUM_CASES)
LEVELS = ["O1", "O2", "O3", "O4", "O5", "O6", "O7"]


def made(case, device="cpu"):
    torch.manual_seed(0)
    with torch.device(device):
        return case()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_line_is_named_at_the_levels_that_its_comment_has(case, device):
    report = amp.survey(*made(case, device))
    found: dict[bool, dict[int, set[str]]] = {True: {}, False: {}}
    for line in report.lines:
        assert line.file == inspect.getsourcefile(case)
        found[line.breaks].setdefault(line.line, set()).update(line.levels)
    assert found == {True: marked(case), False: {}}, str(report)
    assert report.clear == [level for level in LEVELS if all(level not in each for each in marked(case).values())]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CLEAN, ids=lambda case: case.__name__)
def test_trainings_that_break_nowhere_have_no_line(case, device):
    report = amp.survey(*made(case, device))
    assert (report.lines, report.clear) == ([], LEVELS), str(report)


def trained(case, level):
    """Losses of the steps that are not skipped, without those before the loss scale has settled."""
    model, loss_fn, inputs = made(case)
    *given, targets = inputs
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, allow_banned=True)
    # `made` has read F.mse_loss before O1 replaced it, and in torch 2.11 its backward refuses FP16 beside FP32.
    loss_fn = in_force(loss_fn)
    takes_targets = case.__name__ not in ("years", "years_near_the_first_prediction", "ctc", "loss_inside")
    losses = []
    while len(losses) < 3:
        loss = loss_fn(model(*given), targets) if takes_targets else loss_fn(model(*inputs))
        optimizer.zero_grad()
        scale = amp.loss_scale(optimizer).item()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        if amp.loss_scale(optimizer).item() >= scale:
            losses.append(loss.item())
    amp.restore()
    return losses


@pytest.mark.filterwarnings("ignore:.* has one number a sample")  # in `times_from_the_first`, whose differences count
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_level_that_is_clear_trains_as_fp32(case, caplog):
    """The tolerance: in `years` FP16 has steps of 1, and the losses are squares of up to 16."""
    caplog.set_level(logging.ERROR)
    broken = set().union(*marked(case).values(), *marked(case, "off").values())
    exact = trained(case, "O0")
    for level in sorted({"O1", "O2", "O4", "O5"} - broken):
        assert trained(case, level) == pytest.approx(exact, rel=0.04), level


@pytest.mark.filterwarnings("ignore:.* has whole numbers alone")  # in `years` and `float_indices`
@pytest.mark.parametrize(("case", "level"), [
    (survey_cases.mask_of_a_billion, "O2"),
    (survey_cases.epsilon_in_a_logarithm, "O1"),
    (survey_function_cases.linear_algebra, "O5"),
    (survey_function_cases.ctc, "O2"),
    (survey_function_cases.numpy_of_outputs, "O4"),
    (survey_function_cases.categorical_of_many, "O5"),
    (survey_function_cases.mixed_types, "O2"),
    (survey_function_cases.fp32_that_stays, "O5"),
    (survey_sum_cases.standard_deviation, "O4"),
    (survey_cases.years, "O5"),
    (survey_cases.float_indices, "O5"),
])  # fmt: skip
def test_a_level_that_is_named_does_not_train_as_fp32(case, level):
    exact = trained(case, "O0")
    try:
        losses = trained(case, level)
    except (RuntimeError, TypeError):
        return
    assert not all(math.isclose(one, other, rel_tol=0.05) for one, other in zip(losses, exact, strict=True))


def test_inputs_that_become_infinite_are_named_where_the_model_is_called():
    report = amp.survey(*made(survey_function_cases.large_inputs))
    (line,) = report.lines
    assert (line.file, line.op, line.levels) == (__file__, "input", ["O2", "O3"])
    assert "input 1 of the model" in line.what and "infinite in FP16" in line.what


def test_a_survey_leaves_everything_as_it_was():
    model, loss_fn, inputs = made(cnn)
    optimizer = torch.optim.Adam(model.parameters())
    loss_fn(model(inputs[0]), inputs[1]).backward()
    optimizer.step()
    before = copy.deepcopy((model.state_dict(), [p.grad for p in model.parameters()], optimizer.state_dict()))
    apply = torch.autograd.Function.__dict__.get("apply")
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    amp.survey(model, loss_fn, inputs, optimizer)
    after = (model.state_dict(), [p.grad for p in model.parameters()], optimizer.state_dict())
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert torch.equal(torch.rand(3), expected)
    assert torch.autograd.Function.__dict__.get("apply") is apply
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_share_of_lost_updates_is_that_of_the_optimizers_step():
    """1 - 2**-10 is 1 in BF16, and no number of FP16 is nearer than 2**-11 below 1."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-10)
    report = amp.survey(model, lambda output: output.sum(), torch.ones(1, 1), optimizer)
    assert report.lost == {"float16": 0.0, "bfloat16": 1.0}
    assert "0 % in FP16 and 100 % in BF16" in str(report)
    assert model.weight.item() == 1.0


@pytest.mark.parametrize(("eps", "broken"), [(1e-8, ["O3"]), (1e-4, [])])
def test_an_eps_that_is_0_in_fp16_is_named_for_the_level_that_steps_in_fp16(eps, broken):
    model, loss_fn, inputs = made(cnn)
    report = amp.survey(model, loss_fn, inputs, torch.optim.Adam(model.parameters(), eps=eps))
    assert report.broken == broken
    assert all(line.file == __file__ and "eps=1e-08 of Adam is 0 in FP16" in line.what for line in report.lines)


def test_a_tensor_that_another_process_has_sent_has_its_own_numbers():
    """torch makes it empty, of the storage's dtype, and sets its memory then."""
    model, sent = nn.Linear(8, 4), torch.randn(4, 4)

    def loss(output):
        rebuilt = torch.empty((0,), dtype=output.dtype).set_(sent.untyped_storage(), 0, (4, 4), (4, 1))
        return (output - rebuilt.to("cpu")).square().mean()

    assert amp.survey(model, loss, torch.randn(4, 8)).lines == []


def test_an_eps_that_is_a_list_is_no_error():
    model, loss_fn, inputs = made(cnn)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["eps"] = [1e-30, 1e-3]  # as Adafactor's
    assert amp.survey(model, loss_fn, inputs, optimizer).lines == []


def test_the_report_says_what_it_judges_and_which_levels_are_clear():
    report = amp.survey(*made(survey_cases.mask_of_a_billion))
    text = str(report)
    assert "survey_cases.py:" in text and "masked_fill  at O1, O2, O3" in text
    assert "clear: O4, O5, O6 and O7" in text
    assert "It trains nothing" in text
    assert report.broken == ["O1", "O2", "O3"]


def test_a_line_has_the_modules_whose_forward_it_is():
    class Unit(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            kept = self.layer(x).relu()
            return kept / (kept.sum(-1, keepdim=True) + 1e-9)

    model = nn.Sequential(nn.Linear(4, 4), Unit(), nn.Sequential(Unit()), nn.Softmax(-1))
    nn.init.constant_(model[1].layer.bias, -9.0)
    nn.init.constant_(model[2][0].layer.bias, -9.0)
    report = amp.survey(model, F.mse_loss, (torch.randn(8, 4), torch.randn(8, 4)))
    assert [(line.op, line.modules) for line in report.lines] == [("div", ["1", "2.0"])]
    report = amp.survey(nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)), F.mse_loss, (1e6 * torch.ones(8, 4),) * 2)
    assert ["1"] in [line.modules for line in report.lines if line.op == "softmax"]


def test_inputs_may_be_a_tensor_or_a_dict():
    model = nn.Linear(4, 4)
    assert amp.survey(model, torch.mean, torch.ones(2, 4)).lines == []
    assert amp.survey(model, torch.mean, {"input": torch.ones(2, 4)}).lines == []
