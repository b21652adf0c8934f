"""A model that has a DistributedDataParallel around or inside it before `initialize`."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from crossed import crossed
from ddp_trainings import both_alike, learned, loss_of, mine, mlp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training import ADAM, LEVELS, SGD, backward, convnet, same, skipped

from amp_patch import amp


def wrapped(level: str, kind: str) -> Any:
    """The weights of every step with a DDP made before `initialize` ("around", "inside") or "after" it.

    One rank overflows in the second step. What was wrapped before is restored then, and trains on in FP32.
    """
    torch.manual_seed(0)
    model: Any = nn.Sequential(convnet(), nn.Identity())
    if kind == "inside":
        model[0] = DistributedDataParallel(model[0])
    called = DistributedDataParallel(model) if kind == "around" else model
    optimizer = ADAM(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    if kind == "after":
        called = DistributedDataParallel(model)
    scaled, weights = level in ("O1", "O2"), []
    for step in range(5):
        inputs, targets = mine(step)
        if scaled and (step, dist.get_rank()) == (1, 1):
            inputs[0, 0, 0, 0] = float("inf")
        optimizer.zero_grad()
        backward(nn.functional.cross_entropy(called(inputs), targets), optimizer)
        optimizer.step()
        assert skipped(optimizer) is (scaled and step == 1)
        weights.append([p.detach().clone() for p in model.parameters()])
    amp.restore()
    for step in range(5, 7 if kind != "after" else 5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(called(mine(step)[0]), mine(step)[1]).backward()
        optimizer.step()
        weights.append([p.detach().clone() for p in model.parameters()])
    return weights


def wrapped_first(level: str) -> str:
    with pytest.raises(ValueError, match="wrapped in DistributedDataParallel") as refused:
        amp.initialize(DistributedDataParallel(mlp()), opt_level=level)
    return str(refused.value)


def test_a_model_that_ddp_wraps_already_is_refused_with_the_way_out(ranks):  # Apex's issue 1135
    for told in ranks(wrapped_first, "O1"):
        assert "pass the model itself and wrap what initialize() returns" in told


class Wrapping(nn.Module):
    """A DistributedDataParallel inside of a model, and a head that it does not have."""

    def __init__(self, head: bool = False) -> None:
        super().__init__()
        self.body = DistributedDataParallel(mlp())
        self.head = nn.Linear(5, 5) if head else nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.body(inputs))


def inside(level: str | None, micro_batches: int = 1, by_flag: bool = False) -> list[Tensor]:
    """Train a model with a DDP inside it; None: with a DDP around it, at O1. One rank overflows in the second step."""
    model: Any = mlp() if level is None else Wrapping()
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level=level or "O1", verbosity=0)
    wrapped = DistributedDataParallel(model) if level is None else model
    ddp, skips = wrapped if level is None else model.body, []
    for step in range(4):
        optimizer.zero_grad()
        for micro in range(micro_batches):
            inputs, targets = mine(micro_batches * step + micro)
            if (step, micro) == (1, 0) and dist.get_rank() == 1:
                inputs[0, 0, 0, 0] = float("inf")
            last = micro == micro_batches - 1
            ddp.require_backward_grad_sync = last or not by_flag
            with contextlib.nullcontext() if last or by_flag else ddp.no_sync():
                backward(nn.functional.cross_entropy(wrapped(inputs), targets), optimizer)
        optimizer.step()
        skips.append(skipped(optimizer))
    assert skips == [False, level != "O0" and level != "O4", False, False]
    return learned(model)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_ddp_inside_of_the_model_trains_without_cast_weights(ranks, micro_batches):
    around = both_alike(ranks(inside, None, micro_batches))
    assert same(both_alike(ranks(inside, "O1", micro_batches)), around)
    assert same(both_alike(ranks(inside, "O1", micro_batches, True)), around)


@crossed({"kind": ["inside", "around"], "level": LEVELS}, meet=1)
def test_an_earlier_ddp_reduces_cast_weights(ranks, kind, level):
    expected, *_ = ranks(wrapped, level, "after")
    found, other = ranks(wrapped, level, kind)
    assert all(same(*step) for step in zip(found, other, strict=True)), "the ranks differ"
    assert all(same(*step) for step in zip(found, expected, strict=False)) and len(found) == len(expected) + 2
    assert not same(found[-1], found[-2])


def options_kept(builtin: bool) -> list[str]:
    """What DDP says of itself once its weights were cast, and its communication hook was called."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model, called = mlp(), []
    ddp = DistributedDataParallel(model, static_graph=True, gradient_as_bucket_view=True)

    def hook(state, bucket):  # DDP reads annotations
        called.append(state)
        return fp16_compress_hook(None, bucket)

    if builtin:
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    else:
        ddp.register_comm_hook("its state", hook)
    before = ddp._get_ddp_logging_data()
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level="O2", verbosity=0)
    assert ddp._get_ddp_logging_data()["comm_hook"] == before["comm_hook"]
    backward(loss_of(ddp, mine(0)), optimizer)
    optimizer.step()
    after = ddp._get_ddp_logging_data()
    assert [after[key] for key in ("static_graph", "gradient_as_bucket_view")] == [1, 1]
    assert builtin or set(called) == {"its state"}
    return learned(model)


