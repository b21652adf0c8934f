"""The cached casts of weights in a region, and the events after which a weight is cast again."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from casting import (
    FULL,
    HALF,
    LOW,
    OFF,
    cached,
    clean_fixture,  # noqa: F401  the fixture `_clean`
    installed_fixture,  # noqa: F401  the fixture `installed`
    needs_install,
    o1,
)
from conftest import DEVICES
from torch import Tensor, nn
from training import run_in_thread

from amp_patch.casts import autocast as casts_autocast
from amp_patch.casts import regions
from amp_patch.casts import state as casts_state


@needs_install
@pytest.mark.parametrize("dtype", LOW)
def test_a_weight_is_cast_once_a_region(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)
    plain, activation = torch.ones(2, 2), weight * 1
    with regions.region(o1(dtype)):
        assert casts_state.cast_weight(weight, dtype) is casts_state.cast_weight(weight, dtype)
        assert casts_state.cast_weight(frozen, dtype) is casts_state.cast_weight(frozen, dtype)
        assert casts_state.cast_weight(plain, dtype) is not casts_state.cast_weight(plain, dtype), (
            "activations are not kept"
        )
        assert casts_state.cast_weight(activation, dtype) is not casts_state.cast_weight(activation, dtype)
        with regions.region(OFF), regions.region(o1(dtype)):
            pass
        assert cached() == 2, "an inner region's end dropped the outer one's casts"
        casts_state.drop_cache()
        assert cached() == 0
        casts_state.cast_weight(weight, dtype)
    assert cached() == 0, "the outermost region's end keeps casts"
    casts_state.cast_weight(weight, dtype)
    assert cached() == 0, "outside regions nothing says when to forget"
    with regions.region(o1(dtype)):
        casts_state.cast_weight(weight, dtype)
        with regions.process_wide_region(o1(dtype)):
            pass
        assert cached() == 0
    with casts_autocast.autocast(dtype=dtype, cache_enabled=False):
        assert casts_state.cast_weight(weight, dtype) is not casts_state.cast_weight(weight, dtype)


@needs_install
def test_a_weight_is_remembered_in_each_type() -> None:
    weight, x = nn.Parameter(torch.ones(2, 2)), torch.ones(2, 2)
    with regions.region(o1(HALF)):
        assert F.linear(x, weight).dtype is HALF
        with regions.region(o1(torch.bfloat16)):
            assert F.linear(x, weight).dtype is torch.bfloat16
        assert F.linear(x, weight).dtype is HALF and cached() == 2


@needs_install
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_gradients_exist_after_a_forward_without(guard: Any, dtype: torch.dtype, device: str) -> None:
    """pytorch#65766."""
    layer = nn.Linear(3, 3, device=device)
    x = torch.ones(2, 3, device=device)
    with regions.region(o1(dtype)):
        with guard():
            layer(x)
        loss = layer(x).sum()
        with guard():
            assert not layer(x).requires_grad
        loss.backward()
    assert layer.weight.grad is not None and layer.weight.grad.abs().sum() > 0
    assert layer.weight.grad.dtype is FULL


@needs_install
@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_casts_made_in_a_trace_are_not_kept() -> None:
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    with regions.region(o1()):
        layer(x)
        traced = torch.jit.trace(layer, x, check_trace=False)
        with torch.no_grad():
            layer.weight.zero_()
            layer.bias.zero_()
            assert traced(x).abs().sum() == 0, "the trace holds a cast weight as a constant"


@needs_install
def test_edited_weights_are_cast_again() -> None:
    weight = nn.Parameter(torch.ones(1, 1))
    x = torch.ones(1, 1)
    with regions.region(o1()):
        assert (x @ weight).item() == 1.0
        with torch.no_grad():
            weight.fill_(2.0)
        assert (x @ weight).item() == 2.0
        layer = nn.Linear(1, 1, bias=False)
        layer(x)
        layer.load_state_dict({"weight": torch.full((1, 1), 3.0)})
        assert layer(x).item() == 3.0


@needs_install
def test_a_weight_may_die_anywhere() -> None:
    """A weight is freed on another thread, after the region, after its thread, and while a weak reference is held."""
    weights = [nn.Parameter(torch.ones(2, 2), requires_grad=False) for _ in range(4)]
    held: list[Any] = []

    def cast(weight: Tensor) -> None:
        casts_state.cast_weight(weight, HALF)
        held.extend(weakref.getweakrefs(weight))

    with regions.region(o1()):
        cast(weights[0])
        run_in_thread(lambda: weights.__delitem__(0))
        assert cached() == 0
        cast(weights[0])
        casts_state.drop_cache()
        del weights[0]
        cast(weights[0])
    del weights[0]

    def leave_a_region_open() -> None:
        regions.region(o1()).__enter__()
        cast(weights[0])

    run_in_thread(leave_a_region_open)
    del weights[0]
    gc.collect()
    assert cached() == 0 and [reference() for reference in held] == [None] * len(held)


@needs_install
def test_stand_ins_are_not_kept() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    x = torch.ones(2, 2)
    with regions.region(o1()):
        torch.func.grad(lambda y: (y @ weight).sum().float())(x)
        torch.func.vmap(lambda y: y @ weight)(x)
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            mode.from_tensor(x) @ weight
        assert cached() == 0
        (x @ weight).sum().backward()
    assert weight.grad is not None
