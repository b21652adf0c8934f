"""torch's ZeroRedundancyOptimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from crossed import crossed
from ddp_trainings import SCALED, assert_skipped_by_all, both_alike, learned, loss_of, mine, mlp, overflow_on_one_rank
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from training import LEVELS, SGD, backward, convnet, same

from amp_patch import amp
from amp_patch.environment import named_level

pytestmark = pytest.mark.program

SETTINGS = {  # fused, as torch.optim's own classes step at O2
    "SGD": {"lr": 0.05, "momentum": 0.9, "fused": True},
    "Adam": {"lr": 1e-2, "eps": 1e-4, "fused": True},
}


CLOSED = ["O5+split"]


def start(model: Any, optimizer: Any, level: str, **options: Any) -> tuple[Any, Any]:
    named = named_level(level)
    return amp.initialize(model, optimizer, opt_level=named.level, **named.options, **options)


def zero_of(params: Any, kind: str = "Adam", **options: Any) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(params, getattr(torch.optim, kind), **SETTINGS[kind], **options)


def zero(
    level: str, steps: int = 50, sharded: bool = True, kind: str = "Adam", clip: bool = False, **options: Any
) -> dict[str, Any]:
    model = convnet()
    optimizer = (
        zero_of(model.parameters(), kind, **options)
        if sharded
        else getattr(torch.optim, kind)(model.parameters(), **SETTINGS[kind])
    )
    model, optimizer = start(model, optimizer, level)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
    wrapped = DistributedDataParallel(model)
    for step in range(steps):
        optimizer.zero_grad()
        backward(loss_of(wrapped, mine(step)), optimizer)
        if clip:
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1)
        optimizer.step()
        scheduler.step()
    state = optimizer.optim.state if sharded else optimizer.state
    held = sum(value.numel() for entry in state.values() for value in entry.values() if value.dim())
    found = sum(param in state and bool(state[param]) for param in model.parameters())
    amp.restore()
    share = [param for group in (optimizer.optim if sharded else optimizer).param_groups for param in group["params"]]
    owned = {*map(id, share)} <= {*map(id, model.parameters())}
    return {"learned": learned(model), "held": held, "owned": owned, "found": found}


@pytest.mark.parametrize("level", [*LEVELS, *CLOSED])
def test_zero_redundancy_optimizer_does_what_the_plain_one_does_with_half_the_state(ranks, level):
    plain = ranks(zero, level, sharded=False)
    sharded = ranks(zero, level)
    assert same(both_alike([result["learned"] for result in sharded]), plain[0]["learned"])
    assert sum(result["held"] for result in sharded) == plain[0]["held"]
    assert all(0 < result["held"] < plain[0]["held"] for result in sharded)
    assert sum(result["found"] for result in sharded) == plain[0]["found"] > 0
    assert all(result["owned"] for result in sharded), "restore gives the share its parameters back"


@pytest.mark.parametrize("level", ["O1", "O2", *CLOSED])
def test_zero_redundancy_optimizer_with_clipping_and_parameters_in_buckets(ranks, level):
    for kind in ("SGD", "Adam"):
        plain = ranks(zero, level, 5, sharded=False, kind=kind, clip=True)
        sharded = ranks(zero, level, 5, kind=kind, clip=True, parameters_as_bucket_view=level == "O1")
        assert same(both_alike([result["learned"] for result in sharded]), plain[0]["learned"])


def zero_overflow(level: str) -> dict[str, Any]:
    seen, optimizer = overflow_on_one_rank(level, zero_of, float("nan"))
    seen["steps"] = [int(entry["step"]) for entry in optimizer.optim.state.values()]
    return seen


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_zero_redundancy_optimizer_skips_on_all_ranks(ranks, level):
    results = ranks(zero_overflow, level)
    assert_skipped_by_all(results)
    assert all(seen["steps"] and set(seen["steps"]) == {2} for seen in results)


def zero_resume(level: str, order: str) -> tuple[list[Tensor], list[Tensor]]:
    """Return the weights of a run, and of a run that was saved half way and continued from the file in new objects."""
    from io import BytesIO

    def build(saved: BytesIO | None) -> Any:
        model = mlp()
        optimizer = zero_of(model.parameters())
        checkpoint = torch.load(saved) if saved else None
        if checkpoint and order == "load first":
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
        model, optimizer = start(model, optimizer, level)
        if checkpoint:
            if order == "initialize first":
                model.load_state_dict(checkpoint["model"])
                optimizer.load_state_dict(checkpoint["optimizer"])
            amp.load_state_dict(checkpoint["amp"])
        return model, optimizer, DistributedDataParallel(model)

    def run(model: Any, optimizer: Any, wrapped: Any, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            backward(loss_of(wrapped, mine(step)), optimizer)
            optimizer.step()

    model, optimizer, wrapped = build(None)
    run(model, optimizer, wrapped, range(3))
    saved = [BytesIO()]
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}, saved[0]
        )
    run(model, optimizer, wrapped, range(3, 6))
    straight = learned(model)
    dist.broadcast_object_list(saved, src=0)
    saved[0].seek(0)
    model, optimizer, wrapped = build(saved[0])
    run(model, optimizer, wrapped, range(3, 6))
    return straight, learned(model)


@crossed({"level": ["O0", "O1", "O2", "O3", *CLOSED], "order": ["initialize first", "load first"]}, meet=1)
def test_zero_redundancy_optimizer_is_consolidated_and_resumed(ranks, level, order):
    for straight, resumed in ranks(zero_resume, level, order):
        assert same(straight, resumed)


def zero_grows(level: str, sharded: bool) -> list[Tensor]:
    """A head that thaws: its group is added after some steps."""
    model = mlp()
    body, head = list(model[1].parameters()), list(model[3].parameters())
    optimizer = zero_of(body, "SGD") if sharded else SGD(body)
    model, optimizer = start(model, optimizer, level, **SCALED)
    wrapped = DistributedDataParallel(model)
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": head, "lr": 0.01})
        optimizer.zero_grad()
        backward(loss_of(wrapped, mine(step)), optimizer)
        optimizer.step()
    return learned(model)


@pytest.mark.parametrize("level", ["O1", "O2", *CLOSED])
def test_a_group_is_added_to_a_zero_redundancy_optimizer(ranks, level):
    assert same(both_alike(ranks(zero_grows, level, True)), both_alike(ranks(zero_grows, level, False)))


def zero_refused() -> None:
    for level in ("O1", "O2", "O3", "O5"):
        with pytest.raises(ValueError, match=r"overlap_with_ddp=True.*overlap_with_ddp=False, or use O0 or O4"):
            model = mlp()
            amp.initialize(model, zero_of(model.parameters(), overlap_with_ddp=True), opt_level=level)
    for level in ("O2", "O3", *CLOSED):
        with pytest.raises(ValueError, match=r"parameters_as_bucket_view=True.*_bucket_view=False, or use O1 or O4"):
            model = mlp()
            start(model, zero_of(model.parameters(), parameters_as_bucket_view=True), level)
    for level, option in (("O5+stochastic", "master_weights='stochastic'"), ("O4+8bit", "optimizer_state='8bit'")):
        model = mlp()
        with pytest.raises(ValueError, match=rf"{option} is not for a ZeroRedundancyOptimizer: "):
            start(model, zero_of(model.parameters()), level)


def test_unsupported_uses_of_a_zero_redundancy_optimizer_are_refused_with_the_way_out(ranks):
    ranks(zero_refused)
