"""`master_weights="stochastic"` with torch's `fully_shard`: random bits depend on the place in the whole parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from coded_shards import (
    MAKERS,
    ROUNDED,
    SHARDED,
    go_on,
    here,
    net,
    sharded,
    start,
    state_of,
)
from coded_states import coded, loss_of
from coded_states import state_of as whole_state_of
from fsdp_trainings import (
    averaged,
    four_fixture,  # noqa: F401  the fixture `four`
    full,
    fully_shard,
    one_fixture,  # noqa: F401  the fixture `one`
    restored_fixture,  # noqa: F401  the fixture `restored`
)
from torch import Tensor, nn
from training import backward, same

from amp_patch import amp
from amp_patch.training.arguments import ClosureAlreadyRun

pytestmark = pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason="fully_shard of torch 2.6 does not run on CPUs: no Stream.record_event"
)

OPTIONS = {"FP32 state": ROUNDED, "8 bit": SHARDED["stochastic"]}

# ----------------------------------------------------------------------------------------------------------------------
# The numbers


def even() -> nn.Sequential:
    """Whose shards end, on up to four processes, where torch's vectorized loops and the blocks of 256 do."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 1024), nn.GELU(), nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 64))


def whole_training(make: str, options: Any, build: Any, shards: bool) -> dict[str, Any]:
    """Each process has the same batches, so that the mean of their gradients is each one's."""
    model = build()
    inputs = torch.randn(8, 48, generator=torch.Generator().manual_seed(0))
    if shards:
        model = fully_shard(model.bfloat16(), mp_policy=amp.fsdp_policy("O5"))
    options = {"optimizer_state": None, "verbosity": 0} | options
    model, optimizer = amp.initialize(model, MAKERS[make](model.parameters()), **options)
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        loss = (model(inputs).float() - step).square().mean()
        losses.append(loss.item())
        backward(loss, optimizer)
        optimizer.step()
    return {
        "losses": losses,
        "weights": [full(p).detach().clone() for p in model.parameters()],
        "state": list(map(full, whole_state_of(optimizer))),
        "chance": amp.state_dict(),
    }


@pytest.mark.parametrize(
    ("make", "options"),
    [("AdamW", ROUNDED), ("NAdam", SHARDED["stochastic"])]
    + [
        pytest.param(make, options, marks=pytest.mark.slow)
        for make in ("AdamW", "SGD", "FusedAdam", "RMSprop")
        for options in OPTIONS.values()
    ],
)
@averaged
def test_one_process_two_and_an_unsharded_model_have_the_same_bits(ranks, one, make, options):
    wanted = whole_training(make, options, even, shards=False)
    for result in (*one(whole_training, make, options, even, True), *ranks(whole_training, make, options, even, True)):
        assert result["losses"] == wanted["losses"] and result["chance"] == wanted["chance"]
        assert same(result["weights"], wanted["weights"]) and same(result["state"], wanted["state"])


@pytest.mark.slow
@averaged
def test_four_processes_have_them_too_and_so_have_rows_that_do_not_divide(ranks, four):
    for build in (even, net):
        wanted = whole_training("NAdam", ROUNDED, build, shards=False)
        arguments = (whole_training, "NAdam", ROUNDED, build, True)
        for result in (*four(*arguments), *ranks(*arguments)):
            assert same(result["weights"], wanted["weights"]) and result["losses"] == wanted["losses"]


def of_two_meshes() -> list[Tensor]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(net().bfloat16(), mesh, mp_policy=amp.fsdp_policy("O5"))
    model, optimizer = amp.initialize(model, MAKERS["NAdam"](model.parameters()), **ROUNDED, verbosity=0)
    for step in range(4):
        optimizer.zero_grad()
        inputs = torch.randn(8, 48, generator=torch.Generator().manual_seed(0))
        backward((model(inputs).float() - step).square().mean(), optimizer)
        optimizer.step()
    return [full(p).detach().clone() for p in model.parameters()]


