"""`saved_activations="8bit"`: gradients are those of the values that were coded, and of exact ones elsewhere."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import DEVICES
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from amp_patch import amp
from amp_patch.diagnose.recording.activations import WeighedStep
from amp_patch.environment import name_of
from amp_patch.multi_tensor import plain_codes
from amp_patch.policy import resolve

CAST = [("O2", torch.float16), ("O2", torch.bfloat16), ("O5", torch.bfloat16)]


@pytest.fixture(autouse=True)
def restored():
    yield
    amp.restore()


def by_hand(x: Tensor) -> Tensor:
    """Code a dense `x` in the order of its memory, and decode it, in plain torch."""
    flat = x.detach().as_strided((x.numel(),), (1,))
    codes, values = torch.empty_like(flat, dtype=torch.float8_e4m3fn), torch.empty_like(flat)
    scales = torch.empty(-(-flat.numel() // 256), device=x.device)
    plain_codes.encode([flat], [codes], [scales])
    plain_codes.decode([codes], [values], [scales])
    return values.as_strided(x.shape, x.stride())


def trained(model: nn.Module, level: str, dtype: torch.dtype, coded: bool, **options: Any) -> nn.Module:
    options |= {"saved_activations": "8bit"} if coded else {}
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(1))], lr=0.1)
    given = dtype if level != "O5" else None
    made, _ = amp.initialize(model, optimizer, opt_level=level, dtype=given, loss_scale=1.0, verbosity=0, **options)
    return made


def gradients(
    make: Callable[[], nn.Module], inputs: Tensor, level: str, dtype: Any, coded: bool, **options: Any
) -> list[Tensor]:
    """Return the gradients of the input and of the weights of one backward."""
    torch.manual_seed(0)
    device = inputs.device
    model = trained(make().to(device), level, dtype, coded, **options)
    x = inputs.clone()
    if x.is_floating_point():
        x.requires_grad_()
    torch.manual_seed(1)
    out = model(x)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out))
    found = [x.grad] if x.is_floating_point() else []
    found += [p.grad.clone() for p in model.parameters()]
    amp.restore()
    return found


def sample(*shape: int, dtype: torch.dtype, device: Any) -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(3))
    return x.to(device, dtype).float()  # without a rounding at the model's entry


def conv() -> nn.Module:
    return nn.Conv2d(8, 16, 3, padding=1)


# name -> (the module, the shape of its input)
OF_INPUTS = {
    "linear": (lambda: nn.Linear(64, 96), (128, 64)),
    "convolution": (conv, (4, 8, 16, 16)),
    "GELU": (nn.GELU, (64, 128)),
    "ReLU": (nn.ReLU, (64, 128)),
    "SiLU": (nn.SiLU, (64, 128)),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("level", "dtype"), CAST)
@pytest.mark.parametrize("name", OF_INPUTS)
def test_gradients_that_read_the_input_are_those_of_the_coded_input(name, level, dtype, device):
    make, shape = OF_INPUTS[name]
    x = sample(*shape, dtype=dtype, device=device)
    coded = gradients(make, x, level, dtype, True)
    exact = gradients(make, x, level, dtype, False)
    expected = gradients(make, by_hand(x.to(dtype)).float(), level, dtype, False)
    if len(coded) > 1:  # a product: the input's gradient reads the weight, the weight's reads the input
        expected[0] = exact[0]
    assert all(torch.equal(mine, truth) for mine, truth in zip(coded, expected, strict=True))
    if name != "ReLU":
        assert any(not torch.equal(mine, other) for mine, other in zip(coded, exact, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["dropout", "embedding", "ReLU"])
def test_masks_and_indices_are_exact(name, device):
    make = {"dropout": lambda: nn.Dropout(0.25), "embedding": lambda: nn.Embedding(512, 64), "ReLU": nn.ReLU}[name]
    x = sample(64, 128, dtype=torch.bfloat16, device=device)
    if name == "ReLU":
        x *= torch.logspace(-30, 3, 128, device=device)  # far below 2^-18 of the largest of their block
    if name == "embedding":
        x = torch.arange(8192, device=device).view(64, 128) % 512
    coded, exact = (gradients(make, x, "O5", torch.bfloat16, each) for each in (True, False))
    assert all(torch.equal(mine, truth) for mine, truth in zip(coded, exact, strict=True))


@pytest.mark.parametrize("rows", [128, 8192])
def test_norms_keep_their_statistics(rows):
    x = sample(rows, 64, dtype=torch.bfloat16, device="cpu")
    mine = gradients(lambda: nn.LayerNorm(64), x, "O5", torch.bfloat16, True)
    low, weight, bias = x.bfloat16(), torch.ones(64).bfloat16(), torch.zeros(64).bfloat16()
    out, mean, rstd = torch.native_layer_norm(low, (64,), weight, bias, 1e-5)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    expected = torch.ops.aten.native_layer_norm_backward(
        upstream, by_hand(low), (64,), mean, rstd, weight, bias, [True, True, True]
    )
    assert torch.equal(mine[0], expected[0].float())


class Attention(nn.Module):
    """Attention of `[3, B, H, T, D]`, or of `[B, T, 3, H, D]`, as a layer makes them in one product."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = x.unbind(self.at)
        if self.at:
            query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)


