"""inspect: it names planted faults, and its counts equal torch one-liners."""

from __future__ import annotations

import copy
import inspect as inspect_source
import math
from functools import partial

import pytest
import torch
import training
from conftest import DEVICES
from crossed import crossed
from inspected import NormedNet, identity
from torch import nn
from torch.nn import functional as F
from training import backward

from amp_patch import amp
from amp_patch.diagnose.inspect import inspect
from amp_patch.diagnose.inspection import Inspection, NotFinite


def look(level, device, factors, value=1.0, weight=1.0, **options):
    """One inspected step of a Net on a constant input; the loss is `weight` times the sum of its output."""
    model = identity(NormedNet(), **factors).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, **{"loss_scale": 1.0, **options})
    with inspect(model, optimizer) as seen:
        loss = model(torch.full((1, 4), value, device=device)).float().sum() * weight
        training.backward(loss, optimizer)
        optimizer.step()
    return seen


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_inspect_names_a_norm_whose_variance_overflows(level, device):
    seen = look(level, device, {"first": 300.0})
    assert (seen.not_finite.module, seen.not_finite.direction) == ("norm", "forward")
    assert seen.not_finite.op == "pow" and seen.not_finite.input_range == (300.0, 300.0)
    assert seen.keep_fp32() == ["norm"] or seen.keep_fp32()[0] == "norm"
    fixed = look(level, device, {"first": 300.0}, keep_fp32=seen.keep_fp32()[0])
    assert fixed.not_finite is None


@pytest.mark.parametrize("device", DEVICES)
def test_inspect_counts_flushed_gradients_at_their_parameter(device):
    """At O0, the counts show the loss in FP16. The gradient of head is 2**-26, and that of block.0 is 2**-36."""
    seen = look("O0", device, {"head": 2.0**-10}, weight=2.0**-26)
    head, block = seen.gradients["head.weight"], seen.gradients["block.0.weight"]
    assert set(head.counts) == {-26} and min(block.counts) == -36
    assert head.flushed(2.0) == 1.0 and head.flushed(4.0) == 0.0  # 2**-25 is a tie, which goes to 0
    assert block.flushed(2.0**11) == 1.0 and block.flushed(2.0**12) == 0.0
    assert seen.best_scale() == 2.0**41
    assert seen.not_finite is None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_inspect_counts_unscaled_gradients(level, device):
    seen = look(level, device, {}, loss_scale=1024.0)
    plain = look("O0", device, {})
    assert seen.scale == 1024.0
    for name, histogram in plain.gradients.items():
        assert seen.gradients[name].counts == histogram.counts, name
    assert set(seen.activation_gradients["head"].counts) == {10}  # as they flowed


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_inspect_measures_errors_against_fp32_on_the_same_input(level, dtype, device):
    model = training.convnet(device=device)
    images, classes = training.images(0, device)
    reference = copy.deepcopy(model)
    model = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, dtype=dtype)[0]
    given, made = {}, {}

    def note(name):
        def hook(_, args, output):
            given[name], made[name] = args[0], output

        return hook

    handles = [
        module.register_forward_hook(note(name)) for name, module in model.named_modules() if not any(module.children())
    ]
    with inspect(model) as seen:
        F.cross_entropy(model(images), classes)
    for handle in handles:
        handle.remove()
    assert seen.errors.keys() == made.keys() and max(seen.errors.values()) > 0
    for name, error in seen.errors.items():
        with torch.no_grad(), amp.disable_casts():
            exact = reference.get_submodule(name)(given[name].float())
        expected = (made[name].float() - exact).norm() / exact.norm()
        assert error == pytest.approx(expected.item(), rel=1e-3, abs=1e-7), name


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_inspect_finds_in_a_forward_with_activations_in_eight_bits_what_it_finds_without(level):
    def seen(name: str) -> Inspection:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level=name, loss_scale=1.0, verbosity=0)
        with inspect(model, optimizer) as found:
            loss = F.cross_entropy(model(torch.randn(128, 64)).float(), torch.arange(128) % 8)
            backward(loss, optimizer)
            optimizer.step()
        amp.restore()
        return found

    plain, coded = seen(level), seen(f"{level}+act8")
    assert coded.errors == plain.errors and coded.cause == plain.cause
    assert coded.output_error == plain.output_error > 0
    assert all(each.counts == plain.activations[name].counts for name, each in coded.activations.items())
    assert coded.not_finite is None and coded.gradients["0.weight"].counts != plain.gradients["0.weight"].counts


