"""Functions of newer versions of torch: grouped products, attention that is imported by name, a loss with its layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
from crossed import crossed
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from amp_patch import amp

varlen = pytest.importorskip("torch.nn.attention.varlen") if torch.__version__ >= "2.10" else None
needs_varlen = pytest.mark.skipif(varlen is None, reason="no varlen_attn")
needs_grouped = pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="no grouped_mm")
needs_loss = pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="no linear_cross_entropy")

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler", "clean_casts"),
    # What torch's own tracing does, in plain scripts too.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.torch.jit"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be instantiated"),
]

# How a user may ask for the casts -> their type.
HOW = {"O1": torch.float16, "O1 bfloat16": torch.bfloat16, "O4": torch.bfloat16, "autocast": torch.float16}


def casting(how: str, model: nn.Module, backend: str | None = None) -> Any:
    """`model` with the casts of `how`, compiled if there is a backend; in training."""
    if how == "autocast":

        def called(*args: Any) -> Any:
            with amp.autocast("cpu", dtype=HOW[how]):
                return model(*args)

    else:
        level, _, dtype = how.partition(" ")
        called = amp.initialize(model, opt_level=level, verbosity=0, **({"dtype": torch.bfloat16} if dtype else {}))
    return called if backend is None else torch.compile(called, backend=backend, fullgraph=True)


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) - 0.5


def near(found: Tensor, expected: Tensor) -> bool:
    """Tell whether the two are equal within a few roundings, in the type of `found`, of numbers around 1."""
    return torch.allclose(found.float(), expected.float(), rtol=0, atol=8 * torch.finfo(found.dtype).eps)


# ---------------------------------------------------------------------------------------------------------------------
# grouped_mm


class Experts(nn.Module):
    """Rows of a BF16 or FP16 layer, times FP32 weights of a group each."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.weight = nn.Parameter(uniform(2, 8, 16))

    def forward(self, x: Tensor) -> Tensor:
        return F.grouped_mm(self.layer(x), self.weight, offs=torch.tensor([3, 8], dtype=torch.int32))

    def by_hand(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.layer.weight.detach(), self.layer.bias.detach())
        parts = x.split([3, 5])
        return torch.cat([part @ w for part, w in zip(parts, self.weight.detach(), strict=True)])


@needs_grouped
@pytest.mark.parametrize("how", HOW)
def test_grouped_products_are_in_the_low_type_and_train(how: str) -> None:
    model, x = Experts(), uniform(8, 8, seed=1)
    expected = model.by_hand(x)
    found = casting(how, model)(x)
    assert found.dtype is HOW[how] and near(found, expected)
    (found.float() * 2).sum().backward()
    assert model.weight.grad.dtype is torch.float32 and model.weight.grad.abs().sum() > 0
    assert model.layer.weight.grad.abs().sum() > 0


# ---------------------------------------------------------------------------------------------------------------------
# flex_attention: this file has imported it before the casts are installed


