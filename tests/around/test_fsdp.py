"""FSDP2 (`fully_shard`) on two ranks: shards train as on one process, and all ranks skip a step together."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from crossed import crossed
from fsdp_trainings import (
    MAKERS,
    SGD,
    averaged,
    batch,
    four_fixture,  # noqa: F401  the fixture `four`
    full,
    fully_shard,
    load_checkpoint,
    loss_of,
    network,
    one_fixture,  # noqa: F401  the fixture `one`
    restored_fixture,  # noqa: F401  the fixture `restored`
    save_checkpoint,
    shard,
    sharded_training,
    weights,
)
from ranks import RankError
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from training import backward, same

from amp_patch import amp, optimizers
from amp_patch.supported import reason

pytestmark = [
    pytest.mark.program,  # ranks that are killed, and begun anew in another number
    pytest.mark.skipif(
        torch.__version__.startswith("2.6."),
        reason="fully_shard of torch 2.6 does not run on CPUs: no Stream.record_event",
    ),
]


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


# ---------------------------------------------------------------------------------------------------------------------
# Two ranks and one process.


def train_clipped(
    level: str, dtype: Any, maker: str, steps: int = 6, **kwargs: Any
) -> tuple[list[Tensor], list[float], Any]:
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


@averaged
@pytest.mark.parametrize(
    ("level", "dtype", "maker"),
    [(*kind, "SGD") for kind in KINDS]
    + [("O2", torch.float16, name) for name in ("Adam", "FusedAdam", "FusedAdagrad")],
)
def test_two_ranks_train_as_one_process(ranks, level, dtype, maker):
    scale = {} if level == "O0" else {"loss_scale": 1024.0}
    (first, norms, _), (second, _, _) = ranks(train_clipped, level, dtype, maker, **scale)
    alone, norms_alone = train_alone(level, dtype, maker)
    assert same(first, second)
    # The norm is summed in another order, and the clipping takes that into the weights.
    torch.testing.assert_close(norms, norms_alone, rtol=1e-5, atol=0)
    assert max(norms) > 1.5 > min(norms), "some are clipped, some are not"
    for mine, other in zip(first, alone, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-5, atol=2e-6)


def train_with_shards_on_the_host(level: str) -> tuple[list[Tensor], list[float], Any]:
    shards = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    return train_clipped(level, None, "Adam", shards=shards, loss_scale=1024.0)


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_torchs_offload_of_shards_trains_to_the_same_bits(ranks, level):
    """It is what `master_device` is refused for. On a CPU the policy takes torch's code for shards on the host."""
    found, wanted = (
        ranks(train_with_shards_on_the_host, level),
        ranks(train_clipped, level, None, "Adam", loss_scale=1024.0),
    )
    assert same(found[0][0], wanted[0][0]) and found[0][1:] == wanted[0][1:]


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints. A step has four micro-batches, however many ranks share them.


def resumable(level: str, dtype: Any, steps: range, load: str = "", save: str = "", end: int = 0) -> Any:
    """Train `steps`, from the checkpoint `load` if there is one; save one after step 2; rank 1 dies in step `end`."""
    scale = {"loss_scale": "dynamic", "max_loss_scale": 1024.0}
    model, optimizer = sharded_training(level, dtype, "Adam", **scale)
    rank, world = dist.get_rank(), dist.get_world_size()
    if load:
        load_checkpoint(model, optimizer, load)
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
            save_checkpoint(model, optimizer, save)
    return losses, weights(model), amp.state_dict()["loss_scaler0"], optimizer.state_dict()["state"][0]["step"].item()


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


@crossed(
    {"level": ["O0", "O1", "O4"]},
    pytest.mark.parametrize("again", [False, True], ids=["GradScaler", "initialize again"]),
    meet=1,
)
def test_initialize_may_come_before_fully_shard_without_an_optimizer(ranks, level, again):
    for (first, dtype), other in zip(
        ranks(initialized_first, level, None, again), ranks(sharded_first, level, None), strict=True
    ):
        assert dtype is {"O0": torch.float32, "O1": torch.float16, "O4": torch.bfloat16}[level]
        assert same(first, other)


def refusal(what: str) -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel
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
        elif what == "codes under tensor parallelism":
            distribute_module(model, init_device_mesh("cpu", (2,)))
            amp.initialize(model, SGD(model.parameters()), opt_level="O0", optimizer_state="8bit")
        elif what == "a group of shards":
            model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level="O5+split")
            optimizer.add_param_group({"params": fully_shard(network().bfloat16(), mp_policy=low).parameters()})
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
        ("codes under tensor parallelism", ["optimizer_state='8bit'", reason("8bit", "FSDP2")]),
        ("a group of shards", ["add_param_group: parameter 0 is sharded", reason("split", "FSDP2")]),
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
def test_unsupported_combinations_are_refused_by_name(ranks, what, words):
    for message in ranks(refusal, what):
        assert all(word in message for word in words), message


def tensor_parallel(level: str, sharded: bool) -> str:
    """Refuse a layer between others, whose weight is a DTensor in its product too; nothing changes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"1": ColwiseParallel()})
    if sharded:
        fully_shard(model, mesh=mesh["data"], mp_policy=amp.fsdp_policy(level))
    optimizer, kind = torch.optim.SGD(model.parameters(), lr=0.5), type(model)
    with pytest.raises(ValueError, match="initialize") as refused:
        amp.initialize(model, optimizer, opt_level=level)
    assert type(model) is kind
    return str(refused.value)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("level", ["O6", "O7"])
def test_products_in_fp8_under_tensor_parallelism_are_refused_by_name(ranks, level, sharded):
    for told in ranks(tensor_parallel, level, sharded):
        first = "0.weight" if sharded else "1.weight"
        assert told.startswith(f"initialize: parameter {first!r} is sharded, and opt_level {level!r} is not for shards")
        assert told.endswith(reason("formats", "FSDP2"))
