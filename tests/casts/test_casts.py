"""The rules of the op lists: the types that a function receives and returns in one call."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from casting import (
    FULL,
    HALF,
    LOW,
    clean_fixture,  # noqa: F401  the fixture `_clean`
    installed_fixture,  # noqa: F401  the fixture `installed`
    needs_install,
    o1,
)
from conftest import DEVICES, original
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from amp_patch.casts import install, regions


@needs_install
@pytest.mark.parametrize("dtype", LOW)
def test_other_types_and_explicit_types_are_never_cast(dtype: torch.dtype) -> None:
    wide, whole = torch.ones(2, 2, dtype=torch.float64), torch.ones(2, 2, dtype=torch.int64)
    with regions.region(o1(dtype)):
        assert torch.mm(wide, wide).dtype is torch.float64 and (wide**2).dtype is torch.float64
        assert torch.mm(whole, whole).dtype is torch.int64 and (whole**2).dtype is torch.int64
        assert torch.sum(whole).dtype is torch.int64
        out = torch.empty(2, 2)
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2), out=out) is out and out.tolist() == [[2.0, 2.0]] * 2
        low = torch.ones(2, dtype=dtype)
        assert torch.sum(low, dtype=dtype).dtype is dtype, "an explicit type is the user's word"
        assert F.softmax(low, dim=0, dtype=torch.float64).dtype is torch.float64


@needs_install
@pytest.mark.parametrize("dtype", LOW)
def test_arguments_in_sequences_and_keywords(dtype: torch.dtype) -> None:
    a = torch.ones(2, 2)
    with regions.region(o1(dtype)):
        assert torch.linalg.multi_dot([a, a, a]).dtype is dtype
        assert torch.einsum("ij,jk->ik", [a, a]).dtype is dtype
        assert F.linear(input=a, weight=a, bias=None).dtype is dtype
        assert torch.dot(input=a[0], tensor=a[0].to(dtype)).dtype is FULL


@needs_install
@pytest.mark.parametrize("kind", [list, tuple])
def test_sequences_keep_their_kind(kind: type) -> None:
    seen: list[Any] = []

    class Recording(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.extend(arg for arg in args if arg is not low and not isinstance(arg, (torch.dtype, Tensor)))
            seen.extend(arg for arg in args if func is Tensor.to and arg is low)
            return func(*args, **(kwargs or {}))

    low = torch.ones(2, dtype=HALF)
    with regions.region(o1()), Recording():
        torch.sum(low, dtype=HALF)
        assert seen == [], "an explicit type asks for no cast before the call"
        torch.linalg.multi_dot(kind([torch.ones(2, 2), torch.ones(2, 2, dtype=HALF)]))
    (matrices,) = [arg for arg in seen if isinstance(arg, (list, tuple))]
    assert type(matrices) is kind and [matrix.dtype for matrix in matrices] == [HALF, HALF]


@needs_install
def test_tensors_without_dimensions_do_not_widen() -> None:
    x, scalar = torch.ones(3, dtype=HALF), torch.tensor(2.0)
    with regions.region(o1()):
        assert torch.addcmul(x, x, scalar).dtype is HALF
        assert torch.lerp(x, x, scalar).dtype is HALF
        assert torch.isclose(scalar, scalar.half())


NORMS = {
    "batch_norm": (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    "instance_norm": (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
}
LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


@needs_install
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("name", NORMS)
def test_batch_and_instance_norms_are_torch_autocast_s(name: str, dims: int, dtype: torch.dtype, device: str) -> None:
    """Batch norms return the input's type, with FP32 weights and statistics: all derivatives are equal to the bit."""

    def run(norm: nn.Module, given: Tensor, area: Any) -> list[Tensor]:
        x = given.clone(memory_format=torch.preserve_format).requires_grad_()
        weights = list(norm.parameters())
        with area:
            y = norm(x)
        gradients = torch.autograd.grad(y.float().pow(3).sum(), [x, *weights], create_graph=True)
        twice = torch.autograd.grad(gradients[0].float().square().sum(), [x, *weights[:1]])
        return [y, *gradients, *twice, *norm.buffers()]

    torch.manual_seed(0)
    given = torch.randn(4, 3, *(5, 4, 3)[:dims]).to(device=device, dtype=dtype)
    formats = [given, given.contiguous(memory_format=LAST[dims])] if dims in LAST else [given]
    for affine, tracked, training in itertools.product((True, False), repeat=3):
        if not (training or tracked):
            continue  # as in training
        made = NORMS[name][dims - 1](3, affine=affine, track_running_stats=tracked).to(device).train(training)
        for weight in made.parameters():
            nn.init.uniform_(weight)
        for x in formats:
            ours, theirs = (copy.deepcopy(made) for _ in range(2))
            found = run(ours, x, regions.region(o1(dtype)))
            assert found[0].dtype is dtype and {weight.dtype for weight in ours.parameters()} <= {FULL}
            assert {value.dtype for value in ours.buffers()} <= {FULL, torch.int64}
            wanted = run(theirs, x, torch.autocast(x.device.type, dtype))
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)
            # Of FP32 numbers of the same values: what is rounded is the result and its input's gradient.
            exact = run(copy.deepcopy(made), x.float(), contextlib.nullcontext())
            torch.testing.assert_close(found[0], exact[0].to(dtype), rtol=2**-7, atol=2**-7)
            if affine or name == "batch_norm":  # else a CPU computes the statistics in the input's type
                statistics = list(ours.buffers())
                torch.testing.assert_close(statistics, exact[len(exact) - len(statistics) :])


