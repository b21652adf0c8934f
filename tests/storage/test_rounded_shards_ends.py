"""Trainings on stochastically rounded BF16 shards: checkpoints, `kill -9`, Ctrl-C, pickles, refusals."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from coded_shards import ROUNDED, SHARDED, go_on, here, resumable, sharded, start, state_of
from coded_states import OPTIM, coded, loss_of
from coded_states import state_of as whole_state_of
from fsdp_trainings import (
    averaged,
    full,
    fully_shard,
    load_checkpoint,
    one_fixture,  # noqa: F401  the fixture `one`
    restored_fixture,  # noqa: F401  the fixture `restored`
    save_checkpoint,
)
from torch import nn
from training import backward, same

from amp_patch import amp

pytestmark = pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason="fully_shard of torch 2.6 does not run on CPUs: no Stream.record_event"
)


@pytest.mark.parametrize("options", [ROUNDED, pytest.param(SHARDED["stochastic"], marks=pytest.mark.slow)])
def test_a_checkpoint_resumes_to_the_bit(ranks, tmp_path, options):
    saved = str(tmp_path / "saved")
    straight = ranks(resumable, "NAdam", options, range(5), "", saved)
    resumed = ranks(resumable, "NAdam", options, range(3, 5), saved)
    for rank, wanted in zip(resumed, straight, strict=True):
        assert rank["losses"] == wanted["losses"][3:] and same(rank["end"], wanted["end"])


def saved_and_trained(steps: range, load: str = "", save: str = "") -> dict[str, Any]:
    """Each process has the same batches."""
    model, optimizer = start("NAdam", **ROUNDED)
    if load:
        load_checkpoint(model, optimizer, load)
    for step in steps:
        optimizer.zero_grad()
        backward(loss_of(model, step), optimizer)
        optimizer.step()
    if save:
        save_checkpoint(model, optimizer, save)
    weights = [full(p).detach().clone() for p in model.parameters()]
    return {"weights": weights, "state": list(map(full, whole_state_of(optimizer)))}


@averaged
def test_a_checkpoint_resumes_to_the_bit_on_another_number_of_processes(ranks, one, tmp_path):
    saved = str(tmp_path / "saved")
    (wanted,) = one(saved_and_trained, range(5))
    ranks(saved_and_trained, range(3), "", saved)
    (resumed,) = one(saved_and_trained, range(3, 5), saved)
    assert same(resumed["weights"], wanted["weights"]) and same(resumed["state"], wanted["state"])


def restored(make: str) -> None:
    model, optimizer = start(make, **ROUNDED)
    go_on(model, optimizer, range(2))
    before = here(model.parameters())
    wanted = state_of(optimizer)
    amp.initialize(model, optimizer, **SHARDED["stochastic"], optimizer_state="8bit", verbosity=0)
    go_on(model, optimizer, range(2, 3))
    assert coded(optimizer) and not same(here(model.parameters()), before)
    amp.initialize(model, optimizer, **ROUNDED, verbosity=0)
    assert not coded(optimizer)
    go_on(model, optimizer, range(3, 4))
    assert len(state_of(optimizer)) == len(wanted)
    weights = here(model.parameters())
    amp.restore()
    assert same(here(model.parameters()), weights) and not any("_amp" in name for name in vars(optimizer))
    for param, state in optimizer.state.items():
        averages = [state[name] for name in ("exp_avg", "exp_avg_sq", "momentum_buffer") if name in state]
        assert averages and all(value.dtype is torch.bfloat16 for value in averages), "as torch has it"
        assert all(value.placements == param.placements for value in averages)
    optimizer.zero_grad()
    loss_of(model, 3).backward()
    optimizer.step()


@pytest.mark.parametrize("make", ["NAdam", "SGD, not fused"])
def test_restore_leaves_torchs_own_training_in_bf16(ranks, make):
    ranks(restored, make)


def pickled(make: str) -> None:
    """The optimizer's own shards, and what is here of them, go with it."""
    model, optimizer = start(make, **ROUNDED)
    go_on(model, optimizer, range(2))
    optimizer.zero_grad()
    backward(loss_of(model, 2), optimizer)
    copy = pickle.loads(pickle.dumps(optimizer))
    shards, copies = ([p for group in o.param_groups for p in group["params"]] for o in (optimizer, copy))
    for param, other in zip(shards, copies, strict=True):
        other.grad = param.grad.clone()
    optimizer.step()
    copy.step()
    assert same(here(copies), here(shards)) and same(state_of(copy), state_of(optimizer))


