"""FSDP2 (`fully_shard`) in two processes: the shards of a level train as one process does, and nobody skips alone."""

from __future__ import annotations

import inspect
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, Ranks
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from amp_patch import amp, optimizers

pytestmark = pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason="fully_shard of torch 2.6 does not run on CPUs: no Stream.record_event"
)
# From torch 2.15 a policy can tell parameters apart.
KNOWS_PARAMETERS = "param_dtype_override_fn" in inspect.signature(MixedPrecisionPolicy).parameters

averaged = pytest.mark.skipif(
    torch.__version__.startswith("2.8."), reason="fully_shard of torch 2.8 sums gradients over gloo, and averages none"
)

# Every level, and the other type of the two that have one.
KINDS = [
    ("O0", None),
    ("O1", torch.float16),
    ("O1", torch.bfloat16),
    ("O2", torch.float16),
    ("O2", torch.bfloat16),
    ("O4", None),
    ("O5", None),
]


def SGD(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def ADAM(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-2)


MAKERS: dict[str, Callable[..., Any]] = {
    "SGD": SGD,
    "Adam": ADAM,
    "FusedAdam": lambda params: optimizers.FusedAdam(params, lr=1e-2),
    "FusedAdagrad": optimizers.FusedAdagrad,
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    # 7 rows on two ranks are 4 and 3, and 1 row is 1 and none.
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 7), nn.Linear(7, 1))


def fully_shard(module: Any, mesh: Any = None, **kwargs: Any) -> Any:
    """torch's, over all ranks on the CPU: without a mesh it would take a GPU where there is one, over gloo."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module, mesh=mesh or init_device_mesh("cpu", (dist.get_world_size(),)), **kwargs)


def shard(model: nn.Sequential, level: str = "O1", dtype: Any = None, **kwargs: Any) -> nn.Sequential:
    policy = amp.fsdp_policy(level, dtype=dtype, **{k: kwargs.pop(k) for k in ("reduce_dtype",) if k in kwargs})
    fully_shard(model[0], mp_policy=policy, **kwargs)
    return fully_shard(model, mp_policy=policy, **kwargs)


def sharded_training(level: str, dtype: Any, maker: str, shards: Any = None, **kwargs: Any) -> tuple[Any, Any]:
    model = shard(network(), level, dtype, **(shards or {}))
    return amp.initialize(model, MAKERS[maker](model.parameters()), opt_level=level, dtype=dtype, verbosity=0, **kwargs)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 1, generator=generator)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    inputs, targets = batch(step, rank)
    return nn.functional.mse_loss(model(inputs).float(), targets)


def backward(loss: Tensor, optimizer: Any, **kwargs: Any) -> None:
    with amp.scale_loss(loss, optimizer, **kwargs) as scaled_loss:
        scaled_loss.backward()


def full(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def weights(model: nn.Module) -> list[Tensor]:
    return [full(value).detach().clone() for value in model.state_dict().values()]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# Two ranks and one process.


def train(level: str, dtype: Any, maker: str, steps: int = 6, **kwargs: Any) -> tuple[list[Tensor], list[float], Any]:
    model, optimizer = sharded_training(level, dtype, maker, **kwargs)
    norms, rank = [], dist.get_rank()
    for step in range(steps):
        optimizer.zero_grad()
        backward(loss_of(model, step, rank), optimizer)
        norms.append(full(torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.5)).item())
        optimizer.step()
    return weights(model), norms, amp.state_dict()


def train_alone(level: str, dtype: Any, maker: str, world: int = 2) -> tuple[list[Tensor], list[float]]:
    """The ranks' batches one after the other in one process; half the loss at double the scale gives the same bits."""
    model = network()
    scale = {} if level == "O0" else {"loss_scale": world * 1024.0}
    model, optimizer = amp.initialize(model, MAKERS[maker](model.parameters()), opt_level=level, dtype=dtype, **scale)
    norms = []
    for step in range(6):
        optimizer.zero_grad()
        for rank in range(world):
            backward(loss_of(model, step, rank) / world, optimizer)
        norms.append(torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.5).item())
        optimizer.step()
    return weights(model), norms


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    amp.restore()


