"""Sharded gradients: an overflow in one shard, micro-batches that are held back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from crossed import crossed
from fsdp_trainings import (
    ADAM,
    SGD,
    four_fixture,  # noqa: F401  the fixture `four`
    full,
    fully_shard,
    loss_of,
    network,
    one_fixture,  # noqa: F401  the fixture `one`
    restored_fixture,  # noqa: F401  the fixture `restored`
    shard,
    sharded_training,
    weights,
)
from torch import Tensor, nn
from training import backward, same, skipped

from amp_patch import amp

pytestmark = pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason="fully_shard of torch 2.6 does not run on CPUs: no Stream.record_event"
)


# ---------------------------------------------------------------------------------------------------------------------
# Overflow.


class Rows(nn.Module):
    """A model whose gradients a test chooses: row i of the weight, on rank i, gets a quarter of the i-th input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))

    def forward(self, rows: Tensor) -> Tensor:
        return 0.25 * (self.weight * rows.unsqueeze(1)).float().sum()


def overflow_in_one_shard(level: str, dtype: Any, form: str, where: int, mesh: Any = None) -> list[Any]:
    """Three steps, the second with an overflow in the shard `where` alone; what this rank saw of each."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("replicas", "shards")) if mesh else None
    model = fully_shard(Rows(), mp_policy=amp.fsdp_policy(level, dtype=dtype), mesh=mesh)
    fused = form == "GradScaler without initialize, fused"
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5, fused=True) if fused else ADAM(model.parameters())
    if not form.startswith("GradScaler without"):
        model, optimizer = amp.initialize(
            model, optimizer, opt_level=level, dtype=dtype, loss_scale="dynamic", verbosity=0
        )
    scaler = amp.GradScaler("cpu")
    seen = []
    for step in range(3):
        rows = torch.ones(2)
        if step == 1:
            rows[where] = float("inf")
        optimizer.zero_grad()
        if form == "scale_loss":
            backward(model(rows), optimizer)
            optimizer.step()
            skip = skipped(optimizer)
        else:
            scaler.scale(model(rows).float()).backward()
            skip = not scaler.step(optimizer)
            scaler.update()
        finite = all(torch.isfinite(p.grad.to_local()).all().item() for p in model.parameters())
        seen.append((skip, finite, weights(model)[0]))
    return seen


@crossed(
    {
        "level, dtype, form": [
            ("O1", torch.float16, "scale_loss"),
            ("O2", torch.float16, "scale_loss"),
            ("O2", torch.bfloat16, "scale_loss"),
            ("O2", torch.float16, "GradScaler"),
            ("O0", None, "GradScaler without initialize"),
            ("O0", None, "GradScaler without initialize, fused"),
        ],
        "where": [0, 1],
    },
    meet=1,
)
def test_an_overflow_in_one_shard_is_skipped_by_all(ranks, level, dtype, form, where):
    both = ranks(overflow_in_one_shard, level, dtype, form, where)
    for rank, seen in enumerate(both):
        assert [skip for skip, _, _ in seen] == [False, True, False]
        assert [finite for _, finite, _ in seen] == [True, rank != where, True], "the other rank sees none of it"
        assert torch.equal(seen[0][2], seen[1][2]) and not torch.equal(seen[1][2], seen[2][2])
    assert all(torch.equal(a[2], b[2]) for a, b in zip(*both, strict=True))


@pytest.mark.parametrize("mesh", [(2, 1), (1, 2)])
def test_an_overflow_is_skipped_by_all_on_a_mesh_of_two_dimensions(ranks, mesh):
    both = ranks(overflow_in_one_shard, "O1", torch.float16, "scale_loss", 0, mesh)
    for seen in both:
        assert [skip for skip, _, _ in seen] == [False, True, False]
    assert [seen[1][1] for seen in both] == [False, mesh == (1, 2)]


@pytest.mark.slow
def test_an_overflow_is_skipped_by_replicas_of_shards(four):
    seen = four(overflow_in_one_shard, "O2", torch.float16, "scale_loss", 1, (2, 2))
    assert [[skip for skip, _, _ in one] for one in seen] == [[False, True, False]] * 4
    assert [one[1][1] for one in seen] == [True, False, True, False], "the shards of the others are finite"
    assert all(torch.equal(one[2][2], seen[0][2][2]) for one in seen)


def tensor_parallel(level: str) -> list[Any]:
    """The first layer's columns are on two ranks; a gradient of the second one's overflows, of a static scale too."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = nn.Sequential(nn.Linear(2, 4, bias=False), nn.Linear(4, 1, bias=False))
    with torch.no_grad():
        model[0].weight.fill_(1.0), model[1].weight.copy_(torch.tensor([[1.0, 1.0, 1.0, 2.0]]))
    mesh = init_device_mesh("cpu", (2,))
    model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    # Half the largest FP16 number, times 2 in one column.
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level=level, loss_scale=40000.0, verbosity=0)
    backward(model(torch.ones(1, 2)).float().sum(), optimizer)
    finite = torch.isfinite(model[0].weight.grad.to_local()).all().item()
    optimizer.step()
    return [finite, skipped(optimizer), full(model[0].weight).detach()]


def test_an_overflow_is_skipped_by_all_where_tensors_are_parallel(ranks):
    first, second = ranks(tensor_parallel, "O1")
    assert [first[:2], second[:2]] == [[True, True], [False, True]]
    assert torch.equal(first[2], torch.ones(4, 2)) and torch.equal(second[2], torch.ones(4, 2))