@pytest.mark.parametrize("device", DEVICES)
def test_inspect_changes_no_weight_and_leaves_no_hook(device):
    """Inspected and other steps give the same weights. Batch norms count each batch once."""
    runs, hooks, batch = [], [], partial(training.images, device=device)
    for inspected in (False, True):
        model = training.convnet(device=device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
        if inspected:
            with inspect(model, optimizer) as seen:
                training.train(model, optimizer, 3, batch)
            assert seen.step == 3 and seen.not_finite is None
            assert seen.activations["body.0"].total == 3 * 8 * 4 * 64
        else:
            training.train(model, optimizer, 3, batch)
        training.train(model, optimizer, range(3, 5), batch)
        runs.append(training.weights(model))
        for module in model.modules():
            assert not module._forward_hooks and not module._forward_pre_hooks
        assert not any(param._backward_hooks for param in model.parameters())
        hooks.append([len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)])
        assert torch.overrides._get_current_function_mode_stack() == []
    assert hooks[0] == hooks[1]
    assert training.same(*runs)


@pytest.mark.usefixtures("fresh_compiler")
@crossed({"before": [True, False], "level": ["O1", "O2"]}, meet=1)
def test_inspect_runs_a_compiled_model_eagerly_and_keeps_its_graphs(before, level):
    """Inspect before or after the first compilation. Afterwards the model uses its graphs again."""
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph

    model = identity(NormedNet(), block_0=2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=1.0)
    compiled, x = torch.compile(model, backend=backend), torch.ones(1, 4)
    if not before:
        compiled(x)
    made = len(graphs)
    with inspect(model, optimizer) as seen:
        training.backward(compiled(x).float().sum(), optimizer)
        optimizer.step()
    assert len(graphs) == made
    assert seen.step == 1 and seen.not_finite is None
    assert seen.activations["block.0"].counts == {1: 4}
    compiled(x)
    assert len(graphs) == 1


@pytest.mark.parametrize("device", DEVICES)
def test_inspect_leaves_no_hook_after_an_error(device):
    model = training.convnet(device=device)
    with pytest.raises(RuntimeError), inspect(model):
        model(torch.ones(1, 3, 8, 8, device=device))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("device", DEVICES)
def test_inspect_computes_a_module_that_writes_to_its_input_once(device):
    """SiLU of SiLU is another number, and ReLU's second write would be an error in backward."""
    model = nn.Sequential(nn.Linear(4, 4), nn.SiLU(inplace=True), nn.LayerNorm(4), nn.ReLU(inplace=True)).to(device)
    inputs = torch.arange(12.0, device=device).reshape(3, 4)
    plain = model(inputs)
    with amp.inspect(model) as seen:
        output = model(inputs)
        output.sum().backward()
    assert torch.equal(output, plain)
    assert seen.errors.keys() == {"0", "2"}


class Counting(nn.Module):
    """Has state in Python, and draws numbers that nothing tells of."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.calls = 0

    def forward(self, inputs):
        self.calls += 1
        return inputs * self.weight * self.calls + torch.randn(2)


def test_inspect_changes_no_module_state_and_no_random_number():
    inputs = torch.ones(2)
    torch.manual_seed(0)
    plain = Counting()
    wanted = [plain(inputs), plain(inputs)]
    torch.manual_seed(0)
    model = Counting()
    with amp.inspect(model) as seen:
        outputs = [model(inputs), model(inputs)]
    assert all(map(torch.equal, outputs, wanted))
    assert model.calls == 2
    assert seen.errors == {}


def test_inspect_measures_no_error_of_a_module_that_cannot_compute_in_fp32():
    """Its hook makes the weight, of parameters in FP16."""
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", loss_scale=4.0)
    with amp.inspect(model, optimizer) as seen:
        backward(model(torch.ones(2, 4)).float().sum(), optimizer)
        optimizer.step()
    assert seen.errors.keys() == {"1"}


class Masked(nn.Module):
    """Infinities come from a buffer, from an argument, by a function, an assignment or through a view."""

    def __init__(self, form):
        super().__init__()
        self.linear, self.form = nn.Linear(4, 4), form
        self.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))

    def forward(self, inputs, mask=None):
        scores = self.linear(inputs).clone()
        if self.form == "buffer":
            scores = scores + self.mask
        elif self.form == "argument":
            scores = scores + mask
        elif self.form == "function":
            scores = scores.masked_fill(torch.eye(4).bool(), -math.inf)
        elif self.form == "assignment":
            scores[:, 0] = -math.inf
        else:
            scores[:, 0].fill_(-math.inf)
        return (scores * 2.0).softmax(-1)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("form", ["buffer", "argument", "function", "assignment", "view"])
def test_inspect_blames_no_module_for_infinities_of_a_mask(form, level):
    model = Masked(form)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=4.0)
    mask = torch.full((4, 4), -math.inf).triu(1)
    with amp.inspect(model, optimizer) as seen:
        backward(model(torch.ones(4, 4), mask=mask).float().square().sum(), optimizer)
        optimizer.step()
    assert seen.not_finite is None
    assert seen.step == 1


def test_inspect_uses_the_scale_of_the_optimizer_that_is_scaled():
    models = [nn.Linear(2, 1), nn.Linear(2, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    amp.initialize(models, optimizers, opt_level="O2", loss_scale=1024.0)
    with amp.inspect(models[1], optimizers) as seen:
        backward(models[1](torch.ones(1, 2)).float().sum(), optimizers[1])
        optimizers[1].step()
    assert seen.gradients["weight"].counts == {0: 2}


@pytest.mark.parametrize("device", DEVICES)
def test_inspect_continues_after_a_step_that_raises(device):
    model = training.convnet(device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images = training.images(0, device)[0]
    with inspect(model, optimizer) as seen:
        model(images).sum().backward()
        optimizer.param_groups[0]["lr"] = "nothing to multiply by"
        with pytest.raises((TypeError, RuntimeError)):
            optimizer.step()
        model(images).exp().sub(1e38).mul(1e38).sum()
    assert seen.activations["head"].total == 2 * 8 * 5
    assert seen.not_finite.op == "mul"


def test_an_empty_keep_list_says_why_it_is_empty():
    seen = Inspection()
    assert seen.summary().endswith("keep_fp32=[]: nothing is known: no step of the model was seen")
    seen.errors["head"] = 0.01
    assert "keep_fp32=[]: no module has to stay FP32: every number is finite" in seen.summary()
    seen.errors["head"] = 0.5
    assert seen.summary().endswith("keep_fp32=['head']")
    seen.errors.clear()
    seen.not_finite = NotFinite("head", "pow", "forward", 0, (0.0, 1.0))
    assert seen.summary().endswith("keep_fp32=[]: no module by itself is to stay FP32, see above")


class Timed(nn.Module):
    """A sinusoid of times in front of a layer, beside another layer."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.time, self.head = nn.Linear(4, 8), nn.Linear(1, 8), nn.Linear(8, 4)
        self.drop = nn.Dropout(dropout)

    def forward(self, x, t):
        return self.head(self.drop(self.first(x) + self.time(torch.sin(t))))


