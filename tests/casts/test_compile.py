"""torch.compile at every level: one graph, eager's types and numbers, and never the casts of another level."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
import training
from casting import operands, same_as_eager, zoo
from crossed import crossed
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from amp_patch import amp
from amp_patch.policy import OPT_LEVELS

# What torch's own tracing does, in plain scripts too.
pytestmark = [
    pytest.mark.program,
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be instantiated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.torch.jit"),
]


BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


def train_steps(step, count=4):
    """The losses of `count` steps, of which the third and later compile nothing."""
    losses = []
    for index in range(count):
        with torch._dynamo.config.patch(error_on_recompile=index > 1):
            losses.append(step(*training.images(index)).item())
    return losses


def step_of(model, optimizer, loss_function=F.cross_entropy):
    def step(inputs, targets):
        optimizer.zero_grad()
        loss = loss_function(model(inputs), targets)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        return loss

    return step


def initialized(level, **kwargs):
    model = training.convnet()
    return amp.initialize(model, training.SGD(model.parameters()), opt_level=level, verbosity=0, **kwargs)


# ---------------------------------------------------------------------------------------------------------------------
# Training


@crossed({"level": training.LEVELS, "backend": BACKENDS}, meet=1)
def test_a_compiled_model_trains_as_in_eager(level, backend):
    expected = train_steps(step_of(*initialized(level)))
    amp.restore()
    model, optimizer = initialized(level)
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    losses = train_steps(step_of(compiled, optimizer))
    assert losses == pytest.approx(expected, rel=2e-3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


@crossed({"how": ["torch.compile first", "in place first", "in place after"], "level": ["O1", "O2"]}, meet=1)
def test_when_the_model_is_compiled_makes_no_difference(level, how):
    expected = train_steps(step_of(*initialized(level)))
    amp.restore()
    model = training.convnet()
    optimizer = training.SGD(model.parameters())
    if how == "torch.compile first":
        model = torch.compile(model, backend="aot_eager", fullgraph=True)
    elif how == "in place first":
        model.compile(backend="aot_eager", fullgraph=True)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    if how == "in place after":
        model.compile(backend="aot_eager", fullgraph=True)
    torch._dynamo.utils.counters.clear()
    assert train_steps(step_of(model, optimizer)) == pytest.approx(expected, rel=2e-3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("level", [pytest.param("O0", marks=pytest.mark.slow), "O1", "O2"])
def test_a_whole_step_is_compiled_around_backward(level):
    # Without a skipped step: torch compiles an optimizer again when it has its state.
    expected = train_steps(step_of(*initialized(level, loss_scale=2.0**8)))
    amp.restore()
    step = torch.compile(step_of(*initialized(level, loss_scale=2.0**8)), backend="aot_eager")
    assert train_steps(step) == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_compiled_step_of_the_optimizer_skips_and_publishes(level):
    model, optimizer = initialized(level, loss_scale=2.0**10)
    plain, reference = initialized(level, loss_scale=2.0**10)
    compiled = torch.compile(optimizer.step, backend="aot_eager")
    for index in range(3):
        for net, opt, step in ((model, optimizer, compiled), (plain, reference, reference.step)):
            opt.zero_grad()
            inputs, targets = training.images(index)
            training.backward(F.cross_entropy(net(inputs * (float("inf") if index == 1 else 1)), targets), opt)
            before = training.masters_of(opt)
            step()
            assert training.same(training.masters_of(opt), before) is (index == 1)
    assert training.same(list(model.parameters()), list(plain.parameters()))


class Overflowing(nn.Module):
    """A value between two products is beyond FP16's range. In FP32 it would not become infinite."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = training.linear([[100.0] * 8] * 8), training.linear([[2.0**-10] * 8] * 8)

    def forward(self, inputs):
        return self.narrow(self.wide(inputs) * 2.0**-10)


class OverflowingBackward(Overflowing):
    """In the middle of backward, too."""

    def forward(self, inputs):
        return self.wide(self.narrow(inputs) * 2.0**-10)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("kind", [Overflowing, OverflowingBackward])