@pytest.mark.parametrize(("level", "dtype"), CAST)
@pytest.mark.parametrize(("at", "shape"), [(0, (3, 4, 4, 512, 32)), (2, (4, 512, 3, 4, 32))])
def test_attention_keeps_its_sums(at, shape, level, dtype):
    x = sample(*shape, dtype=dtype, device="cpu")  # 8,192 sums
    # The kernels of a CPU that emulates compute the oracle's attention in another type than these.
    mine, exact = (gradients(lambda: Attention(at), x, level, dtype, each, cpu_half="native")[0] for each in (True, 0))
    low = x.to(dtype)
    parts = low.unbind(at) if at == 0 else [each.transpose(1, 2) for each in low.unbind(at)]
    out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*parts, 0.0, True)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    parts = [by_hand(each if at == 0 else each.contiguous()) for each in parts]
    back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    expected = back(upstream, *parts, by_hand(out), sums, 0.0, True)
    made = mine.unbind(at) if at == 0 else [each.transpose(1, 2) for each in mine.unbind(at)]
    assert all(torch.equal(one, truth.float()) for one, truth in zip(made, expected, strict=True))
    assert not torch.equal(mine, exact)


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5", "O5+split", "O5+split+8bit"])
def test_a_training_learns_as_without_codes_in_a_third_of_the_bytes(level):
    kept, losses = {}, {}
    for name in (level, f"{level}+act8"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = amp.initialize(model, optimizer, opt_level=name, verbosity=0)
        inputs = torch.randn(512, 64)
        classes = inputs[:, :4].argmax(1)
        for _ in range(20):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs).float(), classes)
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        losses[name] = loss.item()
        kept[name] = held_bytes(model, inputs)
        amp.restore()
    assert abs(losses[level] - losses[f"{level}+act8"]) < 0.05 and losses[level] < 0.5
    assert kept[f"{level}+act8"] < 0.58 * kept[level]


def held_bytes(model: nn.Module, inputs: Tensor) -> int:
    """Return the bytes that one forward's graph holds, weights aside, as a recording counts them."""
    weighed = WeighedStep([*model.parameters(), *model.buffers()], 0)
    out = model(inputs)
    held = weighed.leave()["activations"]
    assert out.requires_grad and held is not None
    return held


class Gated(nn.Module):
    """Multiplies by a view of few elements: one for each row, or windows that overlap."""

    def __init__(self, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.view, self.weight = view, nn.Parameter(torch.ones(64, 128))

    def forward(self, x: Tensor) -> Tensor:
        return self.view((x * self.weight).sin()) * self.weight[:, :1]


@pytest.mark.parametrize("view", [lambda x: x[:, :1].expand(64, 8192), lambda x: x.unfold(1, 64, 1).transpose(0, 1)])
def test_views_of_few_elements_take_no_memory_of_their_own(view):
    kept = []
    for coded in (False, True):
        kept.append(held_bytes(trained(Gated(view), "O5", None, coded), torch.randn(64, 128)))
        amp.restore()
    assert kept[1] <= kept[0]


def test_what_an_embedding_chooses_is_coded():
    kept = []
    for coded in (False, True):
        model = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 64))
        kept.append(held_bytes(trained(model, "O5", None, coded), torch.arange(512) % 50))
        amp.restore()
    assert kept[1] < kept[0] - 0.45 * 2 * 512 * 64


