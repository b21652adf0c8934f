"""`optimizer_state="8bit"` with torch's ZeroRedundancyOptimizer: each process keeps its share of the state in codes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from coded_shares import consolidated, start_zero, tensors_of, through_file, zero_of
from coded_states import LEVELS, MAKERS, OPTIM, coded, go_on, loss_of, net, opened, start
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from training import masters_of, same

from amp_patch import amp, multi_tensor
from amp_patch.lab.commands.run_summary import RunSummary
from amp_patch.storage.coded_state import CodedState, Coder
from amp_patch.support.generated_class import Generated
from amp_patch.training import observers

# ----------------------------------------------------------------------------------------------------------------------
# Training


def trained(make: str, options: Any, sharded: bool = True, **of_zero: Any) -> dict[str, Any]:
    """A training on two processes, which are given the batches of one: what is there in the end."""
    model, optimizer, wrapped = start_zero(make, options, **of_zero) if sharded else start_plain(make, options)
    losses = go_on(wrapped, optimizer, range(4))
    share = optimizer.optim if sharded else optimizer
    return {
        "losses": losses,
        "masters": masters_of(optimizer),
        "weights": [param.detach() for param in model.parameters()],
        "coded": coded(share),
        "opened": opened(share),
        "plain": [type(state) is not CodedState for state in share.state.values()],
        "state": tensors_of((consolidated(optimizer) if sharded else optimizer.state_dict()) or {"state": {}}),
    }


def start_plain(make: str, options: Any) -> tuple[Any, Any, Any]:
    model, optimizer = start(MAKERS[make], **options)
    return model, optimizer, DistributedDataParallel(model) if torch.distributed.is_initialized() else model


CASES = [("AdamW", level) for level in LEVELS] + [(make, "split") for make in MAKERS if make != "AdamW"]
CASES += [("SGD", "O2"), ("FusedAdam", "O5"), ("NAdam", "O5"), ("NAdam", "stochastic")]


@pytest.mark.parametrize(("make", "level"), CASES)
def test_two_processes_train_as_one_does_each_with_codes_of_its_share(ranks, make, level):
    results = ranks(trained, make, LEVELS[level])
    # DDP halves the gradients of each process, where FP16 has no smaller number: at O2 the one process is one of two.
    wanted = (ranks if level == "O2" else alone)(trained, make, LEVELS[level], sharded=False)[0]
    for rank in results:
        assert rank["losses"] == wanted["losses"]
        assert same(rank["masters"], wanted["masters"]) and same(rank["weights"], wanted["weights"])
        assert rank["opened"] == 0 and not any(rank["plain"])
        assert rank["coded"] == {name: count // 2 for name, count in wanted["coded"].items()}
    assert same(results[0]["state"], wanted["state"])


def alone(function: Any, *args: Any, **kwargs: Any) -> list[Any]:
    return [function(*args, **kwargs)]


def test_parameters_in_buckets(ranks):
    first, second = ranks(trained, "AdamW", LEVELS["O5"], parameters_as_bucket_view=True)
    wanted = trained("AdamW", LEVELS["O5"], sharded=False)
    assert first["losses"] == second["losses"] == wanted["losses"] and same(first["state"], wanted["state"])
    assert first["coded"] == second["coded"] == {"exp_avg": 1, "exp_avg_sq": 1}


def without_fp32_state(level: str) -> None:
    def open_all(self: Coder, states: Any) -> None:
        raise AssertionError("a step in one pass needs no state in FP32")

    _, optimizer, wrapped = start_zero("AdamW", LEVELS[level])
    kept, Coder.open_all = Coder.open_all, open_all  # type: ignore[method-assign]
    try:
        go_on(wrapped, optimizer, range(2))
    finally:
        Coder.open_all = kept  # type: ignore[method-assign]


@pytest.mark.parametrize("level", ["O2", "split", "stochastic"])
def test_a_step_in_one_pass_decodes_in_registers(ranks, level):
    if multi_tensor.backend() != "cpp":
        pytest.skip("without the extension a portion of the state is FP32 at the step")
    ranks(without_fp32_state, level)


def stepped(optimizer: Any) -> list[Tensor]:
    return [*masters_of(optimizer), *(t.clone() for t in tensors_of(optimizer.optim.state_dict()))]


def overflows(level: str) -> dict[str, Any]:
    _, optimizer, wrapped = start_zero("AdamW", {**LEVELS[level], "loss_scale": "dynamic"})
    go_on(wrapped, optimizer, range(2))
    before = stepped(optimizer)
    optimizer.zero_grad()
    factor = float("inf") if torch.distributed.get_rank() else 1.0
    with amp.scale_loss(loss_of(wrapped, 2) * factor, optimizer) as loss:
        loss.backward()
    optimizer.step()
    after = stepped(optimizer)
    go_on(wrapped, optimizer, range(3, 4))
    return {"before": before, "after": after, "coded": coded(optimizer.optim), "end": masters_of(optimizer)}


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_on_one_process_is_skipped_by_all(ranks, level):
    results = ranks(overflows, level)
    for rank in results:
        assert same(rank["before"], rank["after"]) and rank["coded"]
        assert not same(rank["end"], rank["after"][: len(rank["end"])])
    assert same(results[0]["end"], results[1]["end"])


def read_and_written() -> None:
    _, optimizer, wrapped = start_zero("AdamW", LEVELS["split"])
    go_on(wrapped, optimizer, range(2))
    share = optimizer.optim
    state = next(state for state in share.state.values() if coded_names(state))
    assert state["exp_avg"].dtype is torch.float32 and opened(share) == 1
    state["exp_avg"].zero_()
    wanted = state["exp_avg_sq"].clone()
    with amp.scale_loss(loss_of(wrapped, 2), optimizer):
        assert opened(share) == 0, "what was written is encoded before the next backward"
    assert not state["exp_avg"].any() and same([state["exp_avg_sq"]], [wanted])


def coded_names(state: Any) -> list[str]:
    return [name for name in state if not isinstance(state.kept(name), Tensor)]


def test_who_reads_the_state_finds_fp32_and_what_is_written_is_encoded(ranks):
    ranks(read_and_written)


def told() -> str:
    observers.add(summary := RunSummary())
    try:
        _, optimizer, wrapped = start_zero("AdamW", LEVELS["O5"])
        go_on(wrapped, optimizer, range(3))
        return summary.line() or ""
    finally:
        observers.remove(summary)


def test_observers_are_told_of_each_step_once(ranks):
    assert all("3 steps, 0 skipped" in line for line in ranks(told))


def with_closure() -> list[Tensor]:
    model, optimizer, wrapped = start_zero("SGD", LEVELS["O4"])
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(wrapped, step)
            loss.backward()
            return loss

        optimizer.step(closure)
    assert coded(optimizer.optim) == {"momentum_buffer": 1} and opened(optimizer.optim) == 0
    return [param.detach() for param in model.parameters()]


def test_a_step_with_a_closure(ranks):
    first, second = ranks(with_closure)
    model, optimizer = start(MAKERS["SGD"], **LEVELS["O4"])
    go_on(model, optimizer, range(3))
    assert same(first, second) and same(first, list(model.parameters()))


def grows(level: str) -> list[Tensor]:
    model = net()
    optimizer = zero_of(MAKERS["AdamW"], model[:2].parameters())
    options = {"opt_level": "O5", "optimizer_state": "8bit", "verbosity": 0, **LEVELS[level]}
    model, optimizer = amp.initialize(model, optimizer, **options)
    wrapped = DistributedDataParallel(model)
    go_on(wrapped, optimizer, range(2))
    optimizer.add_param_group({"params": list(model[2:].parameters())})
    go_on(wrapped, optimizer, range(2, 4))
    assert opened(optimizer.optim) == 0
    return [*masters_of(optimizer), torch.tensor(coded(optimizer.optim).get("exp_avg", 0))]


@pytest.mark.parametrize("level", ["O4", "split"])
def test_a_group_that_comes_later(ranks, level):
    first, second = ranks(grows, level)
    model = net()
    optimizer = MAKERS["AdamW"](model[:2].parameters())
    options = {"opt_level": "O5", "optimizer_state": "8bit", "verbosity": 0, **LEVELS[level]}
    model, optimizer = amp.initialize(model, optimizer, **options)
    go_on(model, optimizer, range(2))
    optimizer.add_param_group({"params": list(model[2:].parameters())})
    go_on(model, optimizer, range(2, 4))
    assert same(first[:-1], masters_of(optimizer)) and same(second[:-1], masters_of(optimizer))
    assert int(first[-1] + second[-1]) == 2


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints, and the way back


def from_checkpoint(states: Any, options: Any) -> dict[str, Any]:
    model, optimizer, wrapped = start_zero("AdamW", options)
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    amp.load_state_dict(states[2])
    large = [t for state in optimizer.state.values() for t in (state or {}).values() if isinstance(t, Tensor)]
    kept = coded(optimizer.optim)
    losses = go_on(wrapped, optimizer, range(3, 5))
    return {"losses": losses, "masters": masters_of(optimizer), "coded": kept, "a second time": len(large)}


def to_checkpoint(options: Any) -> tuple[Any, list[float], list[Tensor]]:
    model, optimizer, wrapped = start_zero("AdamW", options)
    go_on(wrapped, optimizer, range(3))
    states = [through_file(model.state_dict()), consolidated(optimizer), amp.state_dict()]
    return states, go_on(wrapped, optimizer, range(3, 5)), masters_of(optimizer)


@pytest.mark.parametrize("level", ["O4", "O5", "split", "stochastic"])
def test_checkpoints_go_from_one_process_to_two_and_back_and_train_on_to_the_bit(ranks, level):
    options = LEVELS[level]
    model, optimizer = start(MAKERS["AdamW"], **options)
    go_on(model, optimizer, range(3))
    states = through_file([model.state_dict(), optimizer.state_dict(), amp.state_dict()])
    losses, masters = go_on(model, optimizer, range(3, 5)), masters_of(optimizer)
    amp.restore()

    for rank in ranks(from_checkpoint, states, options):
        assert rank["losses"] == losses and same(rank["masters"], masters)
        assert rank["coded"] == {"exp_avg": 1, "exp_avg_sq": 1} and rank["a second time"] == 0

    states = ranks(to_checkpoint, options)[0][0]
    model, optimizer = start(MAKERS["AdamW"], **options)
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    amp.load_state_dict(states[2])
    assert go_on(model, optimizer, range(3, 5)) == losses and same(masters_of(optimizer), masters)


def test_checkpoints_move_to_and_from_fp32_state(ranks):
    in_fp32 = {**LEVELS["O5"], "optimizer_state": None}
    states = ranks(to_checkpoint, in_fp32)[0][0]
    assert all(rank["coded"] for rank in ranks(from_checkpoint, states, LEVELS["O5"]))
    states, *_ = ranks(to_checkpoint, LEVELS["O5"])[0]
    assert all(type(state) is dict for state in states[1]["state"].values())
    assert not any(rank["coded"] for rank in ranks(from_checkpoint, states, in_fp32))


def restored() -> None:
    for level in ("O4", "O2", "split", "stochastic"):
        model, optimizer, wrapped = start_zero("AdamW", LEVELS[level])
        go_on(wrapped, optimizer, range(2))
        share = optimizer.optim
        wanted = [t.clone() for t in tensors_of(share.state_dict())]
        amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
        assert not coded(share) and same(tensors_of(share.state_dict()), wanted), "initialize again, without"
        amp.initialize(model, optimizer, opt_level="O5", optimizer_state="8bit", verbosity=0)
        wrapped = DistributedDataParallel(model)
        go_on(wrapped, optimizer, range(2, 3))
        assert coded(share)
        wanted = [t.clone() for t in tensors_of(share.state_dict())]
        amp.restore()
        assert type(share) is OPTIM.AdamW and not isinstance(optimizer, Generated)
        assert not hasattr(share, "_amp_stash") and all(type(state) is dict for state in share.state.values())
        assert same(tensors_of(share.state_dict()), wanted)
        optimizer.zero_grad()
        loss_of(DistributedDataParallel(model), 3).backward()
        optimizer.step()


def test_restore_leaves_the_optimizer_inside_as_it_was_with_fp32_state(ranks):
    ranks(restored)


def copied() -> None:
    """A copy of a ZeroRedundancyOptimizer has no optimizer inside, by torch; one of the share's state has FP32."""
    _, optimizer, wrapped = start_zero("AdamW", LEVELS["split"])
    go_on(wrapped, optimizer, range(2))
    share = copy.deepcopy(optimizer.optim)
    assert all(type(state) is dict for state in share.state.values())
    assert same(tensors_of(share.state_dict()), tensors_of(optimizer.optim.state_dict()))
    assert not hasattr(copy.deepcopy(optimizer), "optim")


def test_copies(ranks):
    ranks(copied)


# ----------------------------------------------------------------------------------------------------------------------
# Where it is refused


def refused() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = net()
    for make, options, match in (
        (OPTIM.SGD, {"lr": 0.1, "overlap_with_ddp": True}, "ZeroRedundancyOptimizer with overlap_with_ddp=True"),
        (OPTIM.SparseAdam, {"lr": 0.1}, "this SparseAdam.*it takes sparse gradients alone"),
        (OPTIM.Adagrad, {"lr": 0.1, "fused": True}, "this Adagrad.*fused=True"),
    ):
        optimizer = ZeroRedundancyOptimizer(model.parameters(), make, **options)
        with pytest.raises(ValueError, match=f"optimizer_state='8bit' is not for .*{match}.*optimizer_state at None"):
            amp.initialize(model, optimizer, opt_level="O4", optimizer_state="8bit", verbosity=0)
        assert type(optimizer) is ZeroRedundancyOptimizer


def test_what_cannot_be_is_refused_by_name(ranks):
    ranks(refused)
