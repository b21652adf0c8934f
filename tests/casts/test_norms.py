"""`initialize(low_precision_norms=True)`: at O1 and O4 norms give the type of an FP16 or BF16 input."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo
from conftest import DEVICES, DTYPES
from crossed import crossed
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from training import backward, check, iterate

from amp_patch import amp
from amp_patch.casts import install, regions
from amp_patch.policy import resolve

pytestmark = pytest.mark.usefixtures("clean_casts")

LOW = [dtype for dtype in DTYPES if dtype is not torch.float32]
LEVELS = {"O1": torch.float16, "O4": torch.bfloat16}
ROWS, CHANNELS, GROUPS = 6, 8, 2
Norm = Callable[[Tensor, Tensor, Tensor], Tensor]


def layer_module(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    module = nn.LayerNorm(CHANNELS).to(x.device)
    return torch.func.functional_call(module, {"weight": weight, "bias": bias}, (x,))


def group_module(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    module = nn.GroupNorm(GROUPS, CHANNELS).to(x.device)
    return torch.func.functional_call(module, {"weight": weight, "bias": bias}, (x,))


def rms_module(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    module = nn.RMSNorm(CHANNELS).to(x.device)
    return torch.func.functional_call(module, {"weight": weight}, (x,))


# What a user may call: (x of shape [ROWS, CHANNELS], weight, bias) -> the norm. The bias of an RMS norm has no use.
NORMS: dict[str, Norm] = {
    "nn.LayerNorm": layer_module,
    "F.layer_norm": lambda x, weight, bias: F.layer_norm(x, (CHANNELS,), weight, bias),
    "F.layer_norm by keywords": lambda x, weight, bias: F.layer_norm(
        input=x, normalized_shape=(CHANNELS,), weight=weight, bias=bias
    ),
    "torch.layer_norm": lambda x, weight, bias: torch.layer_norm(x, (CHANNELS,), weight, bias),
    "native_layer_norm": lambda x, weight, bias: torch.native_layer_norm(x, (CHANNELS,), weight, bias, 1e-5)[0],
    "nn.GroupNorm": group_module,
    "F.group_norm": lambda x, weight, bias: F.group_norm(x, GROUPS, weight, bias),
    "torch.group_norm": lambda x, weight, bias: torch.group_norm(x, GROUPS, weight, bias),
    "nn.RMSNorm": rms_module,
    "F.rms_norm": lambda x, weight, bias: F.rms_norm(x, (CHANNELS,), weight, eps=1e-5),
    "torch.rms_norm": lambda x, weight, bias: torch.rms_norm(x, (CHANNELS,), weight, 1e-5),
}
every_norm = pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
either_type = pytest.mark.parametrize("dtype", LOW, ids=str)
either_level = pytest.mark.parametrize("level", LEVELS)
needs_hooks = pytest.mark.skipif(
    not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"),
    reason="this torch does not tell whose saved-tensor hooks are there",
)


def acting(level: str = "O4", **options: Any) -> regions.region:
    """The casts of a training with the option, or with others."""
    install.install()
    return regions.region(replace(resolve(level, **{"low_precision_norms": True} | options), cpu_half="native"))


def sample(dtype: torch.dtype, device: str = "cpu", rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor]:
    """Return (x, weight, bias), which require grad. x has a mean of 30, ten times its spread."""
    generator = torch.Generator().manual_seed(0)
    x = 30 + 3 * torch.randn(rows, CHANNELS, generator=generator)
    weight, bias = torch.rand(CHANNELS, generator=generator) + 0.5, torch.randn(CHANNELS, generator=generator)
    return tuple(  # type: ignore[return-value]
        tensor.to(device, kind).requires_grad_()
        for tensor, kind in ((x, dtype), (weight, torch.float32), (bias, torch.float32))
    )


def results(norm: Norm, given: tuple[Tensor, Tensor, Tensor]) -> list[Tensor | None]:
    """What a norm gives, and the gradients of what it was given."""
    for tensor in given:
        tensor.grad = None
    found = norm(*given)
    found.float().mul(torch.arange(1.0, CHANNELS + 1, device=found.device)).sum().backward()
    return [found.detach(), *(tensor.grad for tensor in given)]


def by_hand(norm: Norm, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A CPU computes in FP32 and rounds once; elsewhere the kernels of the low type run, on weights of that type."""
    if x.device.type == "cpu":
        return norm(x.float(), weight, bias).to(x.dtype)
    return norm(x, weight.to(x.dtype), bias.to(x.dtype))