def test_emulated_fp16_overflows_and_skips_under_inductor_as_in_eager(kind, level):
    def trained(compiled):
        model = kind()
        model, optimizer = amp.initialize(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            opt_level=level,
            cpu_half="emulate",
            loss_scale=2.0**14,
            verbosity=0,
        )
        run = torch.compile(model, fullgraph=True) if compiled else model
        found, skipped = [], []
        for size, factor in ((2.0**-10, 2.0**-10), (128.0, 2.0**-10), (2.0**-10, 1.0)):
            inputs = torch.full((2, 8), size, requires_grad=True)
            optimizer.zero_grad()
            output = run(inputs)
            training.backward(output.float().sum() * factor, optimizer)
            gradients = [param.grad.clone() for param in amp.master_params(optimizer)]
            before = training.weights(model)
            optimizer.step()
            found += [output, inputs.grad, *gradients, *training.weights(model)]
            skipped.append(training.same(training.weights(model), before))
        amp.restore()
        return found, skipped

    (expected, skips), (found, skipped) = trained(False), trained(True)
    assert skipped == skips == [False, kind is Overflowing, kind is OverflowingBackward]
    assert any(value.isinf().any() for value in expected)
    for value, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(value, reference, rtol=2e-3, atol=0, equal_nan=True)


# ---------------------------------------------------------------------------------------------------------------------
# Whose casts


@crossed({"dtype": [torch.float16, torch.bfloat16], "backend": ["eager", "aot_eager"]}, meet=1)
def test_regions_inside_and_around(dtype, backend):
    def inside(x, w):
        with amp.autocast("cpu", dtype=dtype):
            cast = zoo(x, w)
            with amp.disable_casts():
                plain = zoo(x, w)
            with amp.autocast("cpu", dtype=torch.bfloat16):
                other = x @ w
            again = x @ w
        return cast, plain, other, again, x @ w

    decorated = amp.autocast("cpu", dtype=dtype)(zoo)

    for function in (inside, decorated):
        same_as_eager(function, *operands(), backend=backend, rtol=2e-2, atol=2e-2)
    with amp.autocast("cpu", dtype=dtype):
        same_as_eager(zoo, *operands(), backend=backend, rtol=2e-2, atol=2e-2)
    amp.initialize(nn.Linear(2, 2), opt_level="O4", verbosity=0)  # a process default
    same_as_eager(inside, *operands(), backend=backend, rtol=2e-2, atol=2e-2)


@crossed({"default": [None, "O1"], "backend": BACKENDS}, meet=1)
def test_beside_torch_autocast_the_inner_one_wins(default, backend):
    def ours_outside(x, w):
        with amp.autocast("cpu", dtype=torch.float16):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                theirs = x @ w, x.matmul(w), F.linear(x, w), F.layer_norm(x, (6,))
                with amp.autocast("cpu", dtype=torch.float16):
                    ours = x @ w, x.matmul(w), F.linear(x, w)
                again = x.mm(w), F.linear(x, w)
            with torch.autocast("cpu", enabled=False):
                off = x @ w, F.linear(x, w)
            return theirs, ours, again, off, (x @ w, F.linear(x, w))

    def theirs_outside(x, w):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with amp.autocast("cpu", dtype=torch.float16):
                ours = x @ w, x.matmul(w), F.linear(x, w)
            with amp.disable_casts():
                off = x @ w, x.mm(w), F.linear(x, w)
            with amp.autocast("cpu", enabled=False):
                disabled = x @ w, F.linear(x, w)
            return ours, off, disabled, decorated(x, w), (x @ w, F.linear(x, w))

    @amp.autocast("cpu", dtype=torch.float16)
    def decorated(x, w):
        return x @ w, F.linear(x, w)

    def kinds(found):
        return [{t.dtype for t in some} for some in found]

    half, bfloat, full = {torch.float16}, {torch.bfloat16}, {torch.float32}
    if default is not None:
        amp.initialize(nn.Linear(2, 2), opt_level=default, verbosity=0)
    outside, inside = ours_outside(*operands()), theirs_outside(*operands())
    assert kinds([outside[0][:3], *outside[1:]]) == [bfloat, half, bfloat, full, half]
    assert kinds(inside) == [half, full, full, half, bfloat]
    for function in (ours_outside, theirs_outside):
        compiled = same_as_eager(function, *operands(), backend=backend, rtol=2e-2, atol=2e-2)
        assert not torch._C._is_any_autocast_enabled()
        with torch.autocast("cpu", dtype=torch.bfloat16):  # a default, too, steps aside in there
            torch.testing.assert_close(compiled(*operands()), function(*operands()), rtol=2e-2, atol=2e-2)