@pytest.mark.slow
@averaged
def test_hybrid_sharding_rounds_replicas_alike(four):
    wanted = whole_training("NAdam", ROUNDED, net, shards=False)["weights"]
    assert all(same(weights, wanted) for weights in four(of_two_meshes))


def held() -> list[tuple[int, dict[str, int]]]:
    """Of each parameter the elements here, and the bytes of weight, gradient and state."""
    model, optimizer = start("AdamW", **ROUNDED)
    go_on(model, optimizer, range(1))
    backward(loss_of(model, 1), optimizer)
    optimizer.step()
    found = []
    for param, state in optimizer.state.items():
        tensors = {"weight": param, "grad": param.grad, **{n: state[n] for n in ("exp_avg", "exp_avg_sq")}}
        sizes = {name: here([t])[0].nbytes for name, t in tensors.items()}
        found.append((param.to_local().numel(), sizes))
    return found


def test_each_process_has_twelve_bytes_for_each_of_its_elements(ranks):
    for rank in ranks(held):
        assert len(rank) == 8
        for size, sizes in rank:
            assert sizes == {"weight": 2 * size, "grad": 2 * size, "exp_avg": 4 * size, "exp_avg_sq": 4 * size}


# ----------------------------------------------------------------------------------------------------------------------
# Overflow, accumulation, clipping, closures, readers and writers


def chance() -> dict[str, Any]:
    return amp.state_dict()["loss_scaler0"]["stochastic_rounding"]


def accumulated(make: str, ways: str) -> list[Tensor]:
    """Two micro-batches that are powers of two of one another, whose sum and norm BF16 and FP32 have exactly."""
    model, optimizer = start(make, **ROUNDED)
    for step in range(3):
        optimizer.zero_grad()
        for part in (0.5, 0.25, 0.25) if ways == "parts" else (1.0,):
            backward(part * loss_of(model, step), optimizer)
        if ways == "clipped":
            nn.utils.clip_grad_value_(model.parameters(), 2.0**-10)
        if ways == "by hand":
            for param in model.parameters():
                param.grad.to_local().clamp_(-(2.0**-10), 2.0**-10)
        optimizer.step()
    return [*here(model.parameters()), *state_of(optimizer)]


@pytest.mark.parametrize("make", ["AdamW", "NAdam"])
def test_gradients_add_up_and_are_clipped_on_the_shards(ranks, make):
    parts, whole, clipped, by_hand = (
        ranks(accumulated, make, ways) for ways in ("parts", "whole", "clipped", "by hand")
    )
    assert all(map(same, parts, whole)) and all(map(same, clipped, by_hand))
    assert not same(clipped[0], whole[0])


def with_closure(made: bool) -> dict[str, Any]:
    """A closure that runs before the step, as in unedited scripts."""
    model, optimizer = start("SGD", **ROUNDED)
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        backward(loss, optimizer)
        if made:
            with pytest.raises(RuntimeError, match="a closure is not for master_weights='stochastic'"):
                optimizer.step(lambda: None)
            assert optimizer.step(ClosureAlreadyRun(loss)) is loss
        else:
            optimizer.step()
    return {"weights": here(model.parameters()), "state": state_of(optimizer)}


def test_a_closure_is_refused_and_one_that_has_run_is_not(ranks):
    for ours, wanted in zip(ranks(with_closure, True), ranks(with_closure, False), strict=True):
        assert same(ours["weights"], wanted["weights"]) and same(ours["state"], wanted["state"])


def read_and_written(make: str) -> None:
    model, optimizer = start(make, **ROUNDED)
    go_on(model, optimizer, range(2))
    param = model[2].weight
    assert optimizer.param_groups[0]["params"][2] is param, "checkpoints find shards by identity"
    assert list(amp.master_params(optimizer)) == list(model.parameters())
    for name in ("exp_avg", "exp_avg_sq"):
        value = optimizer.state[param][name]
        assert value.dtype is torch.float32 and value.shape == param.shape and value.placements == param.placements
    optimizer.state[param]["exp_avg"].zero_()
    optimizer.state[param]["exp_avg_sq"] = torch.ones_like(optimizer.state[param]["exp_avg_sq"])
    before, optimizer.param_groups[0]["lr"] = here([param]), 0.0
    go_on(model, optimizer, range(2, 3))
    assert same(here([param]), before), "a number that BF16 has stays"
    assert float(optimizer.state[param]["exp_avg_sq"].to_local().min()) > 0.5, "what was written is stepped"
    with torch.no_grad():
        param.fill_(1.0)
    go_on(model, optimizer, range(3, 4))
    assert bool((param.to_local() == 1).all())


