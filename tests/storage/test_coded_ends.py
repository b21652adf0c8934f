"""Trainings on shards with state in eight bits or BF16 weights, ended by `kill -9` or Ctrl-C."""

from __future__ import annotations

import coded_shards as fsdp
import pytest
import torch
from ranks import RankError
from training import same

on_cpus = pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason="fully_shard of torch 2.6 does not run on CPUs: no Stream.record_event"
)


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
