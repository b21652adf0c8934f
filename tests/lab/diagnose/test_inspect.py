"""inspect: planted faults are named, and what it counts is what torch's one-liners count."""

from __future__ import annotations

import copy
import dataclasses
import math
import weakref

import pytest
import torch
import training
from conftest import DEVICES
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from amp_patch import amp
from amp_patch.lab.diagnose.histogram import Histogram
from amp_patch.lab.diagnose.inspect import inspect
from amp_patch.training import observers


class RMSNorm(nn.Module):
    """As many models write it: the square of what is above 255 is infinite in FP16."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 2.0**-30) * self.weight


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.norm = RMSNorm(4)
        self.block = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        self.head = nn.Linear(4, 2, bias=False)

    def forward(self, x):
        return self.head(self.block(self.norm(self.first(x))))


def identity(model, **factors):
    """Weights that pass every number on, times the factor of their layer."""
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_(torch.eye(*module.weight.shape) * factors.get(name.replace(".", "_"), 1.0))
    return model


def look(level, device, factors, value=1.0, weight=1.0, **options):
    """One inspected step of a Net on a constant input; the loss is `weight` times the sum of its output."""
    model = identity(Net(), **factors).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, **{"loss_scale": 1.0, **options})
    with inspect(model, optimizer) as seen:
        loss = model(torch.full((1, 4), value, device=device)).float().sum() * weight
        training.backward(loss, optimizer)
        optimizer.step()
    return seen


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_an_overflow_in_forward_is_found_in_its_layer(level, device):
    assert look(level, device, {"block_1": 3e4}).not_finite is None
    seen = look(level, device, {"block_0": 3e4, "block_1": 3e4})
    assert (seen.not_finite.module, seen.not_finite.direction) == ("block.1", "forward")
    assert seen.not_finite.input_range == (0.0, pytest.approx(3e4, rel=1e-3))
    assert "block.1" in str(seen.not_finite) and "step 0" in str(seen.not_finite)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_an_overflow_in_backward_is_found_in_its_layer(level, device):
    """The head's gradient is 2**8 at its input; times 2**10 in block.1's backward that is 2**18."""
    factors = {"head": 2.0**-7, "block_1": 2.0**10, "block_0": 2.0**-10}
    seen = look(level, device, factors, weight=2.0**15)
    assert seen.not_finite.direction == "backward"
    assert seen.not_finite.module == "block.1"
    assert seen.not_finite.input_range == (0.0, 2.0**8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_norm_whose_variance_overflows(level, device):
    seen = look(level, device, {"first": 300.0})
    assert (seen.not_finite.module, seen.not_finite.direction) == ("norm", "forward")
    assert seen.not_finite.op == "pow" and seen.not_finite.input_range == (300.0, 300.0)
    assert seen.keep_fp32() == ["norm"] or seen.keep_fp32()[0] == "norm"
    fixed = look(level, device, {"first": 300.0}, keep_fp32=seen.keep_fp32()[0])
    assert fixed.not_finite is None


@pytest.mark.parametrize("device", DEVICES)
def test_a_gradient_that_flushes_to_zero_is_counted_where_it_was(device):
    """At O0: what FP16 would lose. The gradient of head is 2**-26 everywhere, the one of block.0 2**-36."""
    seen = look("O0", device, {"head": 2.0**-10}, weight=2.0**-26)
    head, block = seen.gradients["head.weight"], seen.gradients["block.0.weight"]
    assert set(head.counts) == {-26} and min(block.counts) == -36
    assert head.flushed(2.0) == 1.0 and head.flushed(4.0) == 0.0  # 2**-25 is a tie, which goes to 0
    assert block.flushed(2.0**11) == 1.0 and block.flushed(2.0**12) == 0.0
    assert seen.best_scale() == 2.0**41
    assert seen.not_finite is None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_gradients_are_counted_without_their_scale(level, device):
    seen = look(level, device, {}, loss_scale=1024.0)
    plain = look("O0", device, {})
    assert seen.scale == 1024.0
    for name, histogram in plain.gradients.items():
        assert seen.gradients[name].counts == histogram.counts, name
    assert set(seen.activation_gradients["head"].counts) == {10}  # as they flowed


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_error_is_that_against_fp32_on_the_same_input(level, dtype, device):
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


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_is_left_behind_and_nothing_is_changed(device):
    """The inspected steps give the weights of those that nobody looked at; batch norms count each batch once."""
    runs, hooks = [], []
    for inspected in (False, True):
        model = training.convnet(device=device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
        if inspected:
            with inspect(model, optimizer) as seen:
                training.train(model, optimizer, 3)
            assert seen.step == 3 and seen.not_finite is None
            assert seen.activations["body.0"].total == 3 * 8 * 4 * 64
        else:
            training.train(model, optimizer, 3)
        training.train(model, optimizer, range(3, 5))
        runs.append(training.weights(model))
        for module in model.modules():
            assert not module._forward_hooks and not module._forward_pre_hooks
        assert not any(param._backward_hooks for param in model.parameters())
        hooks.append([len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)])
        assert torch.overrides._get_current_function_mode_stack() == []
    assert hooks[0] == hooks[1]
    assert training.same(*runs)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("before", [True, False])
def test_a_compiled_model_is_seen_as_if_it_were_not(before, level):
    """Looked at before the first compilation or after it; afterwards its graphs are used again."""
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph

    model = identity(Net(), block_0=2.0)
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
def test_a_mask_of_infinities_does_no_harm(device):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x).masked_fill(torch.eye(4, device=x.device).bool(), float("-inf")).softmax(-1)

    model = Masked().to(device)
    with inspect(model) as seen:
        model(torch.ones(4, 4, device=device)).square().sum().backward()
    assert seen.not_finite is None
    with inspect(model) as seen:
        model(torch.ones(4, 4, device=device)).log().sum().backward()
    assert (seen.not_finite.op, seen.not_finite.module) == ("log", None)


@pytest.mark.parametrize("device", DEVICES)
def test_the_step_of_the_first_overflow_is_told(device):
    model = training.linear([[2.0]], device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O3", loss_scale=1.0)
    with inspect(model, optimizer) as seen:
        for value in (1.0, 1.0, 6e4, 1.0):
            training.backward(model(torch.full((1, 1), value, device=device)).sum(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
    assert (seen.not_finite.module, seen.not_finite.step, seen.step) == ("", 2, 4)


@pytest.mark.parametrize("device", DEVICES)
def test_an_error_in_the_block_leaves_no_hook(device):
    model = training.convnet(device=device)
    with pytest.raises(RuntimeError), inspect(model):
        model(torch.ones(1, 3, 8, 8, device=device))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("device", DEVICES)
def test_a_module_that_writes_to_its_input_computes_once(device):
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


def test_a_modules_state_and_the_random_numbers_are_as_without_it():
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


def test_a_module_that_cannot_compute_in_fp32_is_left_out():
    """Its hook makes the weight, of parameters in FP16."""
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", loss_scale=4.0)
    with amp.inspect(model, optimizer) as seen:
        with amp.scale_loss(model(torch.ones(2, 4)).float().sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert seen.errors.keys() == {"1"}


class Masked(nn.Module):
    """Infinities come from a buffer, from an argument, by an assignment or through a view."""

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
        elif self.form == "assignment":
            scores[:, 0] = -math.inf
        else:
            scores[:, 0].fill_(-math.inf)
        return (scores * 2.0).softmax(-1)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("form", ["buffer", "argument", "assignment", "view"])
def test_a_masks_infinities_are_nobodys_fault(form, level):
    model = Masked(form)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=4.0)
    mask = torch.full((4, 4), -math.inf).triu(1)
    with amp.inspect(model, optimizer) as seen:
        with amp.scale_loss(model(torch.ones(4, 4), mask=mask).float().square().sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert seen.not_finite is None
    assert seen.step == 1


def test_of_two_optimizers_the_one_that_is_scaled_counts():
    models = [nn.Linear(2, 1), nn.Linear(2, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    amp.initialize(models, optimizers, opt_level="O2", loss_scale=1024.0)
    with amp.inspect(models[1], optimizers) as seen:
        with amp.scale_loss(models[1](torch.ones(1, 2)).float().sum(), optimizers[1]) as scaled:
            scaled.backward()
        optimizers[1].step()
    assert seen.gradients["weight"].counts == {0: 2}


def test_a_graph_that_outlives_a_step_is_not_taken_for_the_next_one():
    """The gradient of `early` is infinite; the calls of the next step, at whose places its own were, are not."""
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other)]
    with amp.inspect(model, optimizers) as seen:
        early = model(torch.ones(1, 1)) * 2.0
        loss = early.double().sum() * 1e60
        optimizers[1].step()
        late = other(torch.ones(1, 1)).sigmoid().sum()
        late.backward()
        loss.backward()
        optimizers[0].zero_grad()
        optimizers[0].step()
    assert (seen.not_finite.op, seen.not_finite.module, seen.not_finite.step) == ("Mul", None, 1)


def test_compiled_models_are_seen():
    model = nn.Sequential(nn.Linear(2, 2), nn.GELU())
    compiled = torch.compile(model, backend="eager")
    with amp.inspect(model) as seen:
        compiled(torch.ones(1, 2)).sum().backward()
    assert seen.errors.keys() == {"0", "1"}
    assert seen.activations["1"].total == 2


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_that_raises_ends_nothing(device):
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


class Deep(nn.Module):
    """Three layers in a block, between two: what overflows between the first two is small again behind the third."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.block = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
        self.head = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.head(self.block(self.first(x)))