class Attention(nn.Module):
    """Queries and keys normed in FP32, beside values of the low type."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.qkv, self.norm = nn.Linear(16, 48), nn.LayerNorm(8)
        self.mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 16, 16, device="cpu") if causal else None

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).view(2, 16, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind()
        return self.norm(q), self.norm(k), v

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = self.parts(x)
        return flex_attention(q, k, v, block_mask=self.mask), q, v


@torch.no_grad()  # a CPU has no backward of it
@crossed({"how": list(HOW), "backend": [None, "aot_eager"]}, meet=1)
def test_flex_attention_is_in_the_low_type(how: str, backend: str | None) -> None:
    causal = how != "autocast"
    model, x = Attention(causal), uniform(2, 16, 16, seed=1)
    expected = F.scaled_dot_product_attention(*model.parts(x), is_causal=causal)
    before = flex_attention(*model.parts(x), block_mask=model.mask)
    assert before.dtype is torch.float32
    called = casting(how, model, backend)
    for _ in range(2):  # the second takes what the first has made
        found, q, v = called(x)
        assert (q.dtype, v.dtype) == (torch.float32, HOW[how]), "as they are without a cast"
        assert found.dtype is HOW[how] and near(found, expected)
    amp.restore()
    again = flex_attention(*Attention(causal).parts(x), block_mask=model.mask)
    assert again.dtype is torch.float32, "casts off"


@torch.no_grad()
def test_flex_attention_without_casts_is_torch_s_in_a_region_without_casts() -> None:
    x = uniform(2, 16, 16)
    q, k, v = Attention(False).parts(x)
    expected = flex_attention(q, k, v)
    with amp.autocast("cpu", dtype=torch.bfloat16), amp.disable_casts():
        assert torch.equal(flex_attention(q, k, v), expected)
        compiled = torch.compile(flex_attention, backend="aot_eager", fullgraph=True)(q, k, v)
    assert compiled.dtype is torch.float32 and near(compiled, expected)


# ---------------------------------------------------------------------------------------------------------------------
# varlen_attn: has no kernels for a CPU; on the device "meta" there is all but numbers


class Operands(TorchDispatchMode):
    """Hears the types that the operator of varlen_attn is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.types: list[list[torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_varlen_attn" in str(func):
            floating = [a.dtype for a in args if isinstance(a, Tensor) and a.is_floating_point()]
            self.types.append(floating)
        return func(*args, **(kwargs or {}))


def ragged(*dtypes: torch.dtype) -> list[Any]:
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32, device="meta")
    operands = [torch.ones(8, 2, 16, dtype=dtype, device="meta", requires_grad=True) for dtype in dtypes]
    return [*operands, bounds, bounds, 5, 5]


@needs_varlen
@pytest.mark.parametrize("how", HOW)
def test_varlen_attention_is_in_the_low_type(how: str) -> None:
    low = HOW[how]

    class Ragged(nn.Module):
        def forward(self, *given: Any) -> Tensor:
            return varlen.varlen_attn(*given)

    called = casting(how, Ragged())
    given = ragged(torch.float32, torch.float32, low)
    with Operands() as heard:
        found = called(*given)
    assert heard.types == [[low] * 3] and found.dtype is low
    assert found.requires_grad


@needs_varlen
def test_varlen_attention_into_a_tensor_takes_its_type() -> None:
    out = torch.ones(8, 2, 16, dtype=torch.bfloat16, device="meta")
    given = [value.detach() if isinstance(value, Tensor) else value for value in ragged(*(torch.float32,) * 3)]
    with amp.autocast("cpu", dtype=torch.float16), Operands() as heard:
        assert varlen.varlen_attn_out(out, *given) is out
    assert heard.types == [[torch.bfloat16] * 4]


@needs_varlen
def test_the_operator_behind_varlen_attention_keeps_its_overloads_and_comes_back() -> None:
    namespace = torch.ops.torch_attn
    before, overload = namespace._varlen_attn, namespace._varlen_attn.default
    with amp.autocast("cpu", dtype=torch.bfloat16):
        assert namespace._varlen_attn is not before
        assert namespace._varlen_attn.default is overload
        assert namespace._varlen_attn.overloads() == before.overloads()
        with pytest.raises(AttributeError):
            _ = namespace._varlen_attn.__no_such_thing__
    amp.restore()
    assert namespace._varlen_attn is before


# ---------------------------------------------------------------------------------------------------------------------
# linear_cross_entropy


@needs_loss
@crossed(
    {"how": list(HOW)},
    pytest.mark.parametrize("given", [torch.float32, None], ids=["FP32", "low"]),
    {"chunked": [False, True]},
)
def test_the_loss_with_its_layer_is_fp32(how: str, given: torch.dtype | None, chunked: bool) -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(uniform(5, 8))

        def forward(self, x: Tensor) -> Tensor:
            options = nn.LinearCrossEntropyOptions() if chunked else None
            return F.linear_cross_entropy(x, self.weight, torch.arange(4), options=options)

    model, x = Head(), uniform(4, 8, seed=1).to(given or HOW[how]).requires_grad_()
    expected = F.cross_entropy((x @ model.weight.to(x.dtype).T).float(), torch.arange(4))
    loss = casting(how, model)(x)
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=8 * torch.finfo(HOW[how]).eps, check_dtype=False)
    loss.backward()
    assert x.grad.dtype is x.dtype and model.weight.grad.dtype is torch.float32


@needs_loss
@pytest.mark.parametrize("chunked", [False, True])
def test_the_layer_of_the_loss_multiplies_in_the_low_type_unless_in_chunks(chunked: bool) -> None:
    multiplied: list[torch.dtype] = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                multiplied.append(args[-1].dtype)
            return func(*args, **(kwargs or {}))

    options = nn.LinearCrossEntropyOptions() if chunked else None
    with amp.autocast("cpu", dtype=torch.bfloat16), torch.no_grad(), Products():
        F.linear_cross_entropy(uniform(4, 8), uniform(5, 8), torch.arange(4), options=options)
    assert set(multiplied) <= {torch.float32 if chunked else torch.bfloat16}
    assert multiplied or chunked
