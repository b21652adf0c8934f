"""Products in FP8 and FP4: which calls they are, and their numbers, forward and backward, eager and compiled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import reference
import torch
import wrapper_backends
from casting import same_as_eager
from conftest import WRAPPERS
from crossed import crossed
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from amp_patch.casts import install, low_bit, regions
from amp_patch.casts.formats import FORMATS
from amp_patch.policy import OPT_LEVELS, Policy

LEVELS = ("O6", "O7")
OPERATOR = torch.ops.amp_patch.low_bit_product.default


class Products(TorchDispatchMode):
    """Record the calls of the operator: the roles of its operands, and whether they are Hadamard transformed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str, bool]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is OPERATOR:
            self.seen.append(tuple(args[4:7]))
        return function(*args, **(kwargs or {}))


def policy_of(level: str, recipe: str = "mxfp8") -> Policy:
    return replace(OPT_LEVELS[level], product_format=recipe)


@pytest.fixture(name="installed", params=WRAPPERS)
def installed_fixture(request: pytest.FixtureRequest) -> Iterator[None]:
    with wrapper_backends.use_backend(request.param):
        install.install()
        yield
        install.uninstall()


def low(*shape: int, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(shape).bfloat16()


def as_op(a: Tensor, b: Tensor, bias: Tensor | None = None, recipe: str = "mxfp8") -> Tensor:
    role = "weight" if b.dim() == 2 else "activation"
    return OPERATOR(a, b, bias, recipe, "activation", role, False)


@pytest.mark.parametrize("recipe", reference.FORMATS)
def test_a_layer_and_its_two_gradients_are_the_references(recipe):
    x, weight, grad = low(24, 40), low(56, 40, seed=1), low(24, 56, seed=2)
    x.requires_grad_(), weight.requires_grad_()
    result = as_op(x, weight, recipe=recipe)
    result.backward(grad)
    expected = reference.linear(x.detach(), weight.detach(), grad, recipe)
    for found, exact in zip((result, x.grad, weight.grad), expected, strict=True):
        assert found is not None and found.dtype is torch.bfloat16
        assert (found.double() - exact).abs().max() <= 2.0**-8 * exact.abs().max()  # rounded to BF16 once
        assert (found.detach() == exact.bfloat16()).float().mean() > 0.99  # sums in another order


@pytest.mark.parametrize("recipe", ["fp8", "fp8_tensorwise"])
def test_a_layer_is_torchs_scaled_mm(recipe):
    x, weight, bias = low(32, 64), low(48, 64, seed=1), low(48, seed=2)
    operands = []
    for each in x, weight:
        m = each.float().abs().amax(1, keepdim=True) if recipe == "fp8" else each.float().abs().max()
        scale = torch.exp2((m / 448).log2().ceil()) if recipe == "fp8" else m / 448
        operands.append(((each.float() / scale).to(torch.float8_e4m3fn), scale))
    (a, a_scale), (b, b_scale) = operands
    try:
        expected = torch._scaled_mm(
            *(a, b.t()),
            scale_a=a_scale,
            scale_b=b_scale.t().contiguous() if recipe == "fp8" else b_scale,
            bias=bias,
            out_dtype=torch.bfloat16,
        )
    except (RuntimeError, ValueError) as error:
        pytest.skip(f"torch._scaled_mm takes no such operands here: {error}")
    found = as_op(x, weight, bias, recipe)
    assert (found != expected).float().mean() < 0.01  # sums in another order
    torch.testing.assert_close(found, expected, rtol=2.0**-7, atol=2.0**-7)


@pytest.mark.parametrize("recipe", FORMATS)
def test_small_integers_are_multiplied_exactly(recipe):
    largest, numbers = (6.0, (0, 1, 2, 3, 6)) if "fp4" in recipe else (7.0, (0, 1, 2, 3, 4, 5, 6, 7))
    torch.manual_seed(0)
    a, b = (torch.tensor([*numbers, -1.0, -largest])[torch.randint(len(numbers) + 2, (24, 48))] for _ in range(2))
    a[:, ::16] = b[:, ::16] = largest  # of each block
    found, exact = as_op(a.bfloat16(), b.bfloat16(), recipe=recipe), (a @ b.T).bfloat16()
    if FORMATS[recipe].scale != "two_levels":
        assert torch.equal(found, exact)
    else:  # the tensor's scale is no power of two, and moves ties of the last rounding
        assert (found != exact).float().mean() < 0.05
        torch.testing.assert_close(found, exact, rtol=2.0**-7, atol=0)


# name -> (call, shapes, what the operator is given)
CALLS: dict[str, tuple[Any, list[tuple[int, ...]], Any]] = {
    "linear": (lambda x, w, b: F.linear(x, w, b), [(5, 32), (7, 32), (7,)], as_op),
    "linear of three dimensions": (
        lambda x, w, b: F.linear(x, w, bias=b),
        [(2, 5, 32), (7, 32), (7,)],
        lambda x, w, b: as_op(x.flatten(0, 1), w, b).view(2, 5, 7),
    ),
    "linear of a vector": (lambda x, w: F.linear(x, w), [(32,), (7, 32)], lambda x, w: as_op(x[None], w)[0]),
    "module": (
        lambda x, w, b: torch.func.functional_call(nn.Linear(32, 7), {"weight": w, "bias": b}, (x,)),
        [(5, 32), (7, 32), (7,)],
        as_op,
    ),
    "@": (lambda a, b: a @ b, [(5, 32), (32, 7)], lambda a, b: as_op(a, b.mT)),
    "torch.matmul": (lambda a, b: torch.matmul(a, b), [(5, 32), (32, 7)], lambda a, b: as_op(a, b.mT)),
    "linalg.matmul": (lambda a, b: torch.linalg.matmul(a, b), [(5, 32), (32, 7)], lambda a, b: as_op(a, b.mT)),
    "Tensor.mm": (lambda a, b: a.mm(b), [(5, 32), (32, 7)], lambda a, b: as_op(a, b.mT)),
    "mm by name": (lambda a, b: torch.mm(input=a, mat2=b), [(5, 32), (32, 7)], lambda a, b: as_op(a, b.mT)),
    "bmm": (lambda a, b: torch.bmm(a, b), [(2, 5, 32), (2, 32, 7)], lambda a, b: as_op(a, b.mT)),
    "matmul of batches": (
        lambda a, b: a @ b,
        [(2, 1, 5, 32), (3, 32, 7)],
        lambda a, b: as_op(a.expand(2, 3, 5, 32).flatten(0, 1), b.expand(2, 3, 32, 7).flatten(0, 1).mT).view(
            2, 3, 5, 7
        ),
    ),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b), [(7,), (5, 32), (32, 7)], lambda c, a, b: as_op(a, b.mT, c)),
    "Tensor.addmm": (lambda c, a, b: c.addmm(a, b), [(5, 7), (5, 32), (32, 7)], lambda c, a, b: as_op(a, b.mT, c)),
    "baddbmm": (
        lambda c, a, b: torch.baddbmm(c, a, b),
        [(2, 5, 7), (2, 5, 32), (2, 32, 7)],
        lambda c, a, b: as_op(a, b.mT, c),
    ),
}