@averaged
@pytest.mark.parametrize(
    ("level", "dtype", "maker"),
    [(*kind, "SGD") for kind in KINDS]
    + [("O2", torch.float16, name) for name in ("Adam", "FusedAdam", "FusedAdagrad")],
)
def test_two_ranks_train_as_one_process(ranks, level, dtype, maker):
    scale = {} if level == "O0" else {"loss_scale": 1024.0}
    (first, norms, _), (second, _, _) = ranks(train, level, dtype, maker, **scale)
    alone, norms_alone = train_alone(level, dtype, maker)
    assert same(first, second)
    # The norm is summed in another order, and the clipping takes that into the weights.
    torch.testing.assert_close(norms, norms_alone, rtol=1e-5, atol=0)
    assert max(norms) > 1.5 > min(norms), "some are clipped, some are not"
    for mine, other in zip(first, alone, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-5, atol=2e-6)


# ---------------------------------------------------------------------------------------------------------------------
# Overflow.


class Rows(nn.Module):
    """Gradients that a test chooses: row i of the weight gets a quarter of the i-th input. Each rank holds a row."""

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
            skipped, scale = optimizer._amp_stash.step_skipped, amp.state_dict()["loss_scaler0"]["loss_scale"]
        else:
            scaler.scale(model(rows).float()).backward()
            skipped = not scaler.step(optimizer)
            scaler.update()
            scale = scaler.get_scale()
        finite = all(torch.isfinite(p.grad.to_local()).all().item() for p in model.parameters())
        seen.append((skipped, scale, finite, weights(model)[0]))
    return seen


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize(
    ("level", "dtype", "form"),
    [
        ("O1", torch.float16, "scale_loss"),
        ("O2", torch.float16, "scale_loss"),
        ("O2", torch.bfloat16, "scale_loss"),
        ("O2", torch.float16, "GradScaler"),
        ("O0", None, "GradScaler without initialize"),
        ("O0", None, "GradScaler without initialize, fused"),
    ],
)
def test_an_overflow_in_one_shard_is_skipped_by_all(ranks, level, dtype, form, where):
    both = ranks(overflow_in_one_shard, level, dtype, form, where)
    for rank, seen in enumerate(both):
        assert [(skipped, scale) for skipped, scale, _, _ in seen] == [(False, 2**16), (True, 2**15), (False, 2**15)]
        assert [finite for _, _, finite, _ in seen] == [True, rank != where, True], "the other rank sees none of it"
        assert torch.equal(seen[0][3], seen[1][3]) and not torch.equal(seen[1][3], seen[2][3])
    assert all(torch.equal(a[3], b[3]) for a, b in zip(*both, strict=True))


@pytest.mark.parametrize("mesh", [(2, 1), (1, 2)])
def test_an_overflow_is_skipped_by_all_on_a_mesh_of_two_dimensions(ranks, mesh):
    both = ranks(overflow_in_one_shard, "O1", torch.float16, "scale_loss", 0, mesh)
    for seen in both:
        assert [(skipped, scale) for skipped, scale, _, _ in seen] == [(False, 2**16), (True, 2**15), (False, 2**15)]
    assert [seen[1][2] for seen in both] == [False, mesh == (1, 2)]


@pytest.mark.slow
def test_an_overflow_is_skipped_by_replicas_of_shards(four):
    seen = four(overflow_in_one_shard, "O2", torch.float16, "scale_loss", 1, (2, 2))
    assert [[skipped for skipped, _, _, _ in one] for one in seen] == [[False, True, False]] * 4
    assert [one[1][2] for one in seen] == [True, False, True, False], "the shards of the others are finite"
    assert all(torch.equal(one[2][3], seen[0][2][3]) for one in seen)


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
    return [finite, optimizer._amp_stash.step_skipped, full(model[0].weight).detach()]


def test_an_overflow_is_skipped_by_all_where_tensors_are_parallel(ranks):
    first, second = ranks(tensor_parallel, "O1")
    assert [first[:2], second[:2]] == [[True, True], [False, True]]
    assert torch.equal(first[2], torch.ones(4, 2)) and torch.equal(second[2], torch.ones(4, 2))


