"""`master_weights="stochastic"`: BF16 weights without masters, which each step rounds up or down by chance."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from split_masters import MAKERS, OPTIM, iterate_split, loss_of, net, opened
from torch import Tensor, nn
from training import backward, masters_of, same

from amp_patch import amp, multi_tensor

one_of_each_way = pytest.mark.parametrize("make", [MAKERS[name] for name in ("AdamW", "NAdam", "FusedLAMB")])


def start(make: Any, model: nn.Sequential | None = None, **options: Any) -> tuple[nn.Sequential, Any]:
    model = net() if model is None else model
    options = {"opt_level": "O5", "master_weights": "stochastic", "verbosity": 0} | options
    return amp.initialize(model, make(model.parameters()), **options)


def chance() -> dict[str, Any]:
    return amp.state_dict()["loss_scaler0"]["stochastic_rounding"]


def weights_of(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def rounded(masters: list[Tensor], step: int, seed: int = 0, edits: int = 0) -> list[Tensor]:
    """Return the values rounded to BF16 by the random bits of the given step, counted from 0."""
    weights = [torch.empty_like(m, dtype=torch.bfloat16) for m in masters]
    draws = [number << 40 | edits << 32 | step for number in range(len(masters))]
    multi_tensor.multi_tensor_stochastic_round(masters, weights, seed, draws)
    return weights


# ---------------------------------------------------------------------------------------------------------------------
# The numbers


def with_seed(seed: int) -> dict[str, Any]:
    return {"stochastic_rounding": {"seed": seed, "steps": []}}


def test_updates_that_rounding_to_nearest_loses_are_made_on_average():
    """Each step wants 1 / 50 of the distance between two BF16 numbers."""

    def train(kind: Any) -> Tensor:
        model = nn.Linear(1000, 1, bias=False)
        nn.init.constant_(model.weight, 1.0)
        level = {"opt_level": "O3", "dtype": torch.bfloat16} if kind is None else {"master_weights": kind}
        model, optimizer = amp.initialize(
            model, OPTIM.SGD(model.parameters(), lr=2.0**-7 / 50), **{"opt_level": "O5", "verbosity": 0} | level
        )
        for _ in range(50):
            optimizer.zero_grad()
            backward(-model(torch.ones(1, 1000)).sum(), optimizer)
            optimizer.step()
        return model.weight.detach().float()

    exact, lost, by_chance = train(True), train(None), train("stochastic")
    assert (exact == 1 + 2.0**-7).all() and (lost == 1).all()
    # 50,000 choices with a chance of 1 / 50: the mean of 1,000 elements, and its deviation.
    assert abs((by_chance.mean() - 1).item() * 2**7 - 1) < 4 * (50 * 0.02 * 0.98 / 1000) ** 0.5
    assert len(by_chance.unique()) > 3


# ---------------------------------------------------------------------------------------------------------------------
# Who looks, and who writes


@one_of_each_way
def test_a_read_returns_the_weight_in_fp32_and_writes_are_rounded_stochastically(make):
    model, optimizer = start(make)
    iterate_split(model, optimizer, range(2))
    for param, master in zip(model.parameters(), amp.master_params(optimizer), strict=True):
        assert master.dtype is torch.float32 and not master.is_open and torch.equal(master, param.float())
    held = [master.detach() for master in amp.master_params(optimizer)]
    for edits in (1, 2):
        wanted = rounded([1.01 * master for master in masters_of(optimizer)], 2, edits=edits)
        with torch.no_grad():
            for master in amp.master_params(optimizer):
                master.mul_(1.01)
        loss_of(model, 9)  # a forward
        assert same(held, [w.float() for w in wanted]), "what shares the memory sees the rounding, with no read between"
        assert same(model.parameters(), wanted) and same(amp.master_params(optimizer), [w.float() for w in wanted])
    del held
    with torch.no_grad():
        model[0].weight.fill_(0.5)
    assert (next(amp.master_params(optimizer)) == 0.5).all()
    iterate_split(model, optimizer, range(2, 3))
    assert opened(optimizer) == 0 and chance()["steps"] == [3] * 6


def test_a_run_s_record_counts_no_masters():
    with amp.record() as run:
        model, optimizer = start(MAKERS["AdamW"])
        iterate_split(model, optimizer, range(2))
    assert run.masters == 0 and run.weights == 2 * sum(p.numel() for p in model.parameters())


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints, copies, and the way back


def saved(model: nn.Module, optimizer: Any) -> list[Any]:
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), amp.state_dict()], file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
@one_of_each_way
def test_a_training_goes_on_from_a_checkpoint_to_the_bit(make, order):
    model, optimizer = start(make)
    amp.load_state_dict({"loss_scaler0": amp.state_dict()["loss_scaler0"] | with_seed(5)})
    iterate_split(model, optimizer, range(3))
    states = saved(model, optimizer)
    assert states[2]["loss_scaler0"]["stochastic_rounding"] == {"seed": 5, "steps": [3] * 6}
    iterate_split(model, optimizer, range(3, 6))
    wanted = weights_of(model)
    amp.restore()
    for seeded in (True, False):
        again, its_optimizer = start(make)
        loads = (again.load_state_dict, its_optimizer.load_state_dict, amp.load_state_dict)
        if not seeded:  # of a level with masters, or of an older release
            states[2]["loss_scaler0"].pop("stochastic_rounding")
        for index in order:
            loads[index](states[index])
        iterate_split(again, its_optimizer, range(3, 6))
        assert same(weights_of(again), wanted) is seeded
        amp.restore()


@pytest.mark.parametrize(
    "state", [{"seed": -1, "steps": []}, {"seed": 2**63, "steps": []}, {"seed": 0, "steps": [1.5]}, {"seed": 0}, 7]
)
def test_a_state_that_cannot_be_is_refused_before_anything_is_loaded(state):
    start(MAKERS["AdamW"], num_losses=2)
    before = amp.state_dict()
    wrong = copy.deepcopy(before)
    wrong["loss_scaler1"]["unskipped"] = 9
    wrong["loss_scaler0"]["stochastic_rounding"] = state
    with pytest.raises(ValueError, match="load_state_dict: stochastic_rounding is"):
        amp.load_state_dict(wrong)
    assert amp.state_dict() == before
