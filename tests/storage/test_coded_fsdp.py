"""`optimizer_state="8bit"` with torch's `fully_shard`: each process keeps the state of its own elements in codes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from coded_shards import (
    SHARDED,
    go_on,
    here,
    overflows,
    referenced,
    resumable,
    sharded,
    start,
    state_of,
    trained,
)
from coded_states import MAKERS as CODED_MAKERS
from coded_states import OPTIM, coded, in_eight_bits, kept_names, loss_of
from fsdp_trainings import (
    one_fixture,  # noqa: F401  the fixture `one`
    restored_fixture,  # noqa: F401  the fixture `restored`
)
from in_portions import Each
from three_ways import rounds_as_torch
from torch import Tensor, nn
from torch_optimizers import OPTIMIZERS
from training import same

from amp_patch import amp, multi_tensor
from amp_patch.storage.coder import Coder, stored
from amp_patch.support.generated_class import Generated

pytestmark = pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason="fully_shard of torch 2.6 does not run on CPUs: no Stream.record_event"
)

# ----------------------------------------------------------------------------------------------------------------------
# The numbers


CASES = [("AdamW", "O2"), ("NAdam", "O5"), ("SGD", "O1"), ("FusedAdam", "O4")]
MORE = [("AdamW", level) for level in SHARDED] + [(make, "O2") for make in CODED_MAKERS] + [("NAdam", "O0")]


@pytest.mark.parametrize(
    ("make", "level"),
    [pytest.param(*case, marks=() if case in CASES else pytest.mark.slow) for case in dict.fromkeys([*CASES, *MORE])],
)
def test_each_step_is_the_optimizers_own_of_the_elements_here_encoded(ranks, make, level):
    first, second = as_by_hand(ranks, make, SHARDED[level])
    assert set(first.values()) == {2} and second == dict.fromkeys(first, 1), "of 86 rows and 24, of 85 and 24"


def as_by_hand(ranks: Any, make: Any, options: dict[str, Any]) -> list[dict[str, int]]:
    """Assert that both ranks train as `referenced` does; return the number of codes by name on each."""
    name = make if isinstance(make, str) else make.args[0]
    if name.startswith(("Adam", "FusedAdam")) and not rounds_as_torch():
        pytest.skip("torch's fused kernels round otherwise on this machine")
    ours, theirs = ranks(trained, make, options), ranks(referenced, make, options)
    for rank, wanted in zip(ours, theirs, strict=True):
        assert rank["losses"] == wanted["losses"]
        assert same(rank["weights"], wanted["weights"]) and same(rank["state"], wanted["state"])
    return [rank["coded"] for rank in ours]


def of_torch(name: str, params: Any) -> Any:
    settings = OPTIMIZERS[name] | {"lr": 0.01, **({"fused": True} if name in ("Adam", "AdamW", "SGD") else {})}
    return getattr(OPTIM, name)(params, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", sorted({name for name in OPTIMIZERS if hasattr(OPTIM, name)} - {"SparseAdam", "Adafactor", "Muon"})
)
def test_torchs_optimizers_step_the_elements_here(ranks, name):
    for codes in as_by_hand(ranks, partial(of_torch, name), {"opt_level": "O0"}):
        assert bool(codes) is (name != "ASGD")


def without_fp32_state(make: str, level: str) -> list[tuple[int, int]]:
    """A step in one pass; of each parameter with state the elements here, and the bytes that its state takes."""

    def in_fp32(self: Coder, *_: Any) -> None:
        raise AssertionError("a step in one pass needs no state in FP32")

    model, optimizer = start(make, **SHARDED[level])
    kept, Coder.in_fp32 = Coder.in_fp32, in_fp32  # type: ignore[method-assign]
    try:
        go_on(model, optimizer, range(2))
    finally:
        Coder.in_fp32 = kept  # type: ignore[method-assign]
    found = []
    for param, state in optimizer.state.items():
        tensors = stored([{name: value for name, value in state.items() if name != "step"}])
        found.append((param.to_local().numel(), sum(t.numel() * t.element_size() for t in tensors)))
    return found


@pytest.mark.parametrize(("make", "level"), [("AdamW", "O1"), ("AdamW", "O2"), ("FusedAdam", "O5")])
def test_a_step_in_one_pass_decodes_in_registers_and_each_process_holds_codes_of_its_elements(ranks, make, level):
    if multi_tensor.backend() != "cpp":
        pytest.skip("without the extension a portion of the state is FP32 at the step")
    first, second = ranks(without_fp32_state, make, level)
    for rank, rows in ((first, [86, 24, 1]), (second, [85, 24, 0])):
        weights = [rank[index] for index in (0, 2, -2)]
        assert [size for size, _ in weights] == [rows[0] * 48, rows[1] * 171, rows[2] * 48]
        for size, held in rank:
            assert held == 2 * (size + 4 * -(-size // 256) if size >= 4096 else 4 * size)


# ----------------------------------------------------------------------------------------------------------------------
# Overflow, readers and writers, closures


@pytest.mark.parametrize(("make", "level"), [("AdamW", "O1"), ("NAdam", "O2")])
def test_an_overflow_on_one_process_is_skipped_by_all_and_changes_nothing(ranks, make, level):
    for rank in ranks(overflows, make, SHARDED[level]):
        assert rank["skipped"] and rank["coded"]
        assert same(rank["before"], rank["after"]) and not same(rank["after"], rank["end"])


def read_and_written(make: str) -> None:
    model, optimizer = start(make)
    go_on(model, optimizer, range(2))
    param = model[2].weight
    state = optimizer.state[param]
    assert type(state) is dict and set(kept_names(state)) == {"exp_avg", "exp_avg_sq"}
    for name, value in state.items():
        if name != "step" and isinstance(value, type(param)):
            assert value.dtype is torch.float32 and value.shape == param.shape, name
            assert value.placements == param.placements and value.device_mesh == param.device_mesh
            assert value.stride() == param.stride() and value.to_local().shape == param.to_local().shape
    del value
    assert type(state["step"] if "step" in state else torch.zeros(())) is Tensor
    small = model[4].weight  # FP32, and empty on rank 1
    assert optimizer.state[small]["exp_avg"].placements == small.placements and not kept_names(optimizer.state[small])
    wanted = here([state["exp_avg_sq"]])
    state["exp_avg"].zero_()
    assert not state["exp_avg"].to_local().any() and same(here([state["exp_avg_sq"]]), wanted)
    state["exp_avg"] += 1.0
    state["exp_avg_sq"] = torch.ones_like(param)  # a DTensor of their own
    optimizer.zero_grad()
    optimizer.step()  # without a gradient
    assert set(kept_names(state)) == {"exp_avg", "exp_avg_sq"}
    assert bool((state["exp_avg"].to_local() == 1).all()) and bool((state["exp_avg_sq"].to_local() == 1).all())

    held, before = state["exp_avg"], here([state["exp_avg"]])
    go_on(model, optimizer, range(2, 3))
    index = next(i for i, p in enumerate(model.parameters()) if p is param)
    assert same(here([held]), here([optimizer.state_dict()["state"][index]["exp_avg"]])) and not same(
        here([held]), before
    )
    del held
    go_on(model, optimizer, range(3, 4))
    popped = optimizer.state[param].pop("exp_avg")
    assert popped.placements == param.placements and "exp_avg" not in optimizer.state[param]


@pytest.mark.parametrize("make", ["AdamW", "NAdam"])
def test_reads_of_the_state_return_fp32_dtensors_and_writes_are_encoded(ranks, make):
    ranks(read_and_written, make)


def tensor_parallel(kept: Any) -> list[Tensor]:
    """A weight that each process has whole, and whose gradient is a sum that is still to be made."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    model = distribute_module(nn.Linear(64, 80, bias=False), mesh)
    optimizer = OPTIM.NAdam(model.parameters(), lr=1e-2)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O0", optimizer_state=kept, verbosity=0)
    for step in range(3):
        optimizer.zero_grad()
        inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        model(distribute_tensor(inputs, mesh, [Shard(0)])).square().sum().backward()
        assert any(placement.is_partial() for placement in model.weight.grad.placements)
        optimizer.step()
        if kept is None:
            for name, codes in (("exp_avg", torch.int8), ("exp_avg_sq", torch.uint8)):
                value = optimizer.state[model.weight][name].to_local()
                value.copy_(in_eight_bits(value, codes))
    if kept:
        assert coded(optimizer) == {"exp_avg": 1, "exp_avg_sq": 1}
    return [*here(model.parameters()), *state_of(optimizer)]