def overflow_in_the_reduction(reduce_dtype: torch.dtype) -> tuple[bool, bool]:
    """The scaled gradient is 40000 on both ranks: finite in FP16, and so is their sum only in FP32."""
    policy = amp.fsdp_policy("O2", reduce_dtype=reduce_dtype)
    model = fully_shard(Rows(), mp_policy=policy)
    model.set_gradient_divide_factor(1.0)
    model.set_force_sum_reduction_for_comms(True)  # gloo has no other
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level="O2", loss_scale=4.0, verbosity=0)
    backward(model(torch.tensor([40000.0, 1.0])), optimizer)
    finite = torch.isfinite(model.weight.grad.to_local()).all().item()
    optimizer.step()
    return finite, skipped(optimizer)


def test_an_overflow_of_the_half_reduction_is_seen(ranks):
    assert ranks(overflow_in_the_reduction, torch.float16) == [(False, True), (True, True)]
    assert ranks(overflow_in_the_reduction, torch.float32) == [(True, False)] * 2


# ---------------------------------------------------------------------------------------------------------------------
# Accumulation.


def accumulate(level: str, dtype: Any, form: str, delay: bool = False) -> tuple[list[Tensor], Any]:
    """Three steps of three micro-batches; `form`: all reduced, or only the last, or plain torch."""
    model = shard(network(), level, dtype)
    optimizer = SGD(model.parameters())
    if form != "torch":
        scale = {"loss_scale": 1024.0 if level == "O0" else "dynamic", "max_loss_scale": 1024.0}
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, dtype=dtype, verbosity=0, **scale)
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(3):
            model.set_requires_gradient_sync(micro == 2 or form == "synced")
            loss = loss_of(model, 3 * step + micro, dist.get_rank())
            if form == "torch":
                loss.backward()
            else:
                backward(loss, optimizer, delay_unscale=delay and micro < 2)
        optimizer.step()
    return weights(model), None if form == "torch" else amp.state_dict()["loss_scaler0"]


@crossed({"level, dtype": [("O0", None), ("O1", torch.float16), ("O2", torch.float16)], "delay": [False, True]}, meet=1)
def test_gradients_that_are_held_back_keep_one_scale(ranks, level, dtype, delay):
    (first, state), (second, other_state) = ranks(accumulate, level, dtype, "held back", delay)
    assert same(first, second) and state == other_state
    if level == "O0":
        assert same(first, ranks(accumulate, level, dtype, "torch")[0][0]), "a power of two changes no bit"
    else:
        assert state["unskipped"] == 3, "one iteration moves the scale once"
    for mine, other in zip(first, ranks(accumulate, level, dtype, "synced")[0][0], strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-5, atol=2e-6)


def two_losses(level: str | None, dtype: Any, held_back: bool, bad: bool) -> dict[str, Any]:
    """Loss 0, which overflows on rank 1 if `bad`, then loss 1: its first half is `held_back` or reduced by itself."""
    if level is None:
        model = shard(network(), "O0")
        optimizer = SGD(model.parameters())
    else:
        scale = {"num_losses": 2, "loss_scale": "dynamic", "max_loss_scale": 1024.0}
        model, optimizer = sharded_training(level, dtype, "SGD", **scale)
    start = weights(model)
    for micro in range(3):
        model.set_requires_gradient_sync(not (held_back and micro == 1))
        loss = loss_of(model, micro, dist.get_rank())
        if bad and micro == 0 and dist.get_rank() == 1:
            loss = loss * float("inf")
        loss.backward() if level is None else backward(loss, optimizer, loss_id=min(micro, 1))
    grads = [full(param.grad).clone() for param in amp.master_params(optimizer)]
    optimizer.step()
    return {
        "gradients": grads,
        "moved": not same(weights(model), start),
        "scales": None if level is None else [tuple(state.values()) for state in amp.state_dict().values()],
        "skipped": level is not None and skipped(optimizer),
    }


@crossed(
    {"level, dtype": [("O0", None), ("O1", torch.float16), ("O2", torch.float16)], "held_back": [False, True]}, meet=1
)
def test_the_overflow_of_another_loss_is_not_blamed_on_gradients_that_are_added(ranks, level, dtype, held_back):
    for seen in ranks(two_losses, level, dtype, held_back, True):
        assert seen["scales"] == [(512.0, 0), (1024.0, 1 if held_back else 2)] and seen["skipped"] and not seen["moved"]
        assert not all(grad.isfinite().all() for grad in seen["gradients"])
    plain = ranks(two_losses, None, None, held_back, False)[0]["gradients"]
    results = ranks(two_losses, level, dtype, held_back, False)
    assert same(results[0]["gradients"], results[1]["gradients"])
    for seen in results:
        assert seen["scales"] == [(1024.0, 1), (1024.0, 1 if held_back else 2)] and not seen["skipped"]
        for mine, theirs in zip(seen["gradients"], plain, strict=True):
            torch.testing.assert_close(
                mine, theirs, rtol=1e-2 if level != "O0" else 1e-6, atol=1e-2 if level != "O0" else 1e-6
            )


def two_scales() -> str:
    model, optimizer = sharded_training("O1", torch.float16, "SGD", num_losses=2)
    model.set_requires_gradient_sync(False)
    backward(loss_of(model, 0, dist.get_rank()), optimizer)
    with pytest.raises(RuntimeError) as error:
        backward(loss_of(model, 1, dist.get_rank()), optimizer, loss_id=1)
    return str(error.value)


def test_two_losses_cannot_be_held_back_at_two_scales(ranks):
    assert all("one loss_id" in message for message in ranks(two_scales))
