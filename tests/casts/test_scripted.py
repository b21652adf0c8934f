"""Code compiled by torch.jit, under the casts: it equals eager code under torch.autocast, to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import DEVICES
from crossed import crossed
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from training import ADAM, iterate, same

from amp_patch import amp
from amp_patch.casts import install, regions
from amp_patch.casts.rules import RULES
from amp_patch.policy import resolve

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit")
# (level, its type). "native": torch.autocast multiplies FP16 on a CPU so.
CASTING = [("O1", torch.float16), ("O4", torch.bfloat16)]
STEPS = 4  # torch.jit compiles the first two calls for their shapes and types, and their backward


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    return torch.relu(torch.matmul(x @ weight, weight))


def convolution(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv1d(x.unsqueeze(0), weight.unsqueeze(-1).expand(4, 4, 4)[:, :, :1]).squeeze(0)


class Part(nn.Module):
    """Its weights are attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.inner, self.conv = nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 4), nn.Conv1d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv((self.inner(x) @ self.weight).relu().unsqueeze(-1)).squeeze(-1)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Part(), Part()

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x)).relu()


class PartlyCompiled(nn.Module):
    """A part that may be compiled, given low-precision activations, beside a weight for functions."""

    def __init__(self, part: Any, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weight, self.part, self.dtype = nn.Parameter(torch.randn(4, 4)), part, dtype

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.dtype)
        return self.part(x) if isinstance(self.part, nn.Module) else self.part(x, self.weight)


def traced(part: Any) -> Any:
    example = torch.ones(4, 4)
    if isinstance(part, nn.Module):
        example = example.to(next(part.parameters()).device)
    given = (example,) if isinstance(part, nn.Module) else (example, example)
    return torch.jit.trace(part, given, check_trace=False)


def result(net: nn.Module, x: Tensor, around: Any) -> list[Tensor]:
    """What a forward gives, and the gradients of input and weights."""
    x = x.clone().requires_grad_()
    net.zero_grad()
    with around:
        out = net(x)
    out.float().square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in net.parameters() if p.grad is not None)]


@pytest.mark.parametrize("device", DEVICES)
@crossed(
    {"part": [linear, matmul, convolution, Part, Nested], "compiled": [torch.jit.script, traced]},
    pytest.mark.parametrize("level, dtype", CASTING),
)
def test_compiled_code_casts_as_under_torch_autocast(wrappers, part, compiled, level, dtype, device):
    torch.manual_seed(0)
    eager = PartlyCompiled(part() if isinstance(part, type) else part, dtype).to(device)
    net = PartlyCompiled(compiled(copy.deepcopy(eager.part)), dtype).to(device)
    check(net, eager, level, dtype, device)
    assert net(torch.ones(4, 4, device=device)).dtype is dtype


def check(net: PartlyCompiled, reference: PartlyCompiled, level: str, dtype: torch.dtype, device: str) -> None:
    """`net` at a level gives what `reference` gives under torch.autocast."""
    net, _ = amp.initialize(net, ADAM(net.parameters()), opt_level=level, cpu_half="native", verbosity=0)
    for step in range(STEPS):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step)).to(device)
        expected = result(reference, x, torch.autocast(device, dtype))
        found = result(net, x, torch.enable_grad())
        assert [t.dtype for t in found] == [t.dtype for t in expected]
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("level, dtype", CASTING)
@pytest.mark.parametrize("compiled", [torch.jit.script, traced])
def test_a_model_with_a_compiled_part_trains_as_with_the_part_itself(wrappers, compiled, level, dtype):
    def trained(compiled: Callable[[Any], Any]) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), compiled(Nested()), nn.Linear(4, 4))
        net, optimizer = amp.initialize(net, ADAM(net.parameters()), opt_level=level, cpu_half="native", verbosity=0)

        def loss_of(step: int) -> Tensor:
            return net(torch.randn(4, 4, generator=torch.Generator().manual_seed(step))).float().square().mean()

        iterate(optimizer, loss_of, range(STEPS))
        return [param.detach().clone() for param in net.parameters()]

    assert same(trained(compiled), trained(lambda part: part))


