"""Regions nested with torch.autocast: the inner one decides. And `amp.` instead of `torch.amp.`."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from contextlib import ExitStack
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
    default_fixture,  # noqa: F401  the fixture `default`
    product,
)

from amp_patch import amp

pytestmark = pytest.mark.usefixtures("clean_casts")


DEFAULTS = [None, "O1"]


@pytest.mark.parametrize("default", DEFAULTS, indirect=True)
def test_the_inner_one_wins(default: torch.dtype) -> None:
    for names in itertools.product(KINDS, repeat=3):
        assert product() is default
        with ExitStack() as stack:
            for name in names:
                make, dtype = KINDS[name]
                stack.enter_context(make())
                assert product() is dtype, names
            for depth in (2, 1):
                inner = stack._exit_callbacks.pop()[1]  # type: ignore[attr-defined]
                inner(None, None, None)
                assert product() is KINDS[names[depth - 1]][1], names
    assert product() is default and not torch.is_autocast_enabled("cpu")


def test_the_list_of_fp32_functions_is_the_inner_region_s() -> None:
    """torch's op list for the CPU casts this pooling and not exp. The op lists here, those of CUDA, do the opposite."""
    low = torch.ones(2).to(BF16)

    def pool() -> torch.Tensor:
        return F.adaptive_avg_pool3d(torch.ones(1, 1, 2, 2, 2, dtype=BF16), 1)

    with torch.autocast("cpu", BF16):
        assert torch.exp(low).dtype is BF16 and pool().dtype is FULL
        with amp.autocast("cpu", BF16):
            assert torch.exp(low).dtype is FULL and pool().dtype is BF16
            with torch.autocast("cpu", BF16):
                assert torch.exp(low).dtype is BF16 and pool().dtype is FULL


@pytest.mark.parametrize("make", [KINDS[name][0] for name in ("ours", "ours, off", "disable_casts")])
def test_torch_s_is_off_inside_for_all_device_types_and_on_afterwards(make: Callable[[], Any]) -> None:
    types = ["cpu", "cuda", "xpu", "mps", "privateuseone"]
    for kind in types:
        torch.set_autocast_enabled(kind, True)
    try:
        with make():
            assert not any(torch.is_autocast_enabled(kind) for kind in types)
            assert torch.get_autocast_dtype("cpu") is BF16, "torch's types are left alone"
        assert all(torch.is_autocast_enabled(kind) for kind in types)
    finally:
        for kind in types:
            torch.set_autocast_enabled(kind, False)


# ---------------------------------------------------------------------------------------------------------------------
# Regions that end in any order


def test_regions_end_in_any_order_inside_torch_s() -> None:
    for order in itertools.permutations(range(3)):
        with torch.autocast("cpu", BF16):
            opened = [amp.autocast("cpu", HALF), amp.disable_casts(), amp.autocast("cpu", BF16)]
            for region in opened:
                region.__enter__()
            for index in order:
                assert not torch.is_autocast_enabled("cpu")
                opened[index].__exit__(None, None, None)
            assert product() is BF16 and torch.is_autocast_enabled("cpu")
        assert product() is FULL and not torch.is_autocast_enabled("cpu")


# ---------------------------------------------------------------------------------------------------------------------
# The words of torch.amp


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without CUDA")
def test_cuda_by_name_casts_nothing_without_a_gpu() -> None:
    """As in torch, where a script's GradScaler is off then too."""
    with pytest.warns(UserWarning, match="autocast: device_type is 'cuda', but CUDA is not available"):
        region = amp.autocast("cuda")
    with region:
        assert product() is torch.float32
    with amp.autocast("cuda", enabled=False):
        assert product() is torch.float32


def test_cache_enabled_none_is_torch_s_around() -> None:
    for enabled in (True, False):
        with torch.autocast("cpu", BF16, cache_enabled=enabled):
            assert amp.autocast("cpu", cache_enabled=None).caches is enabled


# `torch.amp.__all__` of torch 2.13; 2.11 and older have none.
THEIRS = ("autocast", "custom_bwd", "custom_fwd", "is_autocast_available", "GradScaler")


def test_every_name_of_torch_amp_is_here_and_takes_the_same_arguments() -> None:
    for name in getattr(torch.amp, "__all__", THEIRS):
        ours, theirs = getattr(amp, name), getattr(torch.amp, name)
        assert name in amp.__all__
        assert set(inspect.signature(theirs).parameters) - {"fwd", "bwd"} <= set(inspect.signature(ours).parameters)
    methods = {name for name in dir(torch.amp.GradScaler) if not name.startswith("_")}
    assert len(methods) > 10 and methods <= set(dir(amp.GradScaler))
    for name in methods:
        theirs = inspect.signature(getattr(torch.amp.GradScaler, name)).parameters
        assert list(theirs) == list(inspect.signature(getattr(amp.GradScaler, name)).parameters)[: len(theirs)]


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_is_autocast_available(device: str) -> None:
    assert amp.is_autocast_available(device) is torch.amp.is_autocast_available(device)