def overflow_that_is_told(where: int) -> list[str]:
    """What this rank says of an overflow in the shard `where`."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("amp_patch").addHandler(handler)
    model = fully_shard(Rows())
    model, optimizer = amp.initialize(model, ADAM(model.parameters()), opt_level="O1", loss_scale=0.5)
    rows = torch.ones(2)
    rows[where] = float("inf")
    backward(model(rows), optimizer)
    optimizer.step()
    logging.getLogger("amp_patch").removeHandler(handler)
    assert optimizer._amp_stash.step_skipped
    return told


@pytest.mark.parametrize("where", [0, 1])
def test_the_message_about_an_overflow_is_of_the_first_rank_and_asks_no_other(ranks, where):
    first, second = ranks(overflow_that_is_told, where, timeout=20)
    assert "skipped the step" in first[-1] and second == []
    known = "weight (Inf)" if where == 0 else "no gradient in the shards of this process"
    assert first[-1].endswith(f"not finite: {known}")


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
    return finite, optimizer._amp_stash.step_skipped


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


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize(("level", "dtype"), [("O0", None), ("O1", torch.float16), ("O2", torch.float16)])
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
        "skipped": level is not None and optimizer._amp_stash.step_skipped,
    }


@pytest.mark.parametrize("held_back", [False, True])
@pytest.mark.parametrize(("level", "dtype"), [("O0", None), ("O1", torch.float16), ("O2", torch.float16)])
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


def two_models(scaled: bool) -> list[Tensor]:
    """The second model takes a step, its gradients clipped, while the first one's are held back."""
    models = [shard(network()), shard(network())]
    first, second = optimizers = [SGD(model.parameters()) for model in models]
    if scaled:
        amp.initialize(models, optimizers, opt_level="O0", loss_scale=1024.0, verbosity=0)

    def pass_back(micro: int, model: nn.Module, optimizer: Any) -> None:
        loss = loss_of(model, micro, dist.get_rank())
        backward(loss, optimizer) if scaled else loss.backward()

    models[0].set_requires_gradient_sync(False)
    pass_back(0, models[0], first)
    pass_back(1, models[1], second)
    torch.nn.utils.clip_grad_norm_(models[1].parameters(), 0.25)
    second.step()
    models[0].set_requires_gradient_sync(True)
    pass_back(2, models[0], first)
    first.step()
    return weights(models[0]) + weights(models[1])


def test_gradients_that_are_held_back_are_no_matter_of_another_models_optimizer(ranks):
    plain = ranks(two_models, False)
    for mine, theirs in zip(ranks(two_models, True), plain, strict=True):
        assert same(mine, theirs), "a power of two changes no bit"


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints. A step has four micro-batches, however many ranks share them.


