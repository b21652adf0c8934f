"""An overflow under torch's PowerSGD hook, which stores an error feedback for the next iteration (docs/limits.md)."""

from __future__ import annotations

from typing import Any

import torch
from crossed import crossed
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import backward, skipped

from amp_patch import amp


def skips(level: str, how: str) -> list[bool]:
    """Return for each step whether it was skipped. The loss of the fourth step is infinite."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, loss_scale=128.0, verbosity=0
    )
    wrapped = DistributedDataParallel(model)
    options: dict[str, Any] = {"use_error_feedback": False, "warm_start": False} if how == "keeps nothing" else {}
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, **options)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    skips = []
    for step in range(7):
        loss = wrapped(torch.ones(8, 64)).float().square().mean() * (torch.inf if step == 3 else 1)
        optimizer.zero_grad()
        backward(loss, optimizer)
        optimizer.step()
        skips.append(skipped(optimizer))
        if skips[-1] and how == "cleared":
            for kept in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
                kept.clear()
    amp.restore()
    return skips


@crossed({"level": ["O1", "O2"], "how": ["keeps nothing", "cleared", "as it is"]}, meet=1)
def test_an_overflow_stays_in_what_the_hook_keeps(ranks, level, how):
    after = how == "as it is"
    assert ranks(skips, level, how) == [[False] * 3 + [True] + [after] * 3] * 2