def assert_same(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        check(one, other)


@pytest.mark.parametrize("device", DEVICES)
@either_type
@every_norm
def test_a_norm_gives_the_type_of_a_low_input_and_the_numbers_of_torch(
    norm: Norm, dtype: torch.dtype, device: str
) -> None:
    given = sample(dtype, device)
    expected = results(lambda *tensors: by_hand(norm, *tensors), given)
    with acting():
        found = results(norm, given)
    assert found[0] is not None and found[0].dtype is dtype
    assert_same(found, expected)


@either_type
@every_norm
def test_without_the_option_it_gives_fp32(norm: Norm, dtype: torch.dtype) -> None:
    with acting(low_precision_norms=False):
        assert norm(*sample(dtype)).dtype is torch.float32


@either_type
def test_norms_without_weights_and_with_low_ones(dtype: torch.dtype) -> None:
    x, weight, bias = (tensor.detach() for tensor in sample(dtype))
    weight, bias = weight.bfloat16(), bias.bfloat16()
    plain = F.layer_norm(x.float(), (CHANNELS,)).to(dtype)
    weighted = F.group_norm(x.float(), GROUPS, weight.float(), bias.float()).to(dtype)
    with acting():
        check(F.layer_norm(x, (CHANNELS,)), plain)
        check(F.group_norm(x, GROUPS, weight, bias), weighted)


@either_type
def test_the_statistics_of_native_layer_norm_stay_fp32(dtype: torch.dtype) -> None:
    x, weight, bias = sample(dtype)
    expected = torch.native_layer_norm(x.float(), (CHANNELS,), weight, bias, 1e-5)
    with acting():
        found = torch.native_layer_norm(x, (CHANNELS,), weight, bias, 1e-5)
    assert_same([tensor.detach() for tensor in found[1:]], [tensor.detach() for tensor in expected[1:]])


def test_other_norms_stay_as_they_are() -> None:
    x = torch.randn(4, CHANNELS, 5).bfloat16()
    with acting():
        assert F.instance_norm(x).dtype is F.batch_norm(x, None, None, training=True).dtype is torch.bfloat16
        assert F.normalize(x).dtype is F.local_response_norm(x, 2).dtype is torch.float32


# On a CPU, torch's own backward sums these in the type of the input: no number above 256 in steps of 1 in BF16.
@pytest.mark.parametrize(("dtype", "rows", "each"), [(torch.bfloat16, 8192, 1.0), (torch.float16, 2048, 64.0)])
@pytest.mark.parametrize("name", ["F.layer_norm", "F.group_norm"])
def test_on_a_cpu_gradients_of_weights_are_summed_in_fp32(
    name: str, dtype: torch.dtype, rows: int, each: float
) -> None:
    x, weight, bias = sample(dtype, rows=rows)
    with acting():
        found = NORMS[name](x, weight, bias)
    found.backward(torch.full_like(found, each))
    assert bias.grad is not None and bias.grad.tolist() == [rows * each] * CHANNELS  # 131072 is infinite in FP16


@pytest.mark.parametrize("device", DEVICES)
@every_norm
def test_fp16_near_its_end_gives_finite_numbers(norm: Norm, device: str) -> None:
    signs = torch.tensor([1.0, -1.0]).repeat(ROWS, CHANNELS // 2)
    x = (60000 * signs).to(device, torch.float16).requires_grad_()
    ones, zeros = torch.ones(CHANNELS, device=device), torch.zeros(CHANNELS, device=device)
    with acting("O1"):
        found = norm(x, ones, zeros)
    # CUDA's group norm stores 1 / deviation in FP16, whose steps near 1 / 60000 are 0.4%: it is 0.2% off at most.
    rounds = device != "cpu" and norm in (group_module, NORMS["F.group_norm"], NORMS["torch.group_norm"])
    torch.testing.assert_close(found.cpu().float(), signs, rtol=0, atol=2**-8 if rounds else 0)
    found.sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


class Kernels(TorchDispatchMode):
    """Notes the types of the tensors that the kernels of norms are given."""

    def __init__(self) -> None:
        super().__init__()
        self.types: list[set[torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "norm" in func.__name__:
            self.types.append({arg.dtype for arg in args if isinstance(arg, Tensor)})
        return func(*args, **(kwargs or {}))


# CUDA's kernels take weights of the input's type alone. Tensors on "meta" go to no kernel, and show it without a GPU.
@pytest.mark.parametrize("name", ["nn.LayerNorm", "native_layer_norm", "F.group_norm"])
@either_type
def test_off_a_cpu_the_kernels_get_weights_of_the_inputs_type(dtype: torch.dtype, name: str) -> None:
    given = sample(dtype, "meta")
    with acting(), Kernels() as kernels:
        assert NORMS[name](*given).dtype is dtype
    assert kernels.types == [{dtype}]


# ---------------------------------------------------------------------------------------------------------------------
# In a training


class Layers(nn.Module):
    """A norm between a linear layer, whose output is low, and a function that keeps its input's type."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(CHANNELS, CHANNELS), nn.Linear(CHANNELS, CHANNELS)
        self.norm = nn.LayerNorm(CHANNELS)
        self.checkpointed = False

    def body(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.first(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x))


def started(level: str, **options: Any) -> tuple[Layers, Any]:
    torch.manual_seed(0)
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **{"low_precision_norms": True} | options)
    return model, optimizer


def trained(model: nn.Module, optimizer: Any, steps: int = 3) -> list[Any]:
    """The losses, then the weights."""

    def loss_of(step: int) -> Tensor:
        return model(torch.randn(ROWS, CHANNELS, generator=torch.Generator().manual_seed(step))).float().square().mean()

    return [*iterate(optimizer, loss_of, range(steps)), *(param.detach().clone() for param in model.parameters())]


class ByHand(Layers):
    """The same in a region of O1: the sum of what the option does is this `.to`."""

    def body(self, x: Tensor) -> Tensor:
        low = self.first(x)
        return torch.tanh(self.norm(low).to(low.dtype))


@pytest.mark.parametrize("cpu_half", ["native", "emulate"])
@either_level
def test_a_training_equals_the_explicit_one_to_the_bit(level: str, cpu_half: str) -> None:
    torch.manual_seed(0)
    model = ByHand()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, cpu_half=cpu_half, verbosity=0)
    assert_same(trained(*started(level, cpu_half=cpu_half)), trained(model, optimizer))


@needs_hooks
@pytest.mark.parametrize("cpu_half", ["native", "emulate"])
@pytest.mark.parametrize("device", DEVICES)
@either_level
def test_saved_bytes_equal_the_low_precision_input(level: str, device: str, cpu_half: str) -> None:
    saved = {}
    for option in (False, True):
        with amp.record(activations=True) as run:
            torch.manual_seed(0)
            model = Layers().to(device)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            options: dict[str, Any] = {"low_precision_norms": option, "cpu_half": cpu_half, "verbosity": 0}
            amp.initialize(model, optimizer, opt_level=level, **options)
            for _ in range(3):
                optimizer.zero_grad()
                backward(model(torch.randn(ROWS, CHANNELS, device=device)).sum(), optimizer)
                optimizer.step()
        saved[option] = run.activations
    # FP32: the norm's input and tanh's output, and its cast for the last layer. With the option: both in the low type,
    # and the last layer saves the same output; a GPU's norm saves its low weight and its low bias besides.
    fp32, low = 4 * 2 + 2, 2 * 2
    weights = 0 if device == "cpu" else (2 + 2) * CHANNELS
    assert saved[False] - saved[True] == (fp32 - low) * ROWS * CHANNELS - weights


@pytest.mark.filterwarnings("ignore:.torch.jit", "ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.usefixtures("fresh_compiler")
@crossed({"level": list(LEVELS), "backend": ["eager", "aot_eager"]}, meet=1)
def test_compiled_code_does_the_same_in_one_graph_for_each_policy(level: str, backend: str) -> None:
    models = [started(level, low_precision_norms=option)[0] for option in (True, False)]
    x = torch.randn(ROWS, CHANNELS, generator=torch.Generator().manual_seed(0))
    for model in models:
        eager = model(x)
        eager.float().sum().backward()
        expected = [eager.detach(), *(param.grad for param in model.parameters())]
        model.zero_grad()
        found = torch.compile(model, backend=backend, fullgraph=True)(x)
        found.float().sum().backward()
        assert_same([found.detach(), *(param.grad for param in model.parameters())], expected)

    @torch.compile(backend=backend, fullgraph=True)
    def grouped(x: Tensor) -> Tensor:
        return F.group_norm(x, GROUPS)

    low = x.to(LEVELS[level])
    for option, dtype in ((True, low.dtype), (False, torch.float32), (True, low.dtype)):
        with acting(level, low_precision_norms=option):
            assert grouped(low).dtype is dtype


# ---------------------------------------------------------------------------------------------------------------------
# The option


REFUSED: dict[str, dict[str, Any]] = {
    "opt_level 'O0', whose whole model is FP32": {"opt_level": "O0"},
    "opt_level 'O2', whose model is cast, so that its norms return torch.float16 without it": {"opt_level": "O2"},
    "opt_level 'O3', whose model is cast, so that its norms return torch.float16 without it": {"opt_level": "O3"},
    "opt_level 'O5', whose model is cast, so that its norms return torch.bfloat16 without it": {"opt_level": "O5"},
    "opt_level 'O1', with patch_torch_functions=False, under which the norms are as in FP32": {
        "opt_level": "O1",
        "patch_torch_functions": False,
    },
}


@pytest.mark.parametrize(("why", "options"), REFUSED.items(), ids=[str(options) for options in REFUSED.values()])
def test_it_is_refused_where_it_means_nothing(why: str, options: dict[str, Any]) -> None:
    message = (
        f"initialize: low_precision_norms=True contradicts {why}; leave it at False, or use opt_level='O1' or 'O4', "
        "where norms give FP32 without it"
    )
    model = Layers()
    with pytest.raises(ValueError, match=re.escape(message) + "$"):
        amp.initialize(model, low_precision_norms=True, verbosity=0, **options)
    assert type(model) is Layers
    amp.initialize(model, low_precision_norms=False, verbosity=0, **options)


def test_the_log_and_explain_name_it() -> None:
    assert str(resolve("O4", low_precision_norms=True)).endswith(", low_precision_norms=True")
    assert "low_precision_norms" not in str(resolve("O4"))
    for option, decided in ((True, "low_precision_norms"), (False, "fp32")):
        for cpu_half in ("native", "emulate"):
            model, _ = started("O1", low_precision_norms=option, cpu_half=cpu_half)
            calls = amp.explain(model, torch.randn(ROWS, CHANNELS)).calls
            (call,) = [call for call in calls if call.op.endswith("layer_norm")]
            assert call.decided == decided
            assert call.gave == (torch.float16 if option else torch.float32,)
