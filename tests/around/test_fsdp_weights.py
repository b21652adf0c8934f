"""Sharded weights: what stays FP32 inside of a cast model, and the casts that a region keeps."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_trainings import (
    SGD,
    averaged,
    fully_shard,
    loss_of,
    restored_fixture,  # noqa: F401  the fixture `restored`
)
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from training import backward

from amp_patch import amp

pytestmark = pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason="fully_shard of torch 2.6 does not run on CPUs: no Stream.record_event"
)


# From torch 2.15 a policy can tell parameters apart.
KNOWS_PARAMETERS = "param_dtype_override_fn" in inspect.signature(MixedPrecisionPolicy).parameters


# ---------------------------------------------------------------------------------------------------------------------
# What stays FP32 inside a cast model.


def kept(level: str, by_policy: bool) -> tuple[Any, Any, float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 1))
    if by_policy:
        fully_shard(model, mp_policy=amp.fsdp_policy(level, models=model, keep_fp32="3"))
    else:
        for index in (1, 3):
            fully_shard(model[index], mp_policy=amp.fsdp_policy("O0"))
        fully_shard(model, mp_policy=amp.fsdp_policy(level))
    types = {}
    for name, module in model.named_children():
        module.register_forward_hook(
            lambda m, args, output, name=name: types.update(
                {name: (args[0].dtype, [p.dtype for p in m.parameters()], output.dtype)}
            )
        )
    model, optimizer = amp.initialize(
        model, SGD(model.parameters()), opt_level=level, keep_fp32="3", loss_scale=256.0, verbosity=0
    )
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = loss_of(model, 0, dist.get_rank())
        backward(loss, optimizer)
        optimizer.step()
        losses.append(loss.item())
    return types, {name: value.dtype for name, value in model.state_dict().items()}, losses[-1] / losses[0]


@averaged
@pytest.mark.parametrize("by_policy", [False, True][: 1 + KNOWS_PARAMETERS])
@pytest.mark.parametrize(("level", "low"), [("O2", torch.float16), ("O5", torch.bfloat16)])
def test_modules_stay_fp32_by_a_separate_shard_or_by_the_policy(ranks, level, low, by_policy):
    for types, state, progress in ranks(kept, level, by_policy):
        assert types["0"] == (low, [low, low], low)
        assert types["1"] == (low, [torch.float32] * 2, low)
        assert types["3"] == (low, [torch.float32] * 2, low)
        assert {dtype for dtype in state.values() if dtype.is_floating_point} == {torch.float32}
        assert progress < 0.5


@pytest.mark.parametrize("by_policy", [False, True][: 1 + KNOWS_PARAMETERS])
def test_both_ways_to_keep_modules_fp32_train_alike(ranks, by_policy):
    for (*_, apart), (*_, together) in zip(ranks(kept, "O5", False), ranks(kept, "O5", by_policy), strict=True):
        assert apart == together


def test_a_policy_of_models_keeps_their_batch_norms_and_keep_fp32():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.LayerNorm(2))
    policy = amp.fsdp_policy("O5", models=model, keep_fp32=nn.LayerNorm)
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    if KNOWS_PARAMETERS:
        assert [policy.param_dtype_override_fn(p) for p in model.parameters()] == [None] * 2 + [torch.float32] * 4
        some = amp.fsdp_policy("O5", models=[model], keep_batchnorm_fp32=False, keep_fp32="2")
        assert [some.param_dtype_override_fn(p) for p in model.parameters()] == [None] * 4 + [torch.float32] * 2
    assert amp.fsdp_policy("O1", models=model) == amp.fsdp_policy("O1")
    with pytest.raises(ValueError, match=r"^fsdp_policy: keep_fp32 is '2' and models is None; .*models=model"):
        amp.fsdp_policy("O5", keep_fp32="2")
    with pytest.raises(ValueError, match=r"^fsdp_policy: keep_fp32 names 'norm', which matches no module"):
        amp.fsdp_policy("O5", models=model, keep_fp32="norm")