@pytest.mark.parametrize("make", ["AdamW", "NAdam"])
def test_a_pickled_optimizer_steps_as_the_first(ranks, make):
    ranks(pickled, make)


# ----------------------------------------------------------------------------------------------------------------------
# Where it is refused


class Another(OPTIM.NAdam):
    pass


def refused() -> None:
    from torch.distributed.tensor import Shard

    def initialize(model: Any, optimizer: Any = OPTIM.NAdam, **options: Any) -> None:
        kind = type(made := optimizer(list(model.parameters())))
        amp.initialize(model, made, **{**ROUNDED, "verbosity": 0} | options)
        assert type(made) is kind

    with pytest.raises(ValueError, match=r"'0.weight' is sharded in torch.float32.*call model.bfloat16\(\) before"):
        initialize(sharded("O5"))
    with pytest.raises(ValueError, match=r"master_weights='split' is not for shards"):
        initialize(sharded("O5"), master_weights="split")
    with pytest.raises(ValueError, match=r"is sharded and torch.bfloat16; wanted trained shards in FP32"):
        initialize(sharded("O5", torch.bfloat16), master_weights=None)
    with pytest.raises(ValueError, match=r"not for this Another, whose parameters fully_shard.*not one of torch.optim"):
        initialize(sharded("O5", torch.bfloat16), Another)
    with pytest.raises(ValueError, match=r"not for this Adafactor, .*a norm of the whole"):
        initialize(sharded("O5", torch.bfloat16), OPTIM.Adafactor)
    columns = fully_shard(
        nn.Linear(48, 64, bias=False).bfloat16(), mp_policy=amp.fsdp_policy("O5"), shard_placement_fn=lambda _: Shard(1)
    )
    with pytest.raises(ValueError, match=r"sharded as .*Shard\(dim=1\).*once, along dimension 0"):
        initialize(columns)
    frozen = sharded("O5", torch.bfloat16).requires_grad_(False)
    with pytest.raises(ValueError, match=r"not for this Adafactor, .*a norm of the whole"):
        initialize(frozen, OPTIM.Adafactor)
    kept = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).bfloat16(), mp_policy=amp.fsdp_policy("O5"))
    with pytest.raises(ValueError, match=r"'1.weight' of .* its module stays FP32 .*: call float\(\) of that module"):
        initialize(kept)
    model = sharded("O5", torch.bfloat16)
    model, optimizer = amp.initialize(model, OPTIM.SGD(model.parameters(), lr=0.1), **ROUNDED, verbosity=0)
    backward(loss_of(model, 0), optimizer)
    before = here(model.parameters())
    weight = model[0].weight
    weight.grad = weight.grad.redistribute(placements=[type(weight.placements[0])(1)])
    with pytest.raises(RuntimeError, match=r"SGD.step: the gradient of '0.weight' is laid out as .*redistribute"):
        optimizer.step()
    assert same(here(model.parameters()), before)


def refused_later() -> None:
    from torch.distributed.tensor import Shard

    def begun(make: Any) -> Any:
        model = sharded("O5", torch.bfloat16)
        optimizer = make([nn.Parameter(torch.ones(4))])
        return amp.initialize(model, optimizer, **ROUNDED, verbosity=0)

    model, optimizer = begun(OPTIM.Adafactor)
    for params in (list(model.parameters()), model.parameters(), model[0].weight):
        with pytest.raises(ValueError, match=r"add_param_group: .* not for this Adafactor, .*a norm of the whole"):
            optimizer.add_param_group({"params": params})
    model, optimizer = begun(OPTIM.NAdam)
    columns = fully_shard(nn.Linear(48, 64).bfloat16(), shard_placement_fn=lambda p: Shard(p.dim() - 1))
    with pytest.raises(ValueError, match=r"add_param_group: parameter 0 is sharded as .*once, along dimension 0"):
        optimizer.add_param_group({"params": columns.parameters()})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": model.parameters()})
    assert len(optimizer.param_groups[1]["params"]) == 8


@pytest.mark.parametrize("refuse", [refused, refused_later])
def test_unsupported_combinations_are_refused_by_name(ranks, refuse):
    ranks(refuse)
