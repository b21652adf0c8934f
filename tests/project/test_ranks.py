"""The ranks that tests of torch.distributed share: a failure in one is reported, and later tests still run."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist
from ranks import RankError


def total(start: float) -> torch.Tensor:
    value = torch.tensor(start + dist.get_rank())
    dist.all_reduce(value)
    return value


def who() -> int:
    return os.getpid()


def fail_on(rank: int, how: str) -> torch.Tensor:
    if dist.get_rank() == rank:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("this rank's own")
    return total(0.0)


def never() -> None:
    dist.recv(torch.zeros(1))  # nobody sends


@pytest.mark.parametrize(("how", "told"), [("raised", "this rank's own"), ("killed", "exit code -9")])
def test_a_failure_is_raised_and_the_next_call_has_new_processes(ranks, how, told):
    before = ranks(who)
    with pytest.raises(RankError, match=f"rank 1: [^@]*{told}"):
        ranks(fail_on, 1, how)
    assert ranks(total, 0.0) == [torch.tensor(1.0)] * 2
    assert not set(before) & set(ranks(who))


def test_a_hang_is_raised(ranks):
    with pytest.raises(RankError, match=r"rank 0: not done after 0\.5 s"):
        ranks(never, timeout=0.5)
    assert ranks(total, 1.0) == [torch.tensor(3.0)] * 2