def test_a_value_is_coded_once(monkeypatch):
    from amp_patch.model import saved_activations

    made = []
    encode = saved_activations._encode
    monkeypatch.setattr(saved_activations, "_encode", lambda flat: made.append(flat.numel()) or encode(flat))

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(64, 32), nn.Linear(64, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x) + self.two(x.view(2, 64, 64)).view(128, 32)

    gradients(Twice, sample(128, 64, dtype=torch.bfloat16, device="cpu"), "O5", None, True)
    assert made == [8192]


def test_weights_and_their_casts_are_exact():
    for level in ("O1", "O5"):
        torch.manual_seed(0)
        model = nn.Linear(128, 64)
        model = trained(model, level, torch.float16, True)
        x = torch.randn(4, 128, requires_grad=True)  # 512 elements, not coded
        out = model(x)
        out.float().sum().backward()
        truth = model.weight.detach().to(torch.float16 if level == "O1" else torch.bfloat16).float().sum(0)
        torch.testing.assert_close(x.grad[0], truth, rtol=2e-2, atol=1e-2)
        plain = trained_gradient(level)
        assert torch.equal(x.grad, plain)
        amp.restore()


def trained_gradient(level: str) -> Tensor:
    amp.restore()
    torch.manual_seed(0)
    model = trained(nn.Linear(128, 64), level, torch.float16, False)
    x = torch.randn(4, 128, requires_grad=True)
    model(x).float().sum().backward()
    return x.grad


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_activations_of_a_weights_shape_are_coded(level):
    x = sample(96, 64, dtype=torch.bfloat16, device="cpu")
    dtype = None if level == "O5" else torch.bfloat16
    mine = gradients(lambda: nn.Linear(64, 96), x, level, dtype, True)
    expected = gradients(lambda: nn.Linear(64, 96), by_hand(x.bfloat16()).float(), level, dtype, False)
    assert torch.equal(mine[1], expected[1]) and torch.equal(mine[0], expected[0])


NEEDS_EXACTLY: dict[str, Callable[[Tensor], Tensor]] = {
    "log_softmax": lambda x: x.log_softmax(-1),
    "negative likelihood": lambda x: nn.functional.nll_loss(x.log_softmax(-1), torch.arange(64, device=x.device)),
    "cross_entropy": lambda x: nn.functional.cross_entropy(x, torch.arange(64, device=x.device)),
    "logsumexp": lambda x: x.logsumexp(-1),
    "logcumsumexp": lambda x: x.float().logcumsumexp(-1),
    "amax": lambda x: x.amax(-1),
    "amin": lambda x: (x + 0).amin(0),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "median": lambda x: x.float().median(),
    "aminmax": lambda x: torch.stack(x.aminmax(dim=-1)),
    "the largest magnitude": lambda x: x.norm(p=math.inf, dim=-1),
    "dist": lambda x: torch.dist(x[:32].float() * 2, x[32:].float(), p=math.inf),
    "cdist": lambda x: torch.cdist(x.float() * 2, x.float().flip(0), p=math.inf),
    "scatter_reduce": lambda x: (x.float() * 2).scatter_reduce(
        0, torch.arange(64, device=x.device)[:, None].expand(64, 128) // 2, x.float(), "amax"
    ),
    "mse_loss": lambda x: F.mse_loss(x, x.detach() * 1.01),
    "smooth_l1_loss": lambda x: nn.SmoothL1Loss(beta=0.1)(x, x.detach() * 1.01),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x.float() / 99 + 0.5, torch.zeros_like(x).float()),
    "grid_sample": lambda x: F.grid_sample(
        torch.arange(4096.0, device=x.device).sin().view(1, 1, 64, 64),
        x.float().view(1, 64, 64, 2) / 40,
        align_corners=True,
    ),
}


class Applies(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NEEDS_EXACTLY)
def test_ops_get_exactly_what_backward_compares_or_takes_the_exponential_of(name, device):
    x = 8 * sample(64, 128, dtype=torch.bfloat16, device=device)
    function = NEEDS_EXACTLY[name]
    mine, exact = (gradients(lambda: Applies(function), x, "O5", None, each)[0] for each in (True, False))
    assert mine.count_nonzero() and torch.equal(mine, exact)