def resumable(level: str, dtype: Any, steps: range, load: str = "", save: str = "", end: int = 0) -> Any:
    """Train `steps`, from the checkpoint `load` if there is one; save one after step 2; rank 1 dies in step `end`."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    scale = {"loss_scale": "dynamic", "max_loss_scale": 1024.0}
    model, optimizer = sharded_training(level, dtype, "Adam", **scale)
    rank, world = dist.get_rank(), dist.get_world_size()

    def state() -> dict[str, Any]:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        return {"model": of_model, "optimizer": of_optimizer, "amp": amp.state_dict()}

    if load:
        found = state()
        dcp.load(found, checkpoint_id=load)
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
        amp.load_state_dict(found["amp"])
    losses = []
    for step in steps:
        optimizer.zero_grad()
        total = torch.zeros(())
        for micro in range(rank, 4, world):
            loss = loss_of(model, step, micro)
            model.set_requires_gradient_sync(micro + world >= 4)
            backward(loss * world / 4, optimizer)
            total += loss.detach() / 4
        if end and step == end and rank == 1:
            os._exit(9)
        optimizer.step()
        dist.all_reduce(total)
        losses.append(total.item())
        if step == 2 and save:
            dcp.save(state(), checkpoint_id=save)
    return losses, weights(model), amp.state_dict()["loss_scaler0"], optimizer.state_dict()["state"][0]["step"].item()


@pytest.fixture(scope="module")
def one() -> Iterator[Ranks]:
    with Ranks(1) as processes:
        yield processes


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4) as processes:
        yield processes


@pytest.mark.parametrize(("level", "dtype"), [("O1", torch.float16), ("O2", torch.float16), ("O5", None)])
def test_a_killed_training_resumes_to_the_bit_of_one_that_was_not(ranks, tmp_path, level, dtype):
    straight = ranks(resumable, level, dtype, range(6))
    with pytest.raises(RankError, match="exit code 9"):
        ranks(resumable, level, dtype, range(6), "", str(tmp_path / "saved"), 4)
    resumed = ranks(resumable, level, dtype, range(3, 6), str(tmp_path / "saved"))
    for (losses, trained, scale, count), (tail, again, scale_again, count_again) in zip(straight, resumed, strict=True):
        assert tail == losses[3:] and same(again, trained)
        assert (scale_again, count_again) == (scale, count)
        assert scale == {"loss_scale": 1024.0, "unskipped": 6} and count == 6


@averaged
@pytest.mark.parametrize(
    ("before", "after"),
    [("one", "ranks"), ("ranks", "one"), pytest.param("ranks", "four", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(("level", "dtype"), [("O1", torch.float16), ("O2", torch.bfloat16), ("O2", torch.float16)])
def test_another_number_of_ranks_goes_on_from_a_checkpoint(request, tmp_path, level, dtype, before, after):
    saved = str(tmp_path / "saved")
    losses, straight, scale, count = request.getfixturevalue(before)(resumable, level, dtype, range(6), "", saved)[0]
    tail, trained, *rest = request.getfixturevalue(after)(resumable, level, dtype, range(3, 6), saved)[0]
    torch.testing.assert_close(tail, losses[3:], rtol=1e-5, atol=0)
    for mine, other in zip(trained, straight, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-5, atol=2e-6)
    assert rest == [scale, count] and scale["unskipped"] == 6


def test_a_checkpoint_of_o2_loads_into_a_plain_model(ranks, tmp_path):
    """Its weights are FP32, and so is what `full_tensor` gives on each rank."""
    _, trained, _, _ = ranks(resumable, "O2", torch.float16, range(3))[0]
    model = network()
    model.load_state_dict(dict(zip(model.state_dict(), trained, strict=True)))
    assert {value.dtype for value in trained} == {torch.float32}


# ---------------------------------------------------------------------------------------------------------------------
# Other orders, and what is refused.


def initialized_first(level: str, dtype: Any, again: bool) -> tuple[list[Tensor], torch.dtype]:
    model = amp.initialize(network(), opt_level=level, dtype=dtype, verbosity=0)
    shard(model)
    optimizer = SGD(model.parameters())
    scaler = amp.GradScaler("cpu", init_scale=1024.0, enabled=level != "O0")
    if again:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, dtype=dtype, loss_scale=1024.0)
    for step in range(3):
        optimizer.zero_grad()
        output = loss_of(model, step, dist.get_rank())
        if again:
            backward(output, optimizer)
            optimizer.step()
        else:
            scaler.scale(output).backward()
            scaler.step(optimizer)
            scaler.update()
    dtype = model(torch.ones(1, 6)).dtype
    result = weights(model)
    amp.restore()
    assert model(torch.ones(1, 6)).dtype is torch.float32, "restored, though fully_shard's class lies over ours"
    return result, dtype


def sharded_first(level: str, dtype: Any) -> list[Tensor]:
    model, optimizer = sharded_training(level, dtype, "SGD", loss_scale=1024.0)
    for step in range(3):
        optimizer.zero_grad()
        backward(loss_of(model, step, dist.get_rank()), optimizer)
        optimizer.step()
    return weights(model)


@pytest.mark.parametrize("again", [False, True], ids=["GradScaler", "initialize again"])
@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_initialize_may_come_before_fully_shard_without_an_optimizer(ranks, level, again):
    for (first, dtype), other in zip(
        ranks(initialized_first, level, None, again), ranks(sharded_first, level, None), strict=True
    ):
        assert dtype is {"O0": torch.float32, "O1": torch.float16, "O4": torch.bfloat16}[level]
        assert same(first, other)


def refusal(what: str) -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy
    from torch.distributed.tensor import distribute_module

    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = network()
    with pytest.raises((ValueError, RuntimeError, TypeError)) as error:
        if what in ("O0", "O1", "O3"):
            amp.initialize(fully_shard(model, mp_policy=low), opt_level=what, dtype=torch.bfloat16)
        elif what == "O2 of FP32 shards":
            amp.initialize(fully_shard(model), opt_level="O2")
        elif what == "O2 of the other type":
            amp.initialize(fully_shard(model, mp_policy=low), opt_level="O2")
        elif what == "no masters":
            amp.initialize(fully_shard(model, mp_policy=low), opt_level="O5", master_weights=False)
        elif what == "batch norm":
            amp.initialize(fully_shard(nn.Sequential(nn.BatchNorm1d(6)), mp_policy=low), opt_level="O5")
        elif what == "tensor parallel":
            mesh = init_device_mesh("cpu", (2,))
            amp.initialize(distribute_module(model, mesh), opt_level="O2")
        elif what == "FSDP1":
            amp.initialize(FullyShardedDataParallel(model, device_id=torch.device("cpu")), opt_level="O1")
        elif what == "half":
            amp.initialize(fully_shard(model.half()), opt_level="O3")
        elif what == "policy of O3":
            amp.fsdp_policy("O3")
        elif what in ("late", "late, O2"):
            level = "O1" if what == "late" else "O2"
            model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level=level)
            fully_shard(model)
            backward(loss_of(model, 0, 0), optimizer)
        elif what == "FusedLAMB":
            fully_shard(model)
            optimizer = optimizers.FusedLAMB(model.parameters())
            loss_of(model, 0, 0).backward()
            optimizer.step()
        elif what == "FusedNovoGrad":
            fully_shard(model)
            optimizer = optimizers.FusedNovoGrad(model.parameters())
            loss_of(model, 0, 0).backward()
            optimizer.step()
        elif what == "find_loss_scale":
            amp.find_loss_scale(amp.initialize(fully_shard(model)), nn.functional.mse_loss, batch(0, 0))
        elif what == "inspect":
            with amp.inspect(amp.initialize(fully_shard(model))):
                pass
    return str(error.value)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("O0", ["'0.weight'", "torch.bfloat16", "opt_level 'O0' wants torch.float32", "fsdp_policy('O0'", "'O2'"]),
        ("O1", ["'0.weight'", "torch.bfloat16", "opt_level 'O1' wants torch.float32", "fsdp_policy('O1'"]),
        ("O3", ["'O3'", "choose opt_level='O2'"]),
        ("O2 of FP32 shards", ["in torch.float32", "wants torch.float16", "fsdp_policy('O2'"]),
        ("O2 of the other type", ["in torch.bfloat16", "wants torch.float16", "dtype=torch.float16"]),
        ("no masters", ["without master weights", "choose opt_level='O2'"]),
        ("batch norm", ["'0.weight'", "stays FP32", "fsdp_policy('O0')", "keep_batchnorm_fp32=False"]),
        ("tensor parallel", ["'0.weight'", "DTensor", "opt_level='O1'"]),
        ("FSDP1", ["FullyShardedDataParallel", "fully_shard"]),
        ("half", ["torch.float16", "model.float()"]),
        ("policy of O3", ["fsdp_policy", "'O3'", "choose opt_level='O2'"]),
        ("late", ["scale_loss", "after initialize()", "fully_shard", "make the optimizer"]),
        ("late, O2", ["scale_loss", "after initialize()", "fsdp_policy"]),
        ("FusedLAMB", ["FusedLAMB.step", "sharded", "FusedAdam"]),
        ("FusedNovoGrad", ["FusedNovoGrad.step", "sharded", "FusedAdam"]),
        ("find_loss_scale", ["find_loss_scale", "sharded", "a copy of the model"]),
        ("inspect", ["inspect", "sharded", "a copy of the model"]),
    ],
)
def test_what_cannot_be_is_refused_by_name(ranks, what, words):
    for message in ranks(refusal, what):
        assert all(word in message for word in words), message


# ---------------------------------------------------------------------------------------------------------------------
# What stays FP32 inside a cast model.


def kept(level: str, by_policy: bool) -> tuple[Any, Any, float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 1))
    if by_policy:
        fully_shard(model, mp_policy=amp.fsdp_policy(level, models=model, keep_fp32="3"))
    else:
        for index in (1, 3):
            fully_shard(model[index], mp_policy=amp.fsdp_policy("O0"))
        fully_shard(model, mp_policy=amp.fsdp_policy(level))
    types = {}
    for name, module in model.named_children():
        module.register_forward_hook(
            lambda m, args, output, name=name: types.update(
                {name: (args[0].dtype, [p.dtype for p in m.parameters()], output.dtype)}
            )
        )
    model, optimizer = amp.initialize(
        model, SGD(model.parameters()), opt_level=level, keep_fp32="3", loss_scale=256.0, verbosity=0
    )
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = loss_of(model, 0, dist.get_rank())
        backward(loss, optimizer)
        optimizer.step()
        losses.append(loss.item())
    return types, {name: value.dtype for name, value in model.state_dict().items()}, losses[-1] / losses[0]


@averaged
@pytest.mark.parametrize("by_policy", [False, True][: 1 + KNOWS_PARAMETERS])
@pytest.mark.parametrize(("level", "low"), [("O2", torch.float16), ("O5", torch.bfloat16)])
def test_modules_stay_fp32_by_a_shard_of_their_own_or_by_the_policy(ranks, level, low, by_policy):
    for types, state, progress in ranks(kept, level, by_policy):
        assert types["0"] == (low, [low, low], low)
        assert types["1"] == (low, [torch.float32] * 2, low)
        assert types["3"] == (low, [torch.float32] * 2, low)
        assert {dtype for dtype in state.values() if dtype.is_floating_point} == {torch.float32}
        assert progress < 0.5


@pytest.mark.parametrize("by_policy", [False, True][: 1 + KNOWS_PARAMETERS])
def test_both_ways_to_keep_modules_fp32_train_alike(ranks, by_policy):
    for (*_, apart), (*_, together) in zip(ranks(kept, "O5", False), ranks(kept, "O5", by_policy), strict=True):
        assert apart == together


def test_a_policy_of_models_keeps_their_batch_norms_and_keep_fp32():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.LayerNorm(2))
    policy = amp.fsdp_policy("O5", models=model, keep_fp32=nn.LayerNorm)
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    if KNOWS_PARAMETERS:
        assert [policy.param_dtype_override_fn(p) for p in model.parameters()] == [None] * 2 + [torch.float32] * 4
        some = amp.fsdp_policy("O5", models=[model], keep_batchnorm_fp32=False, keep_fp32="2")
        assert [some.param_dtype_override_fn(p) for p in model.parameters()] == [None] * 4 + [torch.float32] * 2
    assert amp.fsdp_policy("O1", models=model) == amp.fsdp_policy("O1")
    with pytest.raises(ValueError, match=r"^fsdp_policy: keep_fp32 is '2' and models is None; .*models=model"):
        amp.fsdp_policy("O5", keep_fp32="2")
    with pytest.raises(ValueError, match=r"^fsdp_policy: keep_fp32 names 'norm', which matches no module"):
        amp.fsdp_policy("O5", models=model, keep_fp32="norm")


# ---------------------------------------------------------------------------------------------------------------------
# The weight-cast cache.


def steps_in_one_region() -> tuple[list[Tensor], list[Tensor]]:
    trained = []
    for around in ("the steps", "each forward"):
        model = shard(network())
        optimizer = SGD(model.parameters())
        scaler = amp.GradScaler("cpu", init_scale=1024.0)
        with amp.autocast("cpu", dtype=torch.bfloat16) if around == "the steps" else nullcontext():
            for step in range(3):
                optimizer.zero_grad()
                with amp.autocast("cpu", dtype=torch.bfloat16):
                    loss = loss_of(model, step, dist.get_rank())
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        trained.append(weights(model))
    return trained[0], trained[1]


def casts_after_forward() -> int:
    from amp_patch.casts import regions
    from amp_patch.casts import state as casts_state

    model, _ = sharded_training("O1", torch.bfloat16, "SGD")
    with regions.region(amp.initialize(network(), opt_level="O4")._amp.policy), torch.no_grad():
        loss_of(model, 0, dist.get_rank())
        return casts_state.state().cached()


def test_no_cast_of_a_gathered_weight_outlives_it(ranks):
    for one_region, each in ranks(steps_in_one_region):
        assert same(one_region, each)
    assert ranks(casts_after_forward) == [0, 0]


def gathered_and_saved() -> tuple[list[Tensor], list[Tensor]]:
    """The weights that a forward at O2 computes with after a step, and those of the state dict, cast."""
    model, optimizer = sharded_training("O2", torch.float16, "SGD")
    backward(loss_of(model, 0, dist.get_rank()), optimizer)
    optimizer.step()
    seen: list[Tensor] = []
    for module in model:
        module.register_forward_pre_hook(lambda m, args: seen.extend(p.detach().clone() for p in m.parameters()))
    loss_of(model, 1, dist.get_rank())
    return seen, [value.half() for value in weights(model)]


def test_a_sampler_that_takes_the_state_dict_rounds_as_the_trainer_does(ranks):
    for gathered, saved in ranks(gathered_and_saved):
        assert {value.dtype for value in gathered} == {torch.float16} and same(gathered, saved)


def test_importing_amp_patch_imports_nothing_of_fsdp():
    code = """
import sys, amp_patch
print([name for name in sys.modules if name.startswith(("torch.distributed.tensor", "torch.distributed.fsdp"))])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