@pytest.mark.parametrize("builtin", [False, True])
def test_an_earlier_ddp_keeps_its_options_and_hooks(ranks, builtin):
    both_alike(ranks(options_kept, builtin))


def ddp_refused(level: str) -> str:
    from torch.nn.parallel.distributed import _MixedPrecision

    model = mlp()
    ddp = DistributedDataParallel(model)
    ddp.mixed_precision = _MixedPrecision(param_dtype=torch.float16)
    optimizer = SGD(model.parameters())
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(ValueError, match="DistributedDataParallel") as refused:
        amp.initialize(model, optimizer, opt_level=level)
    assert same([param.detach() for param in model.parameters()], before)
    return str(refused.value)


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_ddp_with_casts_is_refused_with_the_way_out(ranks, level):
    for told in ranks(ddp_refused, level):
        assert told == (
            "initialize: a Sequential is in a DistributedDataParallel with mixed_precision=, and "
            f"opt_level {level!r} changes the type of its parameters, which that option keeps copies of: "
            "call initialize() first, then wrap the model, or leave the option out"
        )


def partly_inside(level: str, grouped: bool, frozen: bool) -> Any:
    """The head is not in the DDP. It overflows on the second rank in the second step."""
    torch.manual_seed(0)
    model = Wrapping(head=True)
    model.head.requires_grad_(not frozen)
    group = dist.group.WORLD if grouped else None
    try:
        model, optimizer = amp.initialize(
            model, SGD(model.parameters()), opt_level=level, verbosity=0, process_group=group
        )
    except ValueError as refused:
        return str(refused)
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, mine(step))
        if step == 1 and dist.get_rank() == 1 and not frozen:
            model.head.weight.register_hook(lambda grad: grad * float("inf"))
        backward(loss, optimizer)
        optimizer.step()
    return [param.detach().clone() for param in model.body.parameters()]


def test_weights_outside_of_an_inner_ddp_need_a_process_group_for_overflows(ranks):
    for told in ranks(partly_inside, "O1", False, False):
        assert told == (
            "initialize: parameter 'head.weight' of Wrapping is in none of the model's DistributedDataParallels, so "
            "that an overflow of its gradient would be one process's alone, which would skip a step that the others "
            "take; pass process_group=torch.distributed.group.WORLD, or wrap the whole model instead"
        )
    both_alike(ranks(partly_inside, "O1", True, False))
    both_alike(ranks(partly_inside, "O1", False, True))
    both_alike(ranks(partly_inside, "O4", False, True))


def fsdp1_inside() -> str:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = nn.Sequential(FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")))
    with pytest.raises(ValueError, match="FSDP2") as refused:
        amp.initialize(model, opt_level="O1")
    return str(refused.value)


def test_fsdp1_inside_of_the_model_is_refused_with_the_way_out(ranks):
    for told in ranks(fsdp1_inside):
        assert told == (
            "initialize: '0' of the model is wrapped in FullyShardedDataParallel, whose flattened shards have no "
            "common overflow check here; shard it with torch.distributed.fsdp.fully_shard (FSDP2) instead, then call "
            "initialize()"
        )
