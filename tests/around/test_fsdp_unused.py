"""Parameters that some forwards leave out, under `fully_shard`, against one process that has all the batches."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from crossed import crossed
from fsdp_trainings import averaged, full, fully_shard
from torch import Tensor, nn

from amp_patch import amp


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        for number, value in enumerate(self.parameters()):
            nn.init.constant_(value, (number + 1) / 4)

    def forward(self, inputs: Tensor, factor: float | None) -> Tensor:
        """Without a factor, the second branch is not called."""
        out = self.first(inputs)
        return out if factor is None else out + factor * self.second(inputs)


def batch(step: int, rank: int) -> Tensor:
    """Integers, so that sums of gradients and the steps of SGD are exact in every type."""
    return torch.randint(-3, 4, (4, 4), generator=torch.Generator().manual_seed(10 * step + rank)).float()


def factor(form: str, step: int, rank: int) -> float | None:
    """`all`: no rank calls the branch in odd steps. `one`: rank 1 multiplies it by zero, as torch asks for."""
    if step % 2 == 0:
        return 1.0
    return None if form == "all" else (0.0 if rank == 1 else 1.0)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=2**-4, momentum=0.5)


def sharded(level: str, form: str) -> list[Tensor]:
    model, rank = Branches(), dist.get_rank()
    policy = amp.fsdp_policy(level)
    for part in (model.first, model.second, model):
        fully_shard(part, mp_policy=policy)
    scale = {"loss_scale": 16.0} if level in ("O1", "O2") else {}
    model, optimizer = amp.initialize(model, optimizer_of(model), opt_level=level, verbosity=0, **scale)
    for step in range(6):
        loss = model(batch(step, rank), factor(form, step, rank)).float().sum()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [full(value).detach().clone() for value in amp.master_params(optimizer)]


def alone(form: str) -> Iterator[Tensor]:
    model = Branches()
    optimizer = optimizer_of(model)
    for step in range(6):
        for rank in range(2):
            (model(batch(step, rank), factor(form, step, rank)).sum() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.parameters()


@averaged
@crossed({"level": ["O0", "O1", "O2", "O4", "O5"], "form": ["all", "one"]}, meet=2)
def test_a_branch_that_steps_leave_out_trains_as_in_one_process(ranks, level, form):
    for masters in ranks(sharded, level, form):
        for mine, truth in zip(masters, alone(form), strict=True):
            assert torch.equal(mine, truth)
