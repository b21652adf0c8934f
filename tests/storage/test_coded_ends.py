"""Trainings on shards with state in eight bits or BF16 weights, ended by `kill -9` or Ctrl-C."""

from __future__ import annotations

import sys
from typing import Any

import coded_shards as fsdp
import pytest
import torch
import torch.distributed as dist
from coded_states import coded, in_codes, interrupt, loss_of
from ranks import RankError
from torch import Tensor
from training import backward, same

from amp_patch import amp

on_cpus = pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason="fully_shard of torch 2.6 does not run on CPUs: no Stream.record_event"
)


LEVELS = fsdp.SHARDED | {"rounded": fsdp.ROUNDED}


@pytest.mark.slow
@on_cpus
@pytest.mark.parametrize(
    ("make", "level"), [("AdamW", "O2"), ("NAdam", "O5"), ("SGD", "O1"), ("FusedAdam", "O4"), ("AdamW", "rounded")]
)
def test_a_killed_training_of_shards_resumes_to_the_bit_of_one_that_was_not(ranks, tmp_path, make, level):
    saved = str(tmp_path / "saved")
    straight = ranks(fsdp.resumable, make, LEVELS[level], range(5))
    with pytest.raises(RankError, match="exit code -9"):
        ranks(fsdp.resumable, make, LEVELS[level], range(5), "", saved, 4)
    resumed = ranks(fsdp.resumable, make, LEVELS[level], range(3, 5), saved)
    for rank, wanted in zip(resumed, straight, strict=True):
        assert rank["losses"] == wanted["losses"][3:] and same(rank["end"], wanted["end"])
        assert bool(rank["coded"]) is (level != "rounded") and rank["coded"] == wanted["coded"]


def interrupted_shards(make: str, level: str, stride: int) -> int:
    """Press Ctrl-C in the step at each `stride`-th line of amp_patch; return the number of lines."""

    def until_the_step() -> tuple[Any, Any]:
        model, optimizer = fsdp.start(make, **LEVELS[level])
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
        assert bool(coded(optimizer)) is (level != "rounded"), place
    return int(lines)


@on_cpus
@pytest.mark.parametrize(
    ("make", "level", "stride", "least"),
    [("AdamW", "O5", 53, 100), ("AdamW", "rounded", 29, 20)]
    + [
        pytest.param(make, level, stride, 20, marks=pytest.mark.slow)
        for level, stride in (("O5", 11), ("rounded", 7))
        for make in ("AdamW", "SGD", "NAdam")
    ],
)
def test_an_interrupt_leaves_each_shard_stepped_or_not_and_the_next_step_goes_on(ranks, make, level, stride, least):
    assert min(ranks(interrupted_shards, make, level, stride)) > least