def test_a_gradient_that_is_not_laid_out_as_its_parameter_is_stepped_by_torch(ranks):
    for ours, wanted in zip(ranks(tensor_parallel, "8bit"), ranks(tensor_parallel, None), strict=True):
        assert same(ours, wanted)


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints, and the way back


def test_checkpoints_move_to_and_from_fp32_state(ranks, tmp_path):
    in_fp32 = {**SHARDED["O5"], "optimizer_state": None}
    for first, second in ((SHARDED["O5"], in_fp32), (in_fp32, SHARDED["O5"])):
        saved = str(tmp_path / str(first is in_fp32))
        before = ranks(resumable, "AdamW", first, range(3), "", saved)
        after = ranks(resumable, "AdamW", second, range(3, 5), saved)
        for rank, wanted in zip(after, before, strict=True):
            assert same(rank["loaded"], wanted["end"][-len(rank["loaded"]) :]), "FP32 as it was saved"
            assert bool(rank["coded"]) is (second is not in_fp32) and bool(wanted["coded"]) is (first is not in_fp32)


def another_number_of_ranks(saved: str) -> dict[str, Any]:
    return resumable("AdamW", SHARDED["O5"], range(3, 4), saved)


@pytest.mark.slow
def test_a_checkpoint_goes_to_one_process(ranks, one, tmp_path):
    """The scales are of blocks of what a process holds, so that one process encodes the same numbers otherwise."""
    saved = str(tmp_path / "saved")
    before = ranks(resumable, "AdamW", SHARDED["O5"], range(3), "", saved)
    (after,) = one(another_number_of_ranks, saved)
    parts = zip(after["loaded"], *(rank["end"][-len(after["loaded"]) :] for rank in before), strict=True)
    assert all(torch.equal(whole, torch.cat([a, b]) if whole.dim() else a) for whole, a, b in parts)
    assert after["coded"] == {"exp_avg": 2, "exp_avg_sq": 2}


