"""Registered optimizers with `optimizer_state="8bit"` on parameters that `fully_shard` has sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from coded_shards import SHARDED, numbers_of, on_one_process, overflows, resumable, sharded, start, trained
from fsdp_trainings import (
    restored_fixture,  # noqa: F401  the fixture `restored`
)
from in_portions import Each
from torch import Tensor, nn
from training import same

from amp_patch import amp
from amp_patch.ways import per_parameter, portions

pytestmark = pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason="fully_shard of torch 2.6 does not run on CPUs: no Stream.record_event"
)


class Lion(Each):
    """As many write it: a count of its own, and one of the group."""

    calls = 0

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.01, weight_decay=0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        return super().step(closure)

    def direction(self, group: Any, param: Tensor) -> Tensor:
        average = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
        update = average.lerp(param.grad, 0.1).sign_() / group["step"]
        average.lerp_(param.grad, 0.01)
        return update.add_(param, alpha=group["weight_decay"])


class ScheduleFree(Each):
    """Its `z` is weights; a count is a tensor of each state."""

    def direction(self, group: Any, param: Tensor) -> Tensor:
        state = self.state[param]
        if not state:
            state |= {"z": param.clone(), "exp_avg_sq": torch.zeros_like(param), "step": torch.tensor(0.0)}
        state["step"] += 1
        square = state["exp_avg_sq"].mul_(0.99).addcmul_(param.grad, param.grad, value=0.01)
        update = param.grad / square.sqrt().add_(1e-8)
        state["z"].sub_(update, alpha=0.01)
        return (param - state["z"]) / (float(state["step"]) * group["lr"]) + 0.01 * update


class AskedFor(ScheduleFree):
    """Its states are there before the first step, and empty, as those of schedulefree after `train()`."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for param in self.param_groups[0]["params"]:
            assert self.state[param] == {}


class Lamb(Each):
    def direction(self, group: Any, param: Tensor) -> Tensor:
        average = self.state[param].setdefault("exp_avg", torch.zeros_like(param)).lerp_(param.grad, 0.1)
        return average * (param.norm().clamp(0, 10) / (average.norm() + 1e-6)).clamp(max=10)


def register() -> None:
    amp.register_per_parameter_optimizer(Lion)
    amp.register_per_parameter_optimizer(ScheduleFree, fp32_state=["z"])
    amp.register_per_parameter_optimizer(AskedFor, fp32_state=["z"])
    amp.register_per_parameter_optimizer(Lamb)


def in_process(function: Any, *args: Any) -> Any:
    """`function`, with the classes registered: a rank runs it under its own process's registrations."""
    register()
    return function(*args)


# ----------------------------------------------------------------------------------------------------------------------
# The numbers


def trained_by(kind: Any, level: str, way: str) -> dict[str, Any]:
    """In portions of a single parameter, in portions, or as a whole."""

    def make(params: Any) -> Any:
        made.append(kind(params))
        return made[0]

    register()
    made: list[Any] = []
    sizes: list[int] = []
    own, portion = per_parameter.PartialStep, portions.PORTION

    def noted(optimizer: Any, chunks: Any) -> Any:
        ((_, masters),) = chunks
        if masters and masters[0].dtype is torch.float32:  # those of the trial are FP64
            sizes.append(len(masters))
        return own(optimizer, chunks)

    per_parameter.PartialStep = noted
    portions.PORTION = -1 if way == "one by one" else portion
    try:
        found = trained(make, SHARDED[level], fused=way == "as a whole")  # which no portion is for
    finally:
        per_parameter.PartialStep, portions.PORTION = own, portion
    return found | {"numbers": numbers_of(made[0]), "most": max(sizes, default=0)}


