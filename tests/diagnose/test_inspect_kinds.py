"""`inspect` with scalers, with several models, with modules of many kinds, and its output."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
import training
from conftest import DEVICES
from inspected import PLANTED, NormedNet, identity, look_deep
from scaled_loops import Cuda, Theirs
from torch import nn
from torch.utils.checkpoint import checkpoint

from amp_patch import amp
from amp_patch.diagnose.histogram import Histogram
from amp_patch.diagnose.inspect import inspect
from amp_patch.training import observers


class Twice(torch.autograd.Function):
    """Made by the user: torch's functions see nothing of its backward."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2.0**17


class Applies(nn.Module):
    def forward(self, x):
        return Twice.apply(x)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_inspect_names_an_autograd_function_of_user_code(level):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), Applies(), nn.Linear(4, 4, bias=False))
    seen, _ = look_deep(level, "cpu", {}, model=model)
    assert (seen.not_finite.module, seen.not_finite.op, seen.not_finite.direction) == ("1", "Twice", "backward")


@pytest.mark.parametrize("reentrant", [True, False])
def test_inspect_counts_checkpointed_modules_once(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.body = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())

        def forward(self, x):
            return checkpoint(self.body, self.first(x), use_reentrant=reentrant)

    model = Checkpointed()
    with inspect(model) as seen:
        model(torch.ones(2, 4)).sum().backward()
    assert {histogram.total for histogram in seen.activations.values()} == {8}
    assert {name: histogram.total for name, histogram in seen.activation_gradients.items()} == dict.fromkeys(
        ("", "first", "body", "body.0", "body.1"), 8
    )


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("make", [amp.GradScaler, torch.amp.GradScaler, Cuda, Theirs])
def test_inspect_divides_by_the_scale_of_a_grad_scaler(make, given):
    model, scaler = training.linear([[1.0, 1.0]]), make("cpu", init_scale=2.0**10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with inspect(model, optimizer, scaler=scaler if given else None) as seen:
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert (seen.gradients["weight"].counts, seen.scale, seen.step) == ({0: 2}, 2.0**10, 1)
    assert not observers.present


@pytest.mark.parametrize("reentrant", [False, True])
def test_inspect_unscales_only_the_loss_that_was_scaled(reentrant):
    """Two losses have separate backward passes, and only one is scaled. The model is checkpointed."""
    model, scaler = nn.Sequential(training.linear([[1.0, 1.0]]), nn.Linear(1, 1)), torch.amp.GradScaler("cpu")
    nn.init.ones_(model[1].weight)
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(1, 2, requires_grad=True)
    with inspect(model, optimizer) as seen:
        for loss in (lambda out: scaler.scale(out), lambda out: out):
            loss(checkpoint(model, x, use_reentrant=reentrant).sum()).backward()
        scaler.step(optimizer)
    assert (seen.gradients["0.weight"].counts, seen.gradients["1.weight"].counts) == ({0: 4}, {1: 2})
    assert seen.step == 1


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("make", [amp.GradScaler, torch.amp.GradScaler])
def test_inspect_counts_a_step_that_a_scaler_skips(make, unscales):
    model, scaler = identity(NormedNet()), make("cpu", init_scale=2.0**10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with inspect(model, optimizer) as seen:
        for factor in (1.0, 1.0, math.inf, 1.0):
            optimizer.zero_grad()
            scaler.scale((model(torch.ones(1, 4)) * factor).sum()).backward()
            if unscales:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    assert (seen.step, seen.scale) == (4, 2.0**9)
    assert (seen.not_finite.op, seen.not_finite.module, seen.not_finite.step) == ("mul", None, 2)


def test_inspect_holds_no_activation():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    held = []
    model[1].register_forward_hook(lambda _, args, output: held.append(weakref.ref(output)))
    with inspect(model) as seen:
        model(torch.ones(2, 4)).sum().backward()
        model(torch.ones(2, 4))
        assert [reference() for reference in held] == [None, None]
    assert seen.activations["1"].total == 16


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4, sparse=True)
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.recur = nn.LSTM(4, 4, batch_first=True)
        self.body = nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 4)
        self.register_buffer("turn", torch.view_as_complex(torch.ones(4, 2)))

    def forward(self, tokens):
        x = self.embed(tokens)
        x = self.recur(self.layer(x + self.attend(x, x, x)[0]))[0]
        x = self.head(self.head(self.body(x)))
        x = torch.cat([x, self.head(x[:0])]).clone()
        x[:, 1:].mul_(2.0)
        torch._assert_async(torch.ones((), device=x.device))
        spun = torch.fft.fft(x.float()) * self.turn
        return spun.abs() * torch.ones(4, requires_grad=True, device=x.device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O5"])
def test_inspect_measures_modules_of_many_kinds(level, device):
    torch.manual_seed(0)
    model = Attends().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0)
    wrapped = nn.DataParallel(model) if device == DEVICES[-1] else model  # moves its module to a GPU if there is one
    with inspect(wrapped, optimizer) as seen:
        for _ in range(2):
            training.backward(model(torch.arange(6, device=device).view(2, 3)).float().mean(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
    assert seen.not_finite is None and seen.step == 2
    assert {"attend", "layer.self_attn", "layer.norm1", "recur", "body.1", "head", "embed"} <= seen.errors.keys()
    assert not {"", "layer", "body"} & seen.errors.keys()
    assert max(seen.errors.values()) < (0.02 if level == "O5" else 0.002)
    assert seen.gradients.keys() == dict(model.named_parameters()).keys()
    assert seen.gradients["embed.weight"].total == 2 * 6 * 4  # the rows that were looked up, twice


class TwoResults(nn.Module):
    """Both results come from one operator: if a loss uses one of them, autograd calls the other's hooks with None."""

    def __init__(self):
        super().__init__()
        self.first = training.linear([[1.0, 1.0]])

    def forward(self, x):
        return torch.var_mean(self.first(x), dim=0, correction=0)


class Drops(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None  # autograd calls the weight's hooks with None


@pytest.mark.parametrize("device", DEVICES)
def test_inspect_counts_no_gradient_where_there_is_none(device):
    model = TwoResults().to(device)
    model.unused = nn.Parameter(torch.ones((), device=device))
    x = torch.tensor([[1.0, 1.0], [3.0, 1.0]], device=device)
    with inspect(model) as seen:
        variance, mean = model(x)
        Drops.apply(mean, model.unused).sum().backward()
    assert variance.item() == 1.0 and model.unused.grad is None
    assert seen.activation_gradients[""].total == 1 and seen.gradients.keys() == {"first.weight"}
    assert seen.not_finite is None


def test_inspect_prints_the_worst_numbers():
    factors, weight, *_ = PLANTED["forward"]
    seen, _ = look_deep("O2", "cpu", factors, weight)
    seen.scale = 2.0**10
    seen.gradients = {"first.weight": Histogram(), "head.weight": Histogram()}
    seen.gradients["first.weight"].add(torch.tensor([2.0**-40, 1.0, 1.0, 128.0]))
    seen.gradients["head.weight"].add(torch.tensor([1.0]))
    assert str(seen).splitlines() == [
        "2 steps; loss scale 2^10, the best one 256",
        "not finite: forward of linear in block.1, step 1: from inputs of 0 to 4096 it made a number that is not "
        "finite",
        "relative error against FP32:",
        "  module   error",
        "  block.1    inf",
        "  first        0",
        "  block.0      0",
        "  block.2      0",
        "  head         0",
        "share of gradients that FP16 loses, at the loss scale now, at 1 and at the best:",
        "  gradient of   flushed:              overflowed:",
        "                     now  at 1  best          now  at 1  best",
        "  first.weight      25 %  25 %  25 %         25 %   0 %   0 %",
        "keep_fp32=['block']",
    ]
    assert "not finite: nothing" in str(type(seen)())


def test_inspect_refuses_a_list_of_modules_by_name():
    with pytest.raises(TypeError, match="inspect: model is a list; wanted a torch"), inspect([nn.Tanh()]):
        pass


class Residual(nn.Module):
    """A block that a connection passes by; the slope of its root is infinite at 0."""

    def __init__(self, root_first=True):
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.block = Root()
        self.root_first = root_first

    def forward(self, x):
        x = self.first(x)
        return self.block(x) + x if self.root_first else torch.where(x < 1, x, self.block(x))


class Root(nn.Module):
    def forward(self, x):
        return (x * 0).sqrt()


@pytest.mark.parametrize("root_first", [True, False])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_inspect_names_the_origin_of_a_gradient_that_is_not_finite(level, root_first):
    seen, _ = look_deep(level, "cpu", {}, model=Residual(root_first))
    found = seen.not_finite
    assert (found.module, found.op, found.direction) == ("block", "sqrt", "backward")


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_an_infinity_that_fp32_makes_too_has_no_keep_list(level):
    options = {} if level == "O0" else {"keep_fp32": ["block"]}
    seen, _ = look_deep(level, "cpu", {}, model=Residual(), **options)
    assert seen.not_finite.module == "block" and seen.keep_fp32() == []
    assert ("FP32 made it" in str(seen)) == (level == "O0")