@needs_install
def test_errors_are_the_originals() -> None:
    x, y = torch.ones(2, 3), torch.ones(2, 3)
    itself: list[Any] = []
    itself.append(itself)
    with regions.region(o1()):
        for call in (lambda: x @ y, lambda: torch.mm(x, y), lambda: F.linear(x, y.T), lambda: torch.bmm(x, y)):
            with pytest.raises(RuntimeError):
                call()
        for call in (torch.exp, lambda: torch.exp("x"), lambda: F.linear(x), lambda: F.linear(x, y, y, y)):
            with pytest.raises(TypeError):
                call()
        with pytest.raises(TypeError, match="unsupported operand"):
            x @ "y"
        with pytest.raises(RecursionError):
            torch.linalg.multi_dot(itself)
        itself.insert(0, x)  # something to cast in front
        with pytest.raises(RecursionError):
            torch.linalg.multi_dot(itself)
        set_item = torch.Tensor.__setitem__
        for call in (torch.Tensor.addmm_, lambda: torch.Tensor.addmm_("x", x, y), lambda: set_item(3, 0, 1)):
            with pytest.raises(TypeError):
                call()
        with pytest.raises(RuntimeError):  # integers are not what the others are cast to
            torch.ones(2, dtype=torch.int64).index_add_(0, torch.tensor([0]), x[0, :1])
    with pytest.raises(TypeError):
        set_item(3, 0, 1)  # outside of regions too


def test_functions_of_others_are_called_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody may have replaced what the lists name before us."""
    seen: list[torch.dtype] = []
    linear = F.linear

    def counted(*args: Any) -> Tensor:
        seen.extend(arg.dtype for arg in args if arg is not None)
        return linear(*args)

    monkeypatch.setattr(F, "linear", counted)
    install.install()
    with regions.region(o1()):
        assert nn.Linear(2, 2, bias=False)(torch.ones(1, 2)).dtype is HALF
    install.uninstall()  # before monkeypatch puts its original back
    assert seen == [HALF, HALF]


@needs_install
def test_no_references_are_lost_or_kept() -> None:
    x, y, weight = torch.ones(2, 2), torch.ones(2, 2, dtype=torch.float64), nn.Parameter(torch.ones(2, 2))
    low, items, policy = x.half(), [x, x.half()], o1()
    index = (0, 1)
    counted = (x, y, weight, low, items, index, policy, original(torch.exp), original(torch.Tensor.exp), F.softmax)

    def round_of_calls() -> None:
        with regions.region(policy):
            for _ in range(50):
                x @ weight, torch.mm(x, x), F.linear(x, weight), F.linear(x, weight, None), torch.exp(low), low.exp()
                torch.linalg.multi_dot(items), torch.dot(x[0], other := low[0]), F.softmax(low, dim=0), low**2
                F.layer_norm(low, (2,), weight=None), torch.sum(low, dtype=FULL), torch.sum(low, 0, out=torch.ones(2))
                x.index_add_(0, torch.tensor([0]), other.reshape(1, 2)), x.__setitem__(index, low[0, 0])
                x[0] = low[0]
                for wrong in (lambda: x @ y, lambda: torch.exp(low, low, low), lambda: x.lerp_(low)):
                    with contextlib.suppress(RuntimeError, TypeError):
                        wrong()

    round_of_calls()
    gc.collect()
    before = [sys.getrefcount(item) for item in counted], len(gc.get_objects())
    for _ in range(3):
        round_of_calls()
    gc.collect()
    after = [sys.getrefcount(item) for item in counted], len(gc.get_objects())
    assert after[0] == before[0]
    assert after[1] - before[1] < 20, "fewer are what earlier tests had left"


@needs_install
def test_subclasses_and_torch_function_objects() -> None:
    class Logged(Tensor):
        calls: list[Any] = []  # noqa: RUF012

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cls.calls.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    class Duck:
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func

    x = torch.ones(2, 2).as_subclass(Logged)
    with regions.region(o1()):
        result = torch.mm(x, x)
        assert torch.exp(Duck()) is original(torch.exp)
    assert type(result) is Logged and result.dtype is HALF
    assert original(torch.mm) in Logged.calls