def look_deep(level, device, factors, weight=1.0, value=1.0, model=None, **options):
    model = identity(Deep() if model is None else model, **factors).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    options = {"loss_scale": 1.0, "verbosity": 0, **options}
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, **options)
    with inspect(model, optimizer) as seen:
        for value_now in (0.0, value):
            loss = model(torch.full((1, 4), value_now, device=device)).float().sum() * weight * value_now
            training.backward(loss, optimizer)
            finite = all(bool(p.grad.isfinite().all()) for p in amp.master_params(optimizer))
            optimizer.step()
    amp.restore()
    return seen, finite


# direction -> the factors of the layers, the weight of the loss, what flowed in and out of where it overflows.
PLANTED = {
    "forward": ({"block_0": 2.0**12, "block_1": 2.0**12, "block_2": 2.0**-24}, 1.0, "block.1", (0.0, 2.0**12)),
    "backward": ({"block_0": 2.0**-12, "block_1": 2.0**6, "block_2": 2.0**6}, 2.0**8, "block.1", (2.0**14,) * 2),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("direction", PLANTED)
def test_an_overflow_is_named_and_the_list_removes_it(direction, level, device):
    factors, weight, module, span = PLANTED[direction]
    seen, finite = look_deep(level, device, factors, weight)
    found = seen.not_finite
    assert (found.module, found.op, found.direction, found.step) == (module, "linear", direction, 1)
    assert found.input_range == span
    keep = seen.keep_fp32()
    # Kept in a cast model, a layer's numbers come out in FP16: what it makes and its neighbour takes needs their block.
    assert keep == (["block.1", "block.2" if direction == "forward" else "block.0"] if level == "O1" else ["block"])
    assert not finite
    seen, finite = look_deep(level, device, factors, weight, keep_fp32=keep)
    assert seen.not_finite is None
    assert finite


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", ["O0", "O5"])
def test_the_planted_overflows_are_fp16s(level, device):
    for factors, weight, *_ in PLANTED.values():
        seen, finite = look_deep(level, device, factors, weight)
        assert seen.not_finite is None and finite and seen.keep_fp32() == []


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_list_of_modules_is_not_kept_in_place_of_what_runs_it(level):
    """Each of its modules would be kept for itself, with FP16 between them."""
    factors = {"0_layers_0": 2.0**12, "0_layers_1": 2.0**12, "0_layers_2": 2.0**-24}
    make = lambda: nn.Sequential(Listed(), nn.Linear(4, 4, bias=False))  # noqa: E731
    seen, _ = look_deep(level, "cpu", factors, model=make())
    assert (seen.not_finite.module, seen.keep_fp32()) == ("0.layers.1", ["0"])
    seen, finite = look_deep(level, "cpu", factors, model=make(), keep_fp32=["0"])
    assert seen.not_finite is None and finite


@pytest.mark.parametrize("device", DEVICES)
def test_an_overflow_that_reaches_the_end_has_no_list(device):
    """The model's own output is too large for FP16."""
    factors = {"block_0": 2.0**12, "block_1": 2.0**12}
    seen, _ = look_deep("O2", device, {**factors, "head": 2.0**4})
    assert seen.not_finite.module == "block.1"
    assert seen.keep_fp32() == ["block"]
    seen, _ = look_deep("O2", device, {**factors, "head": 2.0**4}, keep_fp32=["block"])
    assert seen.not_finite is not None and seen.keep_fp32() == []
    assert "try dtype=torch.bfloat16" in str(seen)
    seen, _ = look_deep("O2", device, {"head": 2.0**14, "first": 2.0**4})
    assert seen.errors["head"] == math.inf and seen.keep_fp32() == []  # FP32 inside of it would not help
    assert look_deep("O5", device, {**factors, "head": 2.0**4})[0].not_finite is None


class Apart(nn.Module):
    """The input of `small` is small: so is the gradient of its weight, though not that of its output."""

    def __init__(self):
        super().__init__()
        self.small, self.large = (nn.Linear(4, 4, bias=False) for _ in range(2))

    def forward(self, x):
        return self.small(x * 2.0**-13) + self.large(x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_gradient_that_flushes_is_named_and_the_list_brings_it_back(level, device):
    """2**-13 * 2**-12 is below FP16's smallest number, and `large` leaves no room for a scale of 2**16."""
    options = {"model": Apart(), "weight": 2.0**-12, "value": 1.0}
    seen, _ = look_deep(level, device, {}, **options)
    gradient = seen.gradients["small.weight"]
    if level == "O0":  # every number is there to be counted
        assert set(gradient.counts) == {-25} and gradient.flushed(1.0) == 1.0 and gradient.flushed(2.0) == 0.0
        assert seen.best_scale() == 2.0**27 and seen.keep_fp32() == []
        return
    assert gradient.zeros == gradient.total == 32
    assert seen.keep_fp32() == ["small"]
    assert "gradients that are 0 throughout: small.weight" in str(seen)
    options["model"] = Apart()
    seen, _ = look_deep(level, device, {}, **options, keep_fp32=["small"])
    assert set(seen.gradients["small.weight"].counts) == {-25}
    assert "small" not in seen.keep_fp32()


@pytest.mark.parametrize("device", DEVICES)
def test_a_gradient_that_even_the_best_scale_flushes_is_named(device):
    model = training.linear([[1.0, 1.0]], device)
    with inspect(model) as seen:
        (model(torch.tensor([[2.0**-20, 2.0**-21]], device=device)) * 2.0**-20).sum().backward()
    assert seen.best_scale() == 2.0**55
    seen.gradients["body.1.weight"] = Histogram.merged([seen.gradients["weight"]])
    seen.gradients["head.weight"] = Histogram()
    seen.gradients["head.weight"].add(torch.full((3,), 2.0**14))
    assert seen.best_scale() == 2.0
    assert seen.keep_fp32() == ["body.1"]


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
def test_an_autograd_function_of_the_users_is_named(level):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), Applies(), nn.Linear(4, 4, bias=False))
    seen, _ = look_deep(level, "cpu", {}, model=model)
    assert (seen.not_finite.module, seen.not_finite.op, seen.not_finite.direction) == ("1", "Twice", "backward")


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_modules_are_counted_once(reentrant):
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