CASES = [
    (Lion, "O2", "one by one", {"exp_avg": torch.int8}),
    (AskedFor, "O5", "in portions", {"exp_avg_sq": torch.uint8}),
    (Lion, "O1", "as a whole", {"exp_avg": torch.int8}),
    (Lion, "stochastic", "in portions", {"exp_avg": torch.int8}),
]
MORE = [
    (kind, level, way, kept)
    for kind, kept in ((Lion, {"exp_avg": torch.int8}), (ScheduleFree, {"exp_avg_sq": torch.uint8}))
    for level, way in (("O0", "one by one"), ("O4", "in portions"), ("O2", "as a whole"), ("stochastic", "one by one"))
]


@pytest.mark.parametrize(
    ("kind", "level", "way", "kept"), CASES + [pytest.param(*case, marks=pytest.mark.slow) for case in MORE]
)
def test_each_process_steps_its_elements_to_the_bits_of_the_class_on_whole_parameters(ranks, kind, level, way, kept):
    ours, theirs = ranks(trained_by, kind, level, way), ranks(on_one_process, kind, level, kept)
    for rank, wanted in zip(ours, theirs, strict=True):
        assert rank["losses"] == wanted["losses"] and rank["opened"] == 0 and not rank["plain"]
        assert same(rank["weights"], wanted["weights"]) and same(rank["state"], wanted["state"])
        assert rank["numbers"] == wanted["numbers"]
        assert min(rank["most"], 2) == {"one by one": 1, "in portions": 2, "as a whole": 0}[way]
    first, second = (rank["coded"] for rank in ours)
    assert first == dict.fromkeys(kept, 2) and second == dict.fromkeys(kept, 1), "of 86 rows and 24, of 85 and 24"


@pytest.mark.parametrize("kind", [Lion, ScheduleFree])
def test_an_overflow_on_one_process_is_skipped_by_all_and_changes_nothing(ranks, kind):
    for rank in ranks(in_process, overflows, kind, SHARDED["O2"]):
        assert rank["skipped"] and rank["coded"] and same(rank["before"], rank["after"])
        assert not same(rank["after"], rank["end"])


@pytest.mark.parametrize("kind", [Lion, ScheduleFree])
def test_a_checkpoint_of_all_processes_resumes_to_the_bit(ranks, tmp_path, kind):
    saved = str(tmp_path / "saved")
    whole = ranks(in_process, resumable, kind, SHARDED["O5"], range(5), "", saved)
    again = ranks(in_process, resumable, kind, SHARDED["O5"], range(3, 5), saved)
    for rank, wanted in zip(again, whole, strict=True):
        assert rank["coded"] == wanted["coded"] != {}
        assert rank["losses"] == wanted["losses"][3:] and same(rank["end"], wanted["end"])


# ----------------------------------------------------------------------------------------------------------------------
# What is refused


def refused(kind: Any) -> None:
    register()
    model = sharded("O5")
    optimizer = kind(model.parameters())
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0)  # with FP32 state torch steps DTensors
    amp.restore()
    wanted = (
        rf"^initialize: optimizer_state='8bit' is not for this {kind.__name__}, whose parameters fully_shard has "
        "sharded, so that each process steps a part of each: tried on small parameters it steps a part of a parameter "
        "differently from the same part within the whole, for example by .*; leave optimizer_state at None, or use an "
        "optimizer that"
    )
    with pytest.raises(ValueError, match=wanted):
        amp.initialize(model, optimizer, opt_level="O5", optimizer_state="8bit", verbosity=0)
    assert type(optimizer) is kind and not optimizer.state
    start(kind, optimizer_state=None)
    with pytest.raises(
        ValueError, match=r"master_weights='stochastic' is not for .*: tried on small parameters it steps a"
    ):
        start(kind, master_weights="stochastic", optimizer_state=None)


def test_a_registered_class_that_takes_norms_is_refused_by_name(ranks, registrations):
    ranks(refused, Lamb)
    register()
    model = nn.Linear(64, 80)
    amp.initialize(model, Lamb(model.parameters()), opt_level="O5", optimizer_state="8bit", verbosity=0)