def test_a_write_into_a_tensor_that_is_saved_as_it_is_raises_as_in_torch():
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(16))

        def forward(self, x: Tensor) -> Tensor:
            small = x * 1
            out = small * self.scale
            small.add_(1)
            return out

    model = trained(Writes(), "O5", torch.bfloat16, True)
    out = model(torch.ones(4, 16))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_write_into_a_coded_tensor_changes_no_gradient():
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            out = self.linear(inner := x * 1)
            inner.zero_()
            return out

    x = sample(128, 64, dtype=torch.bfloat16, device="cpu")
    mine = gradients(Writes, x, "O5", None, True)
    torch.manual_seed(0)
    assert torch.equal(
        mine[1], gradients(lambda: nn.Linear(64, 64), by_hand(x.bfloat16()).float(), "O5", None, False)[1]
    )


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.linear, self.reentrant = nn.Linear(64, 64), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.linear, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_keep_what_they_handle(reentrant):
    x = sample(128, 64, dtype=torch.bfloat16, device="cpu")
    mine, exact = (gradients(lambda: Checkpointed(reentrant), x, "O5", None, coded) for coded in (True, False))
    assert all(torch.equal(one, other) for one, other in zip(mine, exact, strict=True))


def test_hooks_of_the_user_inside_the_forward_keep_what_they_handle():
    def exactly(x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
            return x.sin()

    x = 100 * sample(128, 64, dtype=torch.bfloat16, device="cpu")
    mine, exact = (gradients(lambda: Applies(exactly), x, "O5", None, coded)[0] for coded in (True, False))
    assert torch.equal(mine, exact)


@pytest.mark.skipif(not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"), reason="since torch 2.8")
def test_hooks_of_the_user_keep_what_they_handle():
    x = sample(128, 64, dtype=torch.bfloat16, device="cpu")
    with saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
        mine = gradients(lambda: nn.Linear(64, 64), x, "O5", None, True)
    exact = gradients(lambda: nn.Linear(64, 64), x, "O5", None, False)
    assert all(torch.equal(one, other) for one, other in zip(mine, exact, strict=True))


def test_an_overflow_in_a_coded_tensor_is_still_found():
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2+act8", loss_scale="dynamic", verbosity=0)
    before = [p.detach().clone() for p in amp.master_params(optimizer)]
    x = torch.randn(128, 64)
    x[3, 5] = float("inf")
    with amp.scale_loss(model(x).float().nan_to_num().sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, amp.master_params(optimizer), strict=True))


@pytest.mark.parametrize("level", ["O0", "O3", "O6", "O7"])
def test_other_levels_refuse_it_by_name(level):
    model = nn.Linear(4, 4)
    with pytest.raises(
        ValueError, match=r"saved_activations is '8bit' at opt_level 'O\d'; wanted None, or '8bit' at O1, O2, O4 or O5"
    ):
        amp.initialize(model, opt_level=level, saved_activations="8bit")
    with pytest.raises(ValueError, match=r"saved_activations is 'int4' at opt_level 'O5'; wanted None, or '8bit'"):
        amp.initialize(model, opt_level="O5", saved_activations="int4")
    assert type(model) is nn.Linear


def test_the_rung_goes_in_any_order():
    names = {
        name_of(policy_of_name(name)) for name in ("O5+act8+split+8bit", "O5+split+8bit+act8", "O5+8bit+act8+split")
    }
    assert names == {"O5+split+8bit+act8"}
    assert resolve("O1", saved_activations="8bit").saved_activations == "8bit"


def policy_of_name(name: str) -> Any:
    from amp_patch.environment import named_level

    return named_level(name).policy()


def test_copies_keep_it_and_calls_without_gradients_save_nothing():
    model = trained(nn.Linear(64, 64), "O5", torch.bfloat16, True)
    x = sample(128, 64, dtype=torch.bfloat16, device="cpu")
    for each in (model, copy.deepcopy(model)):
        each(x).sum().backward()
        weight = next(each.parameters())
        expected = by_hand(x.bfloat16()).sum(0)
        torch.testing.assert_close(weight.grad[0].float(), expected.float(), rtol=2**-7, atol=1e-2)
    with torch.no_grad():
        assert not model(x).requires_grad


@pytest.mark.program
def test_compiled_models_are_refused_by_name():
    model = trained(nn.Sequential(nn.Linear(64, 64), nn.GELU()), "O5", torch.bfloat16, True)
    with pytest.raises(Exception, match="saved_activations='8bit'"):
        torch.compile(model, backend="eager", fullgraph=True)(torch.randn(128, 64))
