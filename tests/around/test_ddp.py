"""DistributedDataParallel and its kin at every level, in two processes: `ranks` runs the functions above the tests.

Ranks are told apart by their data alone, and what both must hold alike is compared bit by bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_trainings import SCALED, both_alike, close, learned, loss_of, mine, mlp, sgd, train_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training import ADAM, LEVELS, SGD, backward, convnet, images, linear, masters_of, same, skipped

from amp_patch import amp

pytestmark = pytest.mark.program


def train_alone(level: str, steps: int, **initialize: Any) -> list[Tensor]:
    """The same batches in one process."""
    model = mlp()
    model, optimizer = amp.initialize(model, ADAM(model.parameters()), opt_level=level, **initialize)
    for step in range(steps):
        optimizer.zero_grad()
        backward(loss_of(model, images(step)), optimizer)
        optimizer.step()
    return learned(model)


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_ranks_hold_the_same_bits_after_50_steps_though_they_began_with_other_weights(ranks, level):
    end = both_alike(ranks(train_ranks, level, make=convnet, seed_by_rank=True))
    start = both_alike(ranks(train_ranks, level, 0, make=convnet, seed_by_rank=True))
    assert not same(end, start)
    if level == "O0":
        assert same(end, both_alike(ranks(train_ranks, None, make=convnet, seed_by_rank=True)))


@pytest.mark.parametrize("level", LEVELS)
def test_two_ranks_train_as_one_process_does(ranks, level):
    together = both_alike(ranks(train_ranks, level, 20))
    # FP32 differs by the order of its sums; low-precision gradients are rounded before they are added.
    tolerance = {"O0": 1e-5, "O1": 1e-2, "O2": 1e-2, "O3": 3e-2}.get(level, 6e-2)
    close(together, train_alone(level, 20), tolerance)


class Branches(nn.Module):
    """A branch that no forward takes."""

    def __init__(self) -> None:
        super().__init__()
        self.taken, self.left = mlp(), nn.Linear(3, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.taken(inputs)


def branches(seed: int) -> nn.Module:
    return Branches()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_options_of_ddp_change_no_bit(ranks, level):
    plain = both_alike(ranks(train_ranks, level, 5))
    for options in ({"gradient_as_bucket_view": True}, {"static_graph": True}, {"bucket_cap_mb": 0.0001}):
        assert same(both_alike(ranks(train_ranks, level, 5, ddp=options)), plain), options
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": True}
    unused = both_alike(ranks(train_ranks, level, 5, make=branches, ddp=options))
    assert same(unused[:4], plain)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_communication_hook_that_compresses(ranks, level):
    plain = both_alike(ranks(train_ranks, level, 5))
    compressed = both_alike(ranks(train_ranks, level, 5, hook=True))
    close(compressed, plain, 1e-2)
    assert same(compressed, plain) == (level == "O2"), "O2's gradients are FP16 as they are; O1's were rounded"


def halves(level: str) -> dict[str, Any]:
    """Each rank trains another part of the model, and the second rank overflows in the second step."""
    model = linear([[1.0]])
    model, optimizer = amp.initialize(
        model,
        SGD(model.parameters()),
        opt_level=level,
        loss_scale="dynamic",
        process_group=dist.group.WORLD,
        verbosity=0,
    )
    seen: dict[str, Any] = {"skipped": [], "scales": []}
    for step in range(3):
        optimizer.zero_grad()
        value = float("inf") if step == 1 and dist.get_rank() == 1 else 0.25
        backward(model(torch.full((1, 1), value)).sum() / 4, optimizer)
        optimizer.step()
        seen["skipped"].append(skipped(optimizer))
        seen["scales"].append(amp.state_dict()["loss_scaler0"]["loss_scale"])
    return seen


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_a_process_group_skips_together(ranks, level):  # Apex's issue 237
    for seen in ranks(halves, level):
        assert seen == {"skipped": [False, True, False], "scales": [65536.0, 32768.0, 32768.0]}


def reduced_by_hand(level: str) -> list[Tensor]:
    """As Horovod does, the scaled gradients of the model are averaged in the body of scale_loss."""
    model = mlp()
    model, optimizer = amp.initialize(
        model, SGD(model.parameters()), opt_level=level, process_group=dist.group.WORLD, **SCALED
    )
    for step in range(5):
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model, mine(step)), optimizer) as scaled_loss:
            scaled_loss.backward()
            for param in model.parameters():
                param.grad /= 2
                dist.all_reduce(param.grad)
        optimizer.step()
    return learned(model)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_gradients_averaged_inside_scale_loss_train_like_under_ddp(ranks, level):
    assert same(
        both_alike(ranks(reduced_by_hand, level)), both_alike(ranks(train_ranks, level, 5, optim=sgd, **SCALED))
    )


def native_halves(grouped: bool, kind: str) -> list[Any]:
    model = linear([[1.0]])
    optimizer = {"SGD": SGD, "fused": lambda p: torch.optim.Adam(p, fused=True), "O2": SGD}[kind](model.parameters())
    if kind == "O2":
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale=1.0)
    scaler = amp.GradScaler("cpu", process_group=dist.group.WORLD if grouped else None)
    seen = []
    for step in range(4):
        optimizer.zero_grad()
        value = float("inf") if step == 1 and dist.get_rank() == 1 else 0.25
        loss = scaler.scale(model(torch.full((1, 1), value)).sum() / 4)
        if step != 2 or dist.get_rank() == 1:  # one without gradients takes part
            loss.backward()
        if step == 3:
            scaler.unscale_(optimizer)
        before = masters_of(optimizer)[0]
        scaler.step(optimizer)
        scaler.update()
        seen.append((not torch.equal(before, masters_of(optimizer)[0]), scaler.get_scale()))
    return seen


@pytest.mark.parametrize("kind", ["SGD", "fused", "O2"])
def test_native_scaling_over_a_process_group(ranks, kind):
    apart = ranks(native_halves, False, kind)
    assert apart[0][1] == (True, 65536.0) and apart[1][1] == (False, 32768.0)
    for seen in ranks(native_halves, True, kind):
        assert [scale for _, scale in seen] == [65536.0, 32768.0, 32768.0, 32768.0]
        assert not seen[1][0] and seen[3][0]


def uneven(level: str) -> dict[str, Any]:
    """The second rank has two batches more, and an overflow in the last of them."""
    model = mlp()
    model, optimizer = amp.initialize(
        model, SGD(model.parameters()), opt_level=level, loss_scale="dynamic", verbosity=0
    )
    wrapped = DistributedDataParallel(model)
    for epoch in range(2):
        with wrapped.join():
            for step in range(3 + 2 * dist.get_rank()):
                optimizer.zero_grad()
                inputs, targets = mine(10 * epoch + step)
                if step == 4:
                    inputs[0, 0, 0, 0] = float("inf")
                backward(nn.functional.cross_entropy(wrapped(inputs), targets), optimizer)
                optimizer.step()
    return {"learned": learned(model), "masters": masters_of(optimizer), "scale": amp.state_dict()["loss_scaler0"]}


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_join_takes_uneven_inputs_and_leaves_the_ranks_alike(ranks, level):
    results = ranks(uneven, level)
    both_alike([result["learned"] for result in results])
    both_alike([result["masters"] for result in results])
    for result in results:  # the second rank's, which has seen all: a gradient averaged has one scale
        assert result["scale"] == {"loss_scale": 16384.0, "unskipped": 0}