@crossed({"name": list(CALLS), "level": LEVELS}, meet=1)
def test_calls_are_low_bit_products_forward_and_backward(name, level, installed):
    function, shapes, operator = CALLS[name]
    inputs = [low(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    copies = [each.detach().clone().requires_grad_() for each in inputs]
    expected = operator(*copies)
    with regions.region(policy_of(level)), Products() as products:
        result = function(*inputs)
        assert len(products.seen) == 1
        assert result.dtype is torch.bfloat16 and torch.equal(result, expected)
        assert not torch.equal(result, function(*(each.float() for each in inputs)).bfloat16()) or level == "O6"
        grad = torch.randn_like(result)
        result.backward(grad)
    expected.backward(grad)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(inputs, copies, strict=True))


def test_fp32_operands_are_lowered_at_o6_and_left_alone_at_o7(installed):
    x, weight = low(5, 32).float(), low(7, 32, seed=1).float()
    with regions.region(policy_of("O6")):
        assert torch.equal(F.linear(x, weight), as_op(x.bfloat16(), weight.bfloat16()))
    with regions.region(policy_of("O7")), Products() as products:
        assert torch.equal(F.linear(x, weight), torch.ops.aten.linear(x, weight)) and not products.seen
        assert x.bfloat16().softmax(-1).dtype is torch.bfloat16  # nothing else is cast
        assert F.layer_norm(x.bfloat16(), (32,)).dtype is torch.bfloat16


STAY: dict[str, Any] = {
    "mv": lambda: low(5, 32) @ low(32),
    "attention": lambda: F.scaled_dot_product_attention(low(1, 2, 8, 16), low(1, 2, 8, 16), low(1, 2, 8, 16)),
    "conv2d": lambda: F.conv2d(low(1, 3, 8, 8), low(4, 3, 3, 3)),
    "einsum": lambda: torch.einsum("ij,jk->ik", low(4, 32), low(32, 5)),
    "addmm with beta": lambda: torch.addmm(low(4, 5), low(4, 32), low(32, 5), beta=0.5),
    "float64": lambda: low(4, 32).double() @ low(32, 5).double(),
    "int64": lambda: torch.ones(4, 4, dtype=torch.long) @ torch.ones(4, 4, dtype=torch.long),
    "sparse": lambda: low(4, 4).float().to_sparse() @ low(4, 4).float(),
    "out": lambda: torch.mm(low(4, 32), low(32, 5), out=torch.empty(4, 5, dtype=torch.bfloat16)),
}


@crossed({"name": list(STAY), "level": LEVELS}, meet=1)
def test_other_products_stay_as_they_are(name, level, installed):
    with regions.region(replace(policy_of(level), product_format=None)):
        expected = STAY[name]()
    with regions.region(policy_of(level)), Products() as products:
        found = STAY[name]()
    assert not products.seen and found.dtype is expected.dtype and torch.equal(found, expected)


@pytest.mark.parametrize("level", LEVELS)
def test_errors_are_torchs_own(level, installed):
    with regions.region(policy_of(level)):
        with pytest.raises(RuntimeError, match=r"shape|size"):
            low(5, 32) @ low(31, 7)
        with pytest.raises(RuntimeError, match=r"matri|2D|dim"):
            torch.mm(low(2, 5, 32), low(32, 7))


def test_gradients_are_told_apart_and_only_a_weights_is_spread(installed):
    x, weight = low(5, 32).requires_grad_(), low(7, 32, seed=1).requires_grad_()
    with regions.region(policy_of("O6", "nvfp4")), Products() as products:
        F.linear(x, weight).sum().backward()
        (x.unsqueeze(0) @ x.unsqueeze(0).mT).sum().backward()
    assert products.seen == [
        ("activation", "weight", False),
        ("gradient", "weight", False),
        ("gradient", "activation", True),
        ("activation", "activation", False),
        ("gradient", "activation", False),
        ("gradient", "activation", False),
    ]


def test_stochastic_rounding_draws_nothing_from_torchs_generator(installed):
    x, weight = low(16, 32).requires_grad_(), low(16, 32, seed=1)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with regions.region(policy_of("O6", "nvfp4")):
        F.linear(x, weight).square().sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


def penalty(x: Tensor, weight: Tensor) -> list[Tensor]:
    """The gradients of a loss, and those of a penalty on them."""
    y = F.linear(x, weight).square().sum()
    first = torch.autograd.grad(y, [x, weight], create_graph=True)
    second = torch.autograd.grad(sum(g.float().square().sum() for g in first), [x, weight])
    return [*first, *second]


@pytest.mark.parametrize("recipe", FORMATS)
def test_double_backward_is_that_of_the_products(recipe, installed):
    x, weight = low(16, 32), low(8, 32, seed=1)
    exact = penalty(x.double().requires_grad_(), weight.double().requires_grad_())
    with regions.region(policy_of("O6", recipe)):
        found = penalty(x.requires_grad_(), weight.requires_grad_())
    bound = 0.5 if "fp4" in recipe else 0.2
    for a, b in zip(found, exact, strict=True):
        assert (a.double() - b).norm() < bound * b.norm()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_checkpointing_changes_no_bit(recipe, reentrant, installed):
    def block(x: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, up)), down)

    up, down = low(64, 32, seed=1).requires_grad_(), low(32, 64, seed=2).requires_grad_()
    results = []
    for run in block, lambda x: checkpoint(block, x, use_reentrant=reentrant):
        x = low(16, 32).requires_grad_()
        with regions.region(policy_of("O6", recipe)):
            result = run(x)
            result.square().sum().backward()
        results.append((result, x.grad, up.grad, down.grad))
        up.grad = down.grad = None
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(("level", "recipe"), [("O6", "nvfp4"), ("O7", "fp8_tensorwise")])
def test_compiled_products_are_eagers(recipe, level, installed):
    @regions.region(policy_of(level, recipe))
    def step(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        y = F.linear(x, weight)
        return y, x @ weight.t(), torch.bmm(y[None], weight[None]), y.softmax(-1)

    x, weight = low(16, 32).requires_grad_(), low(8, 32, seed=1).requires_grad_()
    compiled = same_as_eager(step, x, weight, rtol=0, atol=0)
    gradients = [torch.autograd.grad(run(x, weight)[0].square().sum(), [x, weight]) for run in (compiled, step)]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_trace_is_not_used_for_another_format(installed):
    results = {}
    compiled = torch.compile(lambda x, w: F.linear(x, w), backend="eager")
    for recipe in "fp8", "nvfp4_naive":
        with regions.region(policy_of("O6", recipe)):
            results[recipe] = compiled(low(5, 32), low(7, 32, seed=1))
        assert torch.equal(results[recipe], as_op(low(5, 32), low(7, 32, seed=1), recipe=recipe))
    assert not torch.equal(*results.values())


def test_products_of_a_kept_weight_and_of_its_views_stay_high(installed):
    weight = nn.Parameter(low(7, 32, seed=1).float())
    low_bit.keep_high(weight)
    with regions.region(policy_of("O6")), Products() as products:
        F.linear(low(5, 32), weight)
        low(5, 32) @ weight.t()
        assert not products.seen
        low_bit.release(weight)
        F.linear(low(5, 32), weight)
        assert products.seen


def test_inference_mode(installed):
    with torch.inference_mode(), regions.region(policy_of("O6")):
        found = F.linear(low(5, 32), low(7, 32, seed=1))
    assert torch.equal(found, as_op(low(5, 32), low(7, 32, seed=1)))
