"""Regions beside trainings, threads, caches and in backward."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from casting import (
    BF16,
    FULL,
    HALF,
    KINDS,
    a,
    default_fixture,  # noqa: F401  the fixture `default`
    half_kernels,
    product,
)
from conftest import DEVICES
from crossed import crossed
from torch import Tensor, nn
from training import SGD, backward, convnet, images

from amp_patch import amp
from amp_patch.casts import install
from amp_patch.casts import state as casts_state

pytestmark = pytest.mark.usefixtures("clean_casts")


# ---------------------------------------------------------------------------------------------------------------------
# Trainings


class Telling(nn.Module):
    """A linear layer that records the type of its product, and whether torch.autocast is enabled."""

    def __init__(self, within: Callable[[], Any] = nullcontext) -> None:
        super().__init__()
        self.layer, self.within = nn.Linear(2, 2), within

    def forward(self, x: Tensor) -> Tensor:
        with self.within():
            out = self.layer(x)
        self.seen = out.dtype, torch.is_autocast_enabled("cpu")
        return out


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("O0", (BF16, True)),
        ("O1", (HALF, False)),
        ("O2", (BF16, True)),
        ("O3", (BF16, True)),
        ("O4", (BF16, False)),
        ("O5", (BF16, True)),
    ],
)
def test_the_forward_of_a_training_inside_torch_s(level: str, expected: tuple[torch.dtype, bool]) -> None:
    """O1 and O4 are a region of ours; a model that was cast is what any model in low precision is to torch."""
    model = amp.initialize(Telling(), opt_level=level)
    with torch.autocast("cpu", BF16):
        model(a)
        assert model.seen == expected
        assert product() is BF16
    with torch.autocast("cpu", enabled=False):
        model(a)
        assert model.seen[0] is {"O0": FULL, "O4": BF16, "O5": BF16}.get(level, HALF)


@pytest.mark.parametrize("level", ["O1", "O4"])
@pytest.mark.parametrize("name", ["torch's", "torch's, off"])
def test_torch_s_inside_the_forward_of_a_training(level: str, name: str) -> None:
    make, dtype = KINDS[name]
    model = amp.initialize(Telling(make), opt_level=level)
    for outside in (nullcontext, *(make for make, _ in KINDS.values())):
        with outside():
            model(a)
            assert model.seen[0] is dtype


def test_a_module_kept_in_fp32_is_fp32_inside_torch_s() -> None:
    for level, expected in (("O1", FULL), ("O2", FULL), ("O0", BF16)):
        model = nn.Sequential(Telling())
        model = amp.initialize(model, opt_level=level, keep_fp32=Telling)
        with torch.autocast("cpu", BF16):
            model(a)
        assert model[0].seen[0] is expected


def losses(level: str | None, around: Callable[[], Any] = nullcontext, forward: Callable[[], Any] = nullcontext):
    """Four steps; `around` the whole iteration, `forward` around the call of the model and of the loss."""
    model = convnet()
    optimizer = SGD(model.parameters())
    if level is not None:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=1.0)
    seen = []
    for step in range(4):
        x, y = images(step)
        with around():
            with forward():
                loss = F.cross_entropy(model(x).float(), y)
            optimizer.zero_grad()
            if level is None:
                loss.backward()
            else:
                backward(loss, optimizer)
            optimizer.step()
        seen.append(loss.item())
    amp.restore()
    return seen


def test_O0_inside_torch_s_is_the_plain_script_inside_torch_s_to_the_bit() -> None:
    theirs = KINDS["torch's"][0]
    plain, inside = losses(None), losses(None, forward=theirs)
    assert plain != inside
    assert losses("O0", forward=theirs) == inside and losses("O0", around=theirs) == losses(None, around=theirs)


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_O1_inside_torch_s_trains_as_without(level: str) -> None:
    alone = losses(level)
    for make in (KINDS["torch's"][0], KINDS["torch's, off"][0]):
        assert losses(level, around=make) == alone and losses(level, forward=make) == alone


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_fp16_is_emulated_where_torch_s_is_switched_off(level: str) -> None:
    low = a.half()
    model = amp.initialize(Telling(lambda: torch.autocast("cpu", enabled=False)), opt_level=level, cpu_half="emulate")
    model.layer.half()
    model.layer.forward = lambda x: low @ low  # type: ignore[method-assign]
    assert half_kernels(lambda: model(low)) == []
    with torch.autocast("cpu", BF16):
        assert half_kernels(lambda: model(low)) == []


# ---------------------------------------------------------------------------------------------------------------------
# Threads, caches


@pytest.mark.parametrize("names", list(itertools.permutations(("ours", "torch's"), 2)))
@pytest.mark.parametrize("device", DEVICES)
def test_neither_cache_leaks_into_the_other(names: tuple[str, str], device: str) -> None:
    weight = nn.Parameter(torch.full((2, 2), 2.0, device=device))
    x = torch.ones(2, 2, device=device)
    make = {"ours": lambda: amp.autocast(device, HALF), "torch's": lambda: torch.autocast(device, BF16)}
    outer, inner = (make[name] for name in names)
    with outer():
        with torch.no_grad():
            (x @ weight).sum()
            with inner():
                (x @ weight).sum()
        if names[0] == "torch's":
            torch.clear_autocast_cache()  # in torch 2.6 its own cache keeps casts that were made under no_grad
        for region in (inner, nullcontext, inner):
            weight.grad = None
            with region():
                out = x @ weight
                out.float().sum().backward()
            assert torch.equal(weight.grad, torch.full_like(weight, 2.0)), "a cast made under no_grad has no way back"
            with torch.no_grad():
                weight.add_(0.0)
    with inner():
        assert (x @ weight).dtype is KINDS[names[1]][1]
    assert casts_state.state().cached() == 0


# ---------------------------------------------------------------------------------------------------------------------
# Backward


@crossed({"names": list(itertools.product(KINDS, repeat=2)), "reentrant": [True, False]}, meet=1)
def test_checkpoint_recomputes_under_the_mixture_of_the_first_time(names: tuple[str, str], reentrant: bool) -> None:
    """Wherever backward runs; the block may enter regions of its own."""
    (outer, _), (inner, expected) = (KINDS[name] for name in names)
    seen: list[tuple[torch.dtype, ...]] = []

    def block(x: Tensor) -> Tensor:
        out = x @ x
        with KINDS["torch's, off"][0]():
            off = (x @ x).dtype
        with KINDS["torch's"][0]():
            on = (x @ x).dtype
        with KINDS["ours"][0]():
            ours = (x @ x).dtype
        seen.append((off, on, ours, out.dtype))
        return out.float() + x * x  # recomputation ends with the last tensor that is saved

    install.install()
    for around in (nullcontext, *(make for make, _ in KINDS.values())):
        x = a.clone().requires_grad_()
        with outer(), inner():
            out = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant)
        with around():
            out.sum().backward()
        assert torch.equal(x.grad, torch.full((2, 2), 6.0))
    assert set(seen) == {(FULL, BF16, HALF, expected)} and len(seen) == 12