def test_code_compiled_for_other_casts_is_not_used():
    compiled = torch.compile(lambda x, w: (x @ w, F.linear(x, w), x.mm(w)), backend="aot_eager", fullgraph=True)

    def types():
        return {t.dtype for t in compiled(*operands())}

    assert types() == {torch.float32}
    for _ in range(2):
        with amp.autocast("cpu", dtype=torch.float16):
            assert types() == {torch.float16}
        with amp.autocast("cpu", dtype=torch.bfloat16):
            assert types() == {torch.bfloat16}
        assert types() == {torch.float32}
    initialized("O1")
    assert types() == {torch.float16}
    initialized("O4")
    assert types() == {torch.bfloat16}
    with amp.disable_casts():
        assert types() == {torch.float32}
    amp.restore()
    assert types() == {torch.float32}


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.linear, self.norm, self.reentrant = nn.Linear(6, 6), nn.LayerNorm(6), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda y: self.norm(self.linear(y)).softmax(-1), x, use_reentrant=self.reentrant)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(self.attention(x, x, x)[0])


KINDS = {
    "checkpointed": lambda: (Checkpointed(False), torch.randn(4, 6, requires_grad=True)),
    "checkpointed, reentrant": lambda: (Checkpointed(True), torch.randn(4, 6, requires_grad=True)),
    "attention": lambda: (Attention(), torch.randn(2, 3, 8)),
}


@crossed({"level": training.LEVELS, "kind": KINDS, "backend": ["eager", "aot_eager"]}, meet=1)
def test_models_of_other_kinds(level, kind, backend):
    torch.manual_seed(0)
    model, inputs = kind()
    model, _ = amp.initialize(model, training.SGD(model.parameters()), opt_level=level, verbosity=0)
    compiled = same_as_eager(model, inputs, backend=backend, rtol=2e-2, atol=2e-2)
    grads = []
    for net in (compiled, model):
        model.zero_grad()
        net(inputs).pow(2).sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(*grads, rtol=5e-2, atol=5e-2)


@crossed({"level": ["O1", "O2", "O4", "O5"], "backend": ["eager", "aot_eager"]}, meet=1)
def test_a_model_with_a_layer_in_fp32_and_a_method_that_is_cast(level, backend):
    kept, _ = initialized(level, keep_fp32="head", methods=("encode",))
    same_as_eager(kept, training.images(0)[0], backend=backend, rtol=2e-2, atol=2e-2)
    same_as_eager(kept.encode, training.images(0)[0], backend=backend, rtol=2e-2, atol=2e-2)


class Product(torch.autograd.Function):
    @staticmethod
    @amp.custom_fwd
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    @amp.custom_bwd
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return grad @ b.T, a.T @ grad


class ProductFP32(Product):
    @staticmethod
    @amp.custom_fwd(cast_inputs=torch.float32)
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a @ b


@pytest.mark.parametrize("function", [Product, ProductFP32])
def test_custom_autograd_functions(function):
    def call(a, b):
        with amp.autocast("cpu", dtype=torch.bfloat16):
            return function.apply(a, b)

    x, w = (t.requires_grad_() for t in operands())
    grads = []
    for run in (call, same_as_eager(call, x, w)):
        x.grad = w.grad = None
        run(x, w).float().pow(2).sum().backward()
        grads.append((x.grad, w.grad))
    torch.testing.assert_close(*grads, rtol=2e-2, atol=2e-2)


def test_policies_with_equal_casts_share_compiled_code():
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(lambda x, w: x @ w, backend="eager", fullgraph=True)
    for scale in (1.0, 2.0):
        amp.initialize(nn.Linear(2, 2), opt_level="O1", loss_scale=scale, verbosity=0)
        assert compiled(*operands()).dtype is OPT_LEVELS["O1"].dtype
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_process_group_that_begins_changes_nothing():
    """Dynamo then drops what it knows of torch's functions, and looks at them again while wrappers stand there."""
    try:
        for _ in range(2):
            with amp.autocast("cpu", dtype=torch.bfloat16):
                same_as_eager(zoo, *operands(), backend="eager", rtol=2e-2, atol=2e-2)
                torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
                torch.distributed.destroy_process_group()
                torch._dynamo.reset()
                same_as_eager(zoo, *operands(), backend="eager", rtol=2e-2, atol=2e-2)
        amp.restore()
        same_as_eager(zoo, *operands(), backend="eager")
    finally:
        amp.restore()
        torch._dynamo.trace_rules.clear_lru_cache()