class Cuda(torch.cuda.amp.GradScaler):
    """torch's older name, which by itself is for CUDA alone."""

    def __init__(self, device, **options):
        torch.amp.GradScaler.__init__(self, device, **options)


class Theirs(torch.amp.GradScaler):
    """With methods of its own around torch's, as FSDP's."""

    def scale(self, outputs):
        return super().scale(outputs)

    def step(self, optimizer):
        return super().step(optimizer)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("make", [amp.GradScaler, torch.amp.GradScaler, Cuda, Theirs])
def test_a_grad_scalers_scale_is_divided_out(make, given):
    model, scaler = training.linear([[1.0, 1.0]]), make("cpu", init_scale=2.0**10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with inspect(model, optimizer, scaler=scaler if given else None) as seen:
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert (seen.gradients["weight"].counts, seen.scale, seen.step) == ({0: 2}, 2.0**10, 1)
    assert not observers._observers


def test_what_is_no_scaler_of_torchs_is_asked():
    class Eight:
        def get_scale(self):
            return 8.0

    model = training.linear([[1.0, 1.0]])
    with inspect(model, torch.optim.SGD(model.parameters(), lr=0.1), scaler=Eight()) as seen:
        (model(torch.ones(1, 2)).sum() * 8.0).backward()
    assert (seen.gradients["weight"].counts, seen.scale) == ({0: 2}, 8.0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_scaler_is_that_of_its_loss_alone(reentrant):
    """Two losses of which one is scaled, each in a backward of its own; a part of the model is checkpointed."""
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
def test_a_step_that_a_scaler_skips_is_a_step(make, unscales):
    model, scaler = identity(Net()), make("cpu", init_scale=2.0**10)
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


def test_delayed_gradients_are_counted_without_their_scale():
    model = training.linear([[1.0, 1.0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale=1024.0)
    with inspect(model, optimizer) as seen:
        for delay in (True, False):
            training.backward(model(torch.ones(1, 2)).float().sum(), optimizer, delay_unscale=delay)
        optimizer.step()
    assert (seen.gradients["weight"].counts, seen.step) == ({0: 4}, 1)


def test_two_models_at_once():
    """A GAN's: each sees what is its own, and neither what the other computes to see."""
    models = [training.linear([[2.0]]), nn.Sequential(training.linear([[2.0]]), nn.Tanh())]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.0) for model in models]
    amp.initialize(models, optimizers, opt_level="O2", loss_scale=1.0, verbosity=0)
    with inspect(models[0], optimizers) as first, inspect(models[1], optimizers) as second:
        for value in (0.0, 6e4):
            training.backward(models[1](models[0](torch.full((1, 1), value))).float().sum(), optimizers)
            for optimizer in optimizers:
                optimizer.step()
    assert str(first.not_finite).startswith("forward of linear in the model itself, step 2: from inputs of 2 to 6")
    assert first.not_finite == dataclasses.replace(second.not_finite, module="", remedy=())
    assert second.not_finite.module is None
    assert first.activations.keys() == {""} and second.activations.keys() == {"", "0", "1"}
    assert first.errors.keys() == {""} and second.errors.keys() == {"0", "1"}


def test_no_activation_is_held():
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
def test_modules_of_many_kinds(level, device):
    torch.manual_seed(0)
    model = Attends().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0)
    with inspect(nn.DataParallel(model) if device == "cpu" else model, optimizer) as seen:
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


def test_models_in_fp64():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
    with inspect(model) as seen:
        (model(torch.ones(1, 4, dtype=torch.float64)).sum() * 1e300).backward()
        model[1](torch.ones(1, dtype=torch.float64)).mul(1e300).mul(1e-300)
    assert seen.not_finite is None
    assert seen.errors["0"] < 1e-6
    assert all(set(histogram.counts) == {127} for histogram in seen.activation_gradients.values())


def test_what_stands_out_is_printed():
    factors, weight, *_ = PLANTED["forward"]
    seen, _ = look_deep("O2", "cpu", factors, weight)
    seen.scale = 2.0**10
    seen.gradients = {"first.weight": Histogram(), "head.weight": Histogram()}
    seen.gradients["first.weight"].add(torch.tensor([2.0**-40, 1.0, 1.0, 128.0]))
    seen.gradients["head.weight"].add(torch.tensor([1.0]))
    assert str(seen).splitlines() == [
        "2 steps; loss scale 1024, the best one 256",
        "not finite: forward of linear in block.1, step 1: from inputs of 0 to 4.1e+03 it made a number that is not "
        "finite",
        "relative error against FP32:",
        "  module   error",
        "  block.1    inf",
        "  first        0",
        "  block.0      0",
        "  block.2      0",
        "  head         0",
        "share of gradients that FP16 loses, at the loss scale now, at 1 and at the best:",
        "  gradient of   flushed:                overflowed:",
        "                     now   at 1   best          now  at 1  best",
        "  first.weight     25.0%  25.0%  25.0%        25.0%  0.0%  0.0%",
        "keep_fp32=['block']",
    ]
    assert "not finite: nothing" in str(type(seen)())


def test_what_is_no_module_is_named():
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
def test_what_adds_a_gradient_to_one_that_is_not_finite_is_not_named(level, root_first):
    seen, _ = look_deep(level, "cpu", {}, model=Residual(root_first))
    found = seen.not_finite
    assert (found.module, found.op, found.direction) == ("block", "sqrt", "backward")


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_what_fp32_makes_as_well_has_no_list(level):
    options = {} if level == "O0" else {"keep_fp32": ["block"]}
    seen, _ = look_deep(level, "cpu", {}, model=Residual(), **options)
    assert seen.not_finite.module == "block" and seen.keep_fp32() == []
    assert ("FP32 made it" in str(seen)) == (level == "O0")


def test_a_nan_that_is_asked_for_is_nobodys_fault():
    class Pads(nn.Linear):
        def forward(self, x):
            x = x.clone()
            x[0] = math.nan
            return super().forward(x.nan_to_num())

    model = Pads(4, 4)
    with inspect(model) as seen:
        model(torch.ones(2, 4)).sum().backward()
    assert seen.not_finite is None
