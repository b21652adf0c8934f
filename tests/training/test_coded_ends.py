"""Trainings with `optimizer_state="8bit"` on several processes that are ended from outside: `kill -9`, and Ctrl-C."""

from __future__ import annotations

import os
import sys
from typing import Any

import coded_shards as fsdp
import pytest
import torch
import torch.distributed as dist
from coded_shares import consolidated, start_zero, tensors_of
from coded_states import LEVELS, coded, die_in_the_next_step, go_on, in_codes, interrupt, loss_of, opened
from ranks import RankError
from torch import Tensor
from training import backward, masters_of, same

from amp_patch import amp

on_cpus = pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason="fully_shard of torch 2.6 does not run on CPUs: no Stream.record_event"
)

# ----------------------------------------------------------------------------------------------------------------------
# ZeRO


def killed_share(make: str, level: str, path: str, steps: range, end: int = 0) -> tuple[list[float], list[Tensor]]:
    """Train `steps`, from the checkpoint at `path` if there is one; rank 0 saves after step 2, rank 1 dies in `end`."""
    model, optimizer, wrapped = start_zero(make, LEVELS[level])
    if os.path.exists(path):
        states = torch.load(path)
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
        amp.load_state_dict(states[2])

    losses = []
    for step in steps:
        if end and step == end:
            die_in_the_next_step(optimizer.optim)
        losses += go_on(wrapped, optimizer, range(step, step + 1))
        if end and step == 2:
            states = [model.state_dict(), consolidated(optimizer), amp.state_dict()]
            if dist.get_rank() == 0:
                torch.save(states, path)
    assert coded(optimizer.optim)
    return losses, [*masters_of(optimizer), *tensors_of(optimizer.optim.state_dict())]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "level"), [("AdamW", "O2"), ("NAdam", "split"), ("FusedAdam", "O5"), ("AdamW", "stochastic")]
)
def test_a_killed_training_with_shares_resumes_to_the_bit_of_one_that_was_not(ranks, tmp_path, make, level):
    saved = str(tmp_path / "saved")
    straight = ranks(killed_share, make, level, saved, range(5))
    with pytest.raises(RankError, match="exit code -9"):
        ranks(killed_share, make, level, saved, range(5), 4)
    resumed = ranks(killed_share, make, level, saved, range(3, 5))
    for (losses, end), (wanted, its_end) in zip(resumed, straight, strict=True):
        assert losses == wanted[3:] and same(end, its_end)


def interrupted_share(make: str, level: str, stride: int) -> list[list[Tensor]]:
    """Ctrl-C in the step of the share, at each `stride`-th line of ours, on both processes; where these then come to.

    Who is interrupted sends nothing: it has stepped parameters of its share or not, and none of the others'.
    """

    def until_the_step() -> tuple[Any, Any]:
        _, optimizer, wrapped = start_zero(make, LEVELS[level])
        go_on(wrapped, optimizer, range(2))
        optimizer.zero_grad()
        backward(loss_of(wrapped, 2), optimizer)
        return optimizer, wrapped

    def found(optimizer: Any) -> tuple[list[Tensor], list[Tensor]]:
        return masters_of(optimizer), [t.clone() for t in tensors_of(optimizer.optim.state_dict())]

    optimizer, _ = until_the_step()
    before = found(optimizer)
    lines = torch.tensor(interrupt(sys.maxsize, optimizer.step))
    after = found(optimizer)
    dist.all_reduce(lines, dist.ReduceOp.MIN)
    assert lines > 20
    ends = []
    for place in range(0, int(lines), stride):
        amp.restore()
        optimizer, wrapped = until_the_step()
        kinds = [type(param) for group in optimizer.optim.param_groups for param in group["params"]]
        assert interrupt(place, optimizer.step) == place + 1
        assert [type(param) for group in optimizer.optim.param_groups for param in group["params"]] == kinds, place
        masters, states = found(optimizer)
        for ours, old, new in zip(masters, before[0], after[0], strict=True):
            assert torch.equal(ours, old) or torch.equal(ours, new), place
        for ours, old, new in zip(states, before[1], after[1], strict=True):
            assert torch.equal(ours, old) or torch.equal(ours, new) or torch.equal(in_codes(ours), new), place
        go_on(wrapped, optimizer, range(3, 4))
        assert coded(optimizer.optim) and opened(optimizer.optim) == 0, place
        ends.append(masters_of(optimizer))
    return ends


