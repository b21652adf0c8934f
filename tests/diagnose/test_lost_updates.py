"""The meter of lost updates: changes of FP32 weights that would change no bit of low-precision weights."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import torch
from split_masters import MAKERS, iterate_split, loss_of, net, opened, start_split
from torch import Tensor, nn
from training import backward

from amp_patch import amp
from amp_patch.diagnose.lost_updates import UpdateMeter, Updates
from amp_patch.diagnose.recording.run import Run

NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def expected(before: list[Tensor], after: list[Tensor], dtype: torch.dtype) -> list[int]:
    """Over all elements: how many have changed, and how many of these a weight of `dtype` keeps as they were."""
    pairs = [(b.flatten(), a.flatten()) for b, a in zip(before, after, strict=True)]
    changed = [(b, a) for old, new in pairs for b, a in zip(old, new, strict=True) if a != b]
    kept = [(b.to(dtype).float() + (a - b)).to(dtype) == b.to(dtype) for b, a in changed]
    return [len(changed), sum(map(int, kept))]


def values(optimizer: Any) -> list[Tensor]:
    return [p.detach().clone() for p in amp.master_params(optimizer)]


def total(updates: Any) -> list[int]:
    return [sum(count[i] for count in updates.counts.values()) for i in (0, 1)]


def counted(meter: UpdateMeter) -> Updates:
    """The updates since the meter was made, in BF16 if that is one of its types."""
    dtype = meter.dtypes[-1]
    counts = {name: count.tolist() for name, count in meter.counts_in([dtype])[dtype].items()}
    return Updates(str(dtype).removeprefix("torch."), counts)


def start(level: str, make: str = "AdamW", **options: Any) -> tuple[nn.Sequential, Any]:
    model = net()
    return amp.initialize(model, MAKERS[make](model.parameters()), opt_level=level, verbosity=0, **options)


def test_an_update_below_half_of_a_step_is_lost():
    model = nn.Sequential(nn.Linear(6, 1, bias=False), nn.Linear(1, 2, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0, 3.0]]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    wanted = torch.tensor([[0.0, 2.0**-10, 2.0**-8, 1.5 * 2.0**-8, -(2.0**-9) * 1.5, 2.0**-8]])
    meter = UpdateMeter(optimizer, {id(param): name for name, param in model.named_parameters()})
    model[0].weight.grad = -wanted
    model[1].weight.grad = torch.full((2, 1), -1.0)
    optimizer.step()
    updates = counted(meter)
    # 2**-8 is a tie, which goes back to the even 1; below 1 the distance is half as large, above 2 twice as large.
    assert updates.counts == {"0.weight": [5, 3], "1.weight": [2, 0]}
    assert updates.lost() == 3 / 7 and updates.lost("0") == 0.6 and updates.lost("1.weight") == 0.0
    assert updates.lost("2") is None and updates.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("level", "options", "dtype"),
    [
        ("O0", {}, "bfloat16"),
        ("O1", {"loss_scale": 128.0}, "float16"),
        ("O2", {"loss_scale": 128.0}, "float16"),
        ("O4", {}, "bfloat16"),
        ("O5", {}, "bfloat16"),
        ("O5", {"master_weights": "split"}, "bfloat16"),
    ],
)
@pytest.mark.parametrize("make", ["AdamW", "NAdam", "FusedLAMB"])
def test_lost_updates_count_the_changes_of_a_step(level, options, dtype, make):
    model, optimizer = start(level, make, **options)
    iterate_split(model, optimizer, range(2))
    for group in optimizer.param_groups:
        group["lr"] = 2e-4
    before, names = values(optimizer), {id(param): name for name, param in model.named_parameters()}
    meter = UpdateMeter(optimizer, names)
    optimizer.zero_grad()
    backward(loss_of(model, 2), optimizer)
    optimizer.step()
    updates = counted(meter)
    assert updates.dtype == dtype and total(updates) == expected(before, values(optimizer), NARROW[dtype])
    assert set(updates.counts) == set(names.values())
    assert 0 < updates.lost() < 1
    loss_of(model, 3)
    iterate_split(model, optimizer, range(3, 4))
    assert opened(optimizer) == 0


@pytest.mark.parametrize(
    ("level", "options"), [("O3", {"dtype": torch.bfloat16}), ("O5", {"master_weights": "stochastic"})]
)
def test_lost_updates_are_unknown_without_fp32_values(level, options):
    with amp.record() as run:
        model, optimizer = start(level, **options)
        iterate_split(model, optimizer, range(3))
    assert run.updates == [] and run.lost_updates() is None


def test_lost_updates_ignore_parameters_that_stay_fp32():
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O5", verbosity=0)
    meter = UpdateMeter(optimizer)
    iterate_split(model, optimizer, range(1))
    assert set(counted(meter).counts) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_a_recording_measures_lost_updates_at_steps_1_2_4_and_8(tmp_path):
    path = tmp_path / "run.jsonl"
    with amp.record(str(path)) as run:
        model, optimizer = start_split(MAKERS["AdamW"], master_weights=None)
        before = None
        for step in range(10):
            if step == 4:
                before = values(optimizer)
            iterate_split(model, optimizer, range(step, step + 1))
            if step == 4:
                after = values(optimizer)
    assert [updates.step for updates in run.updates] == [1, 2, 4, 8]
    assert total(run.updates[2]) == expected(before, after, torch.bfloat16)
    sums = [sum(total(updates)[i] for updates in run.updates) for i in (0, 1)]
    assert run.lost_updates() == sums[1] / sums[0]
    assert 0 <= run.lost_updates("0") <= 1 and run.lost_updates("nothing") is None
    again = Run.from_dict(json.loads(json.dumps(run.to_dict())))
    assert again.updates == run.updates and again.lost_updates() == run.lost_updates()
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "updates"] == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("level", "types"), [("O0", ["bfloat16", "float16"]), ("O2", ["float16"]), ("O4", ["bfloat16"])]
)
def test_lost_updates_at_o0_are_measured_in_both_low_types(level, types):
    with amp.record() as run:
        model, optimizer = start(level)
        iterate_split(model, optimizer, range(1))
        for group in optimizer.param_groups:
            group["lr"] = 2e-5
        before = values(optimizer)
        iterate_split(model, optimizer, range(1, 2))
        after = values(optimizer)
    assert sorted(updates.dtype for updates in run.updates) == types
    for updates in run.updates:
        assert total(updates) == expected(before, after, NARROW[updates.dtype])
        assert run.lost_updates(dtype=updates.dtype) == updates.lost()
    assert run.lost_updates() == run.lost_updates(dtype=types[0])
    assert level != "O0" or 0 < run.lost_updates(dtype="float16") < run.lost_updates(), "FP16 has three bits more"


def test_a_recording_changes_no_number_and_leaves_split_masters_compressed():
    def train(records: bool) -> list[Tensor]:
        with amp.record() if records else io.StringIO():
            model, optimizer = start_split(MAKERS["NAdam"])
            iterate_split(model, optimizer, range(6))
            assert opened(optimizer) == 0
        return values(optimizer)

    assert all(map(torch.equal, train(True), train(False)))


def test_lost_updates_of_a_large_parameter_are_sampled():
    parameter = nn.Parameter(torch.ones(300, 1000))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    meter = UpdateMeter(optimizer)
    with torch.no_grad():
        parameter[:, 250:] += 2.0**-10  # three quarters of the columns: lost
        parameter[:, :125] += 2.0**-6  # an eighth of them
    ((name, count),) = meter.counts_in([torch.bfloat16])[torch.bfloat16].items()
    changed, lost = count.tolist()
    assert name == "group 0, parameter 0" and 4000 < changed / 0.875 < 4300
    assert abs(lost / changed - 0.75 / 0.875) < 0.01


def test_lost_updates_of_a_native_training_are_measured():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with amp.record() as run:
        for step in range(4):
            optimizer.zero_grad()
            loss = model(torch.full((3, 4), 1.0 + step)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert [updates.step for updates in run.updates] == [1, 1, 2, 2] and run.lost_updates() is not None