@pytest.mark.parametrize("make", ["AdamW", "NAdam"])
def test_groups_hold_the_shards_and_who_reads_the_state_finds_dtensors_in_fp32(ranks, make):
    ranks(read_and_written, make)


def grows(kind: str) -> None:
    rounds = kind != "FP32 shards"
    model = sharded("O5", torch.bfloat16 if rounds else torch.float32)
    model[2].requires_grad_(not rounds)
    optimizer, later = MAKERS["AdamW"](list(model[:3].parameters())), list(model[3:].parameters())
    options = {"opt_level": "O5"} | (ROUNDED if rounds else {})
    options |= {} if kind == "rounded" else {"optimizer_state": "8bit"}
    model, optimizer = amp.initialize(model, optimizer, **options, verbosity=0)
    go_on(model, optimizer, range(2))
    optimizer.add_param_group({"params": later, "lr": 1.0})
    model[2].requires_grad_(True)
    before = here(model.parameters())
    go_on(model, optimizer, range(2, 3))
    assert optimizer.param_groups[1]["lr"] == 1.0
    if kind == "rounded":
        assert len(chance()["steps"]) == 8
    else:
        assert coded(optimizer)["exp_avg"] == 2 - dist.get_rank()
    assert not any(same([a], [b]) for a, b in zip(before, here(model.parameters()), strict=True) if a.numel())


@pytest.mark.parametrize("kind", ["rounded", "8 bit", "FP32 shards"])
def test_a_group_that_comes_later_and_shards_that_were_frozen(ranks, kind):
    ranks(grows, kind)


def without_policy(policy: Any) -> list[Tensor]:
    """fully_shard gathers parameters in their own type where it is not told of another."""
    model = fully_shard(net().bfloat16(), **({} if policy is None else {"mp_policy": amp.fsdp_policy(policy)}))
    model, optimizer = amp.initialize(model, MAKERS["AdamW"](model.parameters()), **ROUNDED, verbosity=0)
    for step in range(3):
        optimizer.zero_grad()
        backward(loss_of(model, step), optimizer)
        optimizer.step()
    return here(model.parameters())


def test_shards_in_bf16_need_no_policy(ranks):
    assert all(map(same, ranks(without_policy, None), ranks(without_policy, "O5")))


def begun_in_bf16(make: Any) -> None:
    """Steps of torch's own, or the optimizer's constructor, have left state in BF16 when the training begins."""
    model = sharded("O5", torch.bfloat16)
    optimizer = make(list(model.parameters()))
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = [value.float() for value in state_of(optimizer)]
    model, optimizer = amp.initialize(model, optimizer, **ROUNDED, verbosity=0)
    assert same(state_of(optimizer), before)
    parts = [nn.Parameter(part.float()) for part in here(model.parameters())]
    reference = make(parts)
    for part, state in zip(parts, optimizer.state_dict()["state"].values(), strict=True):
        reference.state[part] = {name: here([value])[0] for name, value in state.items()}
    backward(loss_of(model, 1), optimizer)
    for part, shard in zip(parts, model.parameters(), strict=True):
        part.grad = shard.grad.to_local().float()
    optimizer.step()
    reference.step()
    states = sorted(reference.state_dict()["state"].items())
    assert same(state_of(optimizer), [value for _, state in states for value in state.values()])


@pytest.mark.parametrize("make", [torch.optim.NAdam, torch.optim.Adagrad])
def test_state_that_was_made_in_bf16_is_fp32_from_then_on(ranks, make):
    ranks(begun_in_bf16, make)