@pytest.mark.parametrize(
    ("make", "level", "stride"),
    [("AdamW", "split", 37)]
    + [
        pytest.param(make, level, 11, marks=pytest.mark.slow)
        for make in ("AdamW", "SGD", "NAdam")
        for level in ("O2", "split", "stochastic")
    ],
)
def test_an_interrupt_leaves_each_parameter_stepped_or_not_and_the_next_step_brings_all_in_step(
    ranks, make, level, stride
):
    for ours, theirs in zip(*ranks(interrupted_share, make, level, stride), strict=True):
        # Where one has stepped its share and the other has not, they have drawn otherwise since.
        assert level == "stochastic" or same(ours, theirs)


# ----------------------------------------------------------------------------------------------------------------------
# FSDP


@pytest.mark.slow
@on_cpus
@pytest.mark.parametrize(("make", "level"), [("AdamW", "O2"), ("NAdam", "O5"), ("SGD", "O1"), ("FusedAdam", "O4")])
def test_a_killed_training_of_shards_resumes_to_the_bit_of_one_that_was_not(ranks, tmp_path, make, level):
    saved = str(tmp_path / "saved")
    straight = ranks(fsdp.resumable, make, fsdp.SHARDED[level], range(5))
    with pytest.raises(RankError, match="exit code -9"):
        ranks(fsdp.resumable, make, fsdp.SHARDED[level], range(5), "", saved, 4)
    resumed = ranks(fsdp.resumable, make, fsdp.SHARDED[level], range(3, 5), saved)
    for rank, wanted in zip(resumed, straight, strict=True):
        assert rank["losses"] == wanted["losses"][3:] and same(rank["end"], wanted["end"])
        assert rank["coded"] and rank["coded"] == wanted["coded"]


def interrupted_shards(make: str, stride: int) -> int:
    """Ctrl-C in the step, at each `stride`-th line of ours; how many lines there are."""

    def until_the_step() -> tuple[Any, Any]:
        model, optimizer = fsdp.start(make)
        fsdp.go_on(model, optimizer, range(2))
        optimizer.zero_grad()
        backward(loss_of(model, dist.get_rank()), optimizer)
        return model, optimizer

    def found(model: Any, optimizer: Any) -> tuple[list[Tensor], list[Tensor]]:
        return fsdp.here(model.parameters()), fsdp.state_of(optimizer)

    model, optimizer = until_the_step()
    before = found(model, optimizer)
    lines = torch.tensor(interrupt(sys.maxsize, optimizer.step))
    after = found(model, optimizer)
    dist.all_reduce(lines, dist.ReduceOp.MIN)
    for place in range(0, int(lines), stride):
        amp.restore()
        model, optimizer = until_the_step()
        assert interrupt(place, optimizer.step) == place + 1
        params = list(model.parameters())
        assert [param for group in optimizer.param_groups for param in group["params"]] == params, place
        weights, states = found(model, optimizer)
        for ours, old, new in zip(weights, before[0], after[0], strict=True):
            assert torch.equal(ours, old) or torch.equal(ours, new), place
        for ours, old, new in zip(states, before[1], after[1], strict=True):
            assert torch.equal(ours, old) or torch.equal(ours, new) or torch.equal(in_codes(ours), new), place
        for param, state in optimizer.state.items():
            sharded = [value for value in state.values() if isinstance(value, Tensor) and value.dim()]
            assert sharded and all(value.placements == param.placements for value in sharded), place
        del sharded
        fsdp.go_on(model, optimizer, range(3, 4))
        assert coded(optimizer) and opened(optimizer) == 0, place
    return int(lines)


@on_cpus
@pytest.mark.parametrize(
    ("make", "stride"),
    [("AdamW", 53)] + [pytest.param(make, 11, marks=pytest.mark.slow) for make in ("AdamW", "SGD", "NAdam")],
)
def test_an_interrupt_leaves_each_shard_stepped_or_not_and_the_next_step_goes_on(ranks, make, stride):
    assert min(ranks(interrupted_shards, make, stride)) > 100
