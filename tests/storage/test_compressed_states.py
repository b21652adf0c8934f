"""`amp.compress_state_dict` and `amp.decompress_state_dict`: checkpoints of optimizers with 8-bit codes, to the bit."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from coded_states import (
    LEVELS,
    MAKERS,
    OPTIM,
    coded,
    go_on,
    in_eight_bits,
    net,
    start,
    state_of,
    through_file,
)
from crossed import crossed
from fsdp_trainings import restored_fixture  # noqa: F401  the fixture `restored`
from torch import Tensor, nn
from training import masters_of, same

from amp_patch import amp

every_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
one_of_each_way = pytest.mark.parametrize("make", [MAKERS[name] for name in ("AdamW", "SGD", "NAdam")])


def trained(make: Any, **options: Any) -> tuple[Any, Any]:
    model, optimizer = start(make, **options)
    go_on(model, optimizer, range(3))
    return model, optimizer


def compressed_names(states: dict[str, Any]) -> list[str]:
    """The names of the entries that are codes, once for each parameter."""
    return [name for state in states["state"].values() for name, value in state.items() if isinstance(value, dict)]


def tensors_of(states: dict[str, Any]) -> list[Tensor]:
    return [t for _, state in sorted(states["state"].items()) for t in state.values() if isinstance(t, Tensor)]


def size_of(states: Any) -> int:
    file = io.BytesIO()
    torch.save(states, file)
    return file.tell()


# ---------------------------------------------------------------------------------------------------------------------
# Exact, and smaller


@every_maker
def test_each_tensor_that_is_stored_as_codes_is_codes_in_the_file_and_comes_back_to_the_bit(make):
    _, optimizer = trained(make)
    states = optimizer.state_dict()
    before, in_file = tensors_of(states), through_file(amp.compress_state_dict(states))
    names = compressed_names(in_file)
    assert {name: names.count(name) for name in names} == coded(optimizer)
    assert same(tensors_of(states), before), "the state dict is as it was"
    after = amp.decompress_state_dict(in_file)
    assert after["param_groups"] == states["param_groups"] and same(tensors_of(after), before)
    for one, other in zip(tensors_of(after), before, strict=True):
        assert one.dtype is other.dtype and one.stride() == other.stride()


def test_the_state_of_adamw_takes_a_quarter_of_the_bytes_and_with_the_weights_a_half():
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    model, optimizer = start(MAKERS["AdamW"], model, opt_level="O5+split")
    with amp.scale_loss(model(torch.randn(4, 512)).square().mean(), optimizer) as loss:
        loss.backward()
    optimizer.step()
    states, weights = optimizer.state_dict(), model.state_dict()
    assert size_of(amp.compress_state_dict(states)) < 0.26 * size_of(states)
    assert size_of([amp.compress_state_dict(states), weights]) < 0.51 * size_of([states, weights])


def test_extreme_numbers_come_back_to_the_bit():
    values = torch.randn(8, 1024)
    values[0], values[1, 3], values[2, :400], values[3] = 0.0, float("inf"), 1e-44, -0.0
    values[4, 5], values[5], values[6] = float("nan"), 1e38, 1e-30
    state = {"exp_avg": in_eight_bits(values, torch.int8), "exp_avg_sq": in_eight_bits(values.abs(), torch.uint8)}
    states = {"state": {0: state, 1: {"exp_avg": values}}, "param_groups": []}
    in_file = amp.compress_state_dict(states)
    assert compressed_names(in_file) == ["exp_avg", "exp_avg_sq"] and in_file["state"][1]["exp_avg"] is values
    for one, other in zip(tensors_of(amp.decompress_state_dict(in_file)), tensors_of(states), strict=True):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))


@one_of_each_way
def test_state_that_is_fp32_is_left_as_it_is(make):
    _, optimizer = trained(make, optimizer_state=None)
    states = optimizer.state_dict()
    assert amp.compress_state_dict(states) is states and amp.decompress_state_dict(states) is states
    amp.restore()
    _, optimizer = trained(make, fp32_state="2")
    names = compressed_names(amp.compress_state_dict(optimizer.state_dict()))
    assert {name: names.count(name) for name in names} == coded(optimizer) and set(map(names.count, names)) == {1}


# ---------------------------------------------------------------------------------------------------------------------
# Loading


@crossed({"masters": [None, "split", "stochastic"]}, every_maker, meet=1)
def test_a_training_resumes_from_it_to_the_bit(make, masters):
    model, optimizer = trained(make, master_weights=masters)
    states = through_file([model.state_dict(), amp.compress_state_dict(optimizer.state_dict()), amp.state_dict()])
    wanted = [go_on(model, optimizer, range(3, 6)), *masters_of(optimizer), *state_of(optimizer)]
    amp.restore()
    again, its_optimizer = start(make, master_weights=masters)
    for load, state in zip((again, its_optimizer, amp), states, strict=True):
        load.load_state_dict(state)
    assert go_on(again, its_optimizer, range(3, 6)) == wanted[0]
    assert same([*masters_of(its_optimizer), *state_of(its_optimizer)], wanted[1:])


@crossed({"level": ["O0", "O1", "O2", "O5", "split"]}, one_of_each_way, meet=1)
def test_a_training_with_fp32_state_loads_the_fp32_numbers(make, level):
    _, optimizer = trained(make)
    states, wanted = through_file(amp.compress_state_dict(optimizer.state_dict())), state_of(optimizer)
    assert compressed_names(states)
    amp.restore()
    _, fp32 = start(make, **LEVELS[level], optimizer_state=None)
    fp32.load_state_dict(states)
    assert same(state_of(fp32), wanted) and not coded(fp32)
    amp.restore()
    plain = make(net().parameters())
    plain.load_state_dict(amp.decompress_state_dict(states))
    assert same(state_of(plain), wanted)


def zero_loads(states: Any, wanted: list[Tensor]) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    for level in ("O0", "O5"):
        model = net()
        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), OPTIM.AdamW, lr=1e-2)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        optimizer.load_state_dict(copy.deepcopy(states))  # it writes into its argument
        held = [t for state in optimizer.optim.state.values() for t in state.values()]
        assert held and all(any(torch.equal(one, other) for other in wanted) for one in held)


def test_a_zero_redundancy_optimizer_loads_the_fp32_numbers(ranks):
    _, optimizer = trained(MAKERS["AdamW"])
    ranks(zero_loads, amp.compress_state_dict(optimizer.state_dict()), state_of(optimizer))


def test_hooks_of_user_code_get_fp32_tensors_and_restore_takes_ours_away():
    _, optimizer = trained(MAKERS["AdamW"])
    seen: list[Any] = []
    optimizer.register_load_state_dict_pre_hook(lambda _, states: seen.append(compressed_names(states)), prepend=False)
    optimizer.load_state_dict(amp.compress_state_dict(optimizer.state_dict()))
    assert seen == [[]]
    amp.restore()
    optimizer.load_state_dict(amp.compress_state_dict(optimizer.state_dict()))
    assert seen[1] and len(optimizer._optimizer_load_state_dict_pre_hooks) == 1


@crossed(
    {"level": ["O0", "O1", "O2", "O5", "split"], "state": [None, "8bit"]},
    pytest.mark.parametrize("make", [MAKERS[name] for name in ("AdamW", "SGD", "NAdam", "FusedAdam")]),
)
def test_codes_that_are_loaded_before_initialize_are_decoded_by_it(make, level, state):
    model, optimizer = trained(make)
    states, weights = through_file(amp.compress_state_dict(optimizer.state_dict())), model.state_dict()
    wanted, names = state_of(optimizer), coded(optimizer)
    amp.restore()
    again = net()
    its_optimizer = make(again.parameters())
    again.load_state_dict(weights)
    its_optimizer.load_state_dict(states)
    again, its_optimizer = amp.initialize(again, its_optimizer, **LEVELS[level], optimizer_state=state, verbosity=0)
    assert same(state_of(its_optimizer), wanted)
    go_on(again, its_optimizer, range(3, 5))
    assert coded(its_optimizer) == (names if state else {})


@pytest.mark.parametrize("state", [None, "8bit"])
def test_codes_that_torch_has_cast_to_bf16_are_decoded_to_its_precision(state):
    """`load_state_dict` casts all tensors to the type of the parameters: codes are exact in BF16, scales are not."""
    _, optimizer = trained(MAKERS["AdamW"])
    states = amp.compress_state_dict(optimizer.state_dict())
    wanted = state_of(optimizer)
    amp.restore()
    model = net().bfloat16()
    its_optimizer = MAKERS["AdamW"](model.parameters())
    its_optimizer.load_state_dict(states)
    model, its_optimizer = amp.initialize(model, its_optimizer, opt_level="O5", optimizer_state=state, verbosity=0)
    for ours, theirs in zip(state_of(its_optimizer), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-8, atol=0)
        assert ours.dtype is torch.float32
    go_on(model, its_optimizer, range(3, 4))


# ---------------------------------------------------------------------------------------------------------------------
# Errors


@pytest.mark.parametrize("change", [amp.compress_state_dict, amp.decompress_state_dict])
@pytest.mark.parametrize("given", [{"model": {}}, [], None, OPTIM.SGD([nn.Parameter(torch.ones(1))])])
def test_anything_else_is_an_error(change, given):
    with pytest.raises(
        TypeError, match=rf"^{change.__name__}: state_dict is an? .*; wanted what optimizer.state_dict\(\)"
    ):
        change(given)


def test_codes_of_another_format_are_refused_and_change_nothing():
    _, optimizer = trained(MAKERS["AdamW"])
    states, wanted = amp.compress_state_dict(optimizer.state_dict()), state_of(optimizer)
    states["state"][0]["exp_avg"] |= {"format": "dynamic map"}
    with pytest.raises(ValueError, match=r"^load_state_dict: state in the format 'dynamic map'; wanted 'e5m3"):
        optimizer.load_state_dict(states)
    assert same(state_of(optimizer), wanted)