def restored(make: str) -> None:
    for level in ("O2", "O4"):
        model, optimizer = start(make, **SHARDED[level])
        go_on(model, optimizer, range(2))
        wanted = state_of(optimizer)
        options = {**SHARDED[level], "verbosity": 0}
        amp.initialize(model, optimizer, **options)
        assert not coded(optimizer) and same(state_of(optimizer), wanted), "initialize again, without"
        amp.initialize(model, optimizer, **options, optimizer_state="8bit")
        go_on(model, optimizer, range(2, 3))
        assert coded(optimizer)
        wanted = state_of(optimizer)
        amp.restore()
        assert not isinstance(optimizer, Generated) and same(state_of(optimizer), wanted)
        for param, state in optimizer.state.items():
            assert type(state) is dict
            averages = [state[name] for name in ("exp_avg", "exp_avg_sq", "momentum_buffer") if name in state]
            assert averages and all(value.placements == param.placements for value in averages)
        optimizer.zero_grad()
        loss_of(model, 3).backward()
        optimizer.step()


@pytest.mark.parametrize("make", ["AdamW", "SGD, not fused"])
def test_restore_leaves_torchs_own_state_in_fp32(ranks, make):
    ranks(restored, make)


def counted() -> tuple[int, int]:
    """The bytes of state that a record of the run has, and those of its elements here."""
    with amp.record() as run:
        model, optimizer = start("AdamW")
        go_on(model, optimizer, range(2))
    sizes = [param.to_local().numel() for param in model.parameters()]
    held = sum(2 * (size + 4 * -(-size // 256) if size >= 4096 else 4 * size) + 4 for size in sizes)
    return run.state, held


def test_a_runs_record_counts_the_codes_here(ranks):
    for recorded, held in ranks(counted):
        assert recorded == held


# ----------------------------------------------------------------------------------------------------------------------
# Where it is refused


class Lion(Each):
    pass


def refused() -> None:
    for form in ("split", "stochastic"):
        model = sharded("O5")
        optimizer = OPTIM.NAdam(model.parameters())
        with pytest.raises(ValueError, match=f"'0.weight' is sharded, and master_weights='{form}' is not for shards"):
            amp.initialize(model, optimizer, opt_level="O5", master_weights=form, verbosity=0)
        later = sharded("O5", torch.bfloat16)
        _, optimizer = amp.initialize(
            own := nn.Linear(2, 2), OPTIM.NAdam(own.parameters()), opt_level="O5", master_weights=form, verbosity=0
        )
        with pytest.raises(ValueError, match=f"add_param_group: parameter 0 is sharded, .*'{form}' is not for shards"):
            optimizer.add_param_group({"params": later.parameters()})
        assert len(optimizer.param_groups) == 1
    model = sharded("O5", torch.bfloat16)
    with pytest.raises(ValueError, match=r"is sharded and torch.bfloat16; wanted trained shards in FP32"):
        amp.initialize(model, OPTIM.NAdam(model.parameters()), opt_level="O5", verbosity=0)
    for name, match in (("Muon", "it multiplies the whole momentum by itself"), ("Adafactor", "a norm of the whole")):
        model = sharded("O5")
        if hasattr(OPTIM, name):
            optimizer = getattr(OPTIM, name)([p for p in model.parameters() if p.dim() == 2])
            wanted = f"optimizer_state='8bit' is not for this {name}, whose parameters fully_shard.*{match}.*at None"
            with pytest.raises(ValueError, match=wanted):
                amp.initialize(model, optimizer, opt_level="O5", optimizer_state="8bit", verbosity=0)
            assert type(optimizer) is getattr(OPTIM, name)
    model = sharded("O5")
    amp.register_per_parameter_optimizer(Lion)
    with pytest.raises(ValueError, match=r"this Lion, whose parameters fully_shard.*: it is a registered class"):
        amp.initialize(model, Lion(model.parameters()), opt_level="O5", optimizer_state="8bit", verbosity=0)
    with pytest.raises(ValueError, match=r"this LBFGS.*one direction is made of all gradients"):
        amp.initialize(model, OPTIM.LBFGS(model.parameters()), opt_level="O4", optimizer_state="8bit", verbosity=0)


def test_unsupported_combinations_are_refused_by_name(ranks):
    ranks(refused)