def test_a_set_of_device_types_has_one_set_of_dtypes_at_all_calls():
    """torch.jit compiles a function once for each set of device types, and the code contains their dtypes."""
    seen: dict[tuple[str, ...], set[Any]] = {}

    def note(x: Tensor) -> torch.dtype:
        on = tuple(kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind))
        seen.setdefault(on, set()).add(tuple(torch.get_autocast_dtype(kind) for kind in on))
        return torch.get_autocast_dtype(x.device.type)

    for device in ("cpu", "cuda"):
        with FakeTensorMode():
            x = torch.empty(1, device=device)
        for level, dtype in CASTING:
            with regions.region(resolve(level)):
                assert RULES["scripted"].apply(note, (x,), {}, resolve(level)) is dtype
    assert len(seen) == 3 and all(len(dtypes) == 1 for dtypes in seen.values())


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_outside_of_casts_compiled_code_is_torchs_own(wrappers, level):
    own = torch._C.ScriptFunction.__dict__["__call__"], torch._C.ScriptMethod.__dict__["__call__"]
    function, x, weight = torch.jit.script(matmul), torch.randn(4, 4), torch.randn(4, 4)
    expected = matmul(x, weight)
    net = PartlyCompiled(function, torch.float32)
    amp.initialize(net, ADAM(net.parameters()), opt_level=level, verbosity=0)
    for _ in range(STEPS):
        with amp.disable_casts():
            assert torch.equal(function(x, weight), expected)
        # The newest training's casts hold for the whole process, but not for code that is compiled: it may be exported.
        assert torch.equal(function(x, weight), expected)
        with amp.autocast("cpu", torch.bfloat16):
            assert function(x, weight).dtype is torch.bfloat16
    out = net(x)
    with amp.disable_casts():
        assert torch.equal(out, matmul(x, net.weight)) is (level == "O0")
    amp.restore()
    install.uninstall()
    assert torch.equal(function(x, weight), expected)
    assert own == (torch._C.ScriptFunction.__dict__["__call__"], torch._C.ScriptMethod.__dict__["__call__"])


def test_torchs_autocast_settings_are_restored(wrappers):
    @torch.jit.script
    def fails(x: Tensor, weight: Tensor) -> Tensor:
        assert x.shape[0] == 3, "three"
        return x @ weight

    def seen() -> tuple[Any, ...]:
        kinds = ("cpu", "cuda")
        flags = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        return torch.is_autocast_cache_enabled(), *flags

    before, weight = seen(), torch.ones(4, 4)
    for dtype in (torch.float16, torch.bfloat16):
        with amp.autocast("cpu", dtype):
            assert fails(torch.ones(3, 4), weight).dtype is dtype and seen() == before
            with pytest.raises(torch.jit.Error, match="three"):
                fails(torch.ones(2, 4), weight)
            assert seen() == before and (weight @ weight).dtype is dtype


def in_python(x: Any, weight: Any) -> Any:
    return F.linear(x, weight)


in_python.__annotations__ = {"x": Tensor, "weight": Tensor, "return": Tensor}  # as torch.jit wants them
in_python = torch.jit.ignore(in_python)


def test_python_that_compiled_code_calls_sees_weights_as_they_are_now(wrappers):
    """Inside a torch.autocast around everything: its cache of cast weights lasts until that ends."""

    @torch.jit.script
    def calls(x: Tensor, weight: Tensor) -> Tensor:
        return in_python(x, weight) + x

    weight, x = nn.Parameter(torch.ones(4, 4)), torch.zeros(1, 4).fill_(1.0)
    with torch.autocast("cpu", torch.bfloat16), amp.autocast("cpu", torch.bfloat16):
        assert calls(x, weight)[0, 0].item() == 5.0
        with torch.no_grad():
            weight.mul_(2)
        assert calls(x, weight)[0, 0].item() == 9.0