@pytest.mark.filterwarnings("ignore:Timed.forward. argument .t. has whole numbers")
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_inspect_compares_the_output_to_that_of_an_fp32_copy(level):
    torch.manual_seed(0)
    model, given = Timed(), (torch.randn(8, 4), torch.randint(500, 1000, (8, 1)).float())
    exact = model(*given).detach()
    model, _ = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level)
    output, weights = model(*given).detach().float(), training.weights(model)
    with inspect(model) as seen:
        model(*given)
    expected = (output - exact).norm() / exact.norm()
    assert seen.output_error == pytest.approx(expected.item(), rel=1e-3)
    assert (seen.output_error > 0.05) == (level == "O5"), "a time above 512 has steps of 4 in BF16"
    assert max(seen.errors.values()) < 0.01
    assert ("the output is off" in str(seen)) == (level == "O5"), "it is told where it is more than 5 %"
    assert training.same(weights, training.weights(model))


@pytest.mark.parametrize("kind", ["dropout", "hook"])
def test_inspect_runs_no_copy_of_a_model_that_draws_numbers_or_has_hooks(kind):
    model, calls = Timed(dropout=0.5 if kind == "dropout" else 0.0), []
    if kind == "hook":
        model.head.register_forward_hook(lambda *_: calls.append(1))
    model, _ = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O4")
    with inspect(model) as seen:
        model(torch.randn(8, 4), torch.full((8, 1), 700.0))
    assert seen.output_error == 0.0 and len(calls) == (kind == "hook")


class Differences(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        h = self.first(x)
        far = h + 300  # the line
        return self.head(far - far.mean(0))


@pytest.mark.parametrize("level", ["O4", "O5"])
def test_inspect_names_the_line_that_rounds_an_input_of_a_module(level):
    torch.manual_seed(0)
    model, x = Differences(), torch.randn(32, 4)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level)
    before, random = training.weights(model), torch.get_rng_state()
    texts = []
    for options in ({}, {"line": False}):
        with inspect(model, optimizer, **options) as seen:
            with amp.scale_loss(F.mse_loss(model(x), x[:, :2]), optimizer) as scaled:
                scaled.backward()
            optimizer.zero_grad()
        texts.append(str(seen))
    first = inspect_source.getsourcelines(Differences)[1]
    assert f"test_inspect.py:{first + 7}: " in seen_line(texts[0]) and "in FP32: " in seen_line(texts[0])
    assert seen_line(texts[1]).endswith("amp.survey names lines that round it")
    assert training.same(before, training.weights(model)) and torch.equal(torch.get_rng_state(), random)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.children())


def seen_line(text):
    return next(line for line in text.splitlines() if line.startswith("the output is off"))
