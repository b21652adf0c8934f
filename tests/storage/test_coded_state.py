"""`optimizer_state="8bit"`: optimizer state is stored as codes, and each read returns FP32."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from coded_states import MAKERS, OPTIM, coded, go_on, in_eight_bits, loss_of, net, start, state_of, through_file
from crossed import crossed
from three_ways import rounds_as_torch
from torch import Tensor, nn
from torch_optimizers import OPTIMIZERS
from training import backward, masters_of, same

from amp_patch import amp
from amp_patch.storage import coded_state
from amp_patch.ways import gradient_release

one_of_each_way = pytest.mark.parametrize("make", [MAKERS[name] for name in ("AdamW", "SGD", "NAdam")])
HERE = [name for name in OPTIMIZERS if hasattr(OPTIM, name) and name != "SparseAdam"]

# ---------------------------------------------------------------------------------------------------------------------
# The numbers

# By class what is kept in codes, of the settings of OPTIMIZERS.
KEPT = {
    "ASGD": {},
    "Adadelta": {"square_avg": torch.uint8, "acc_delta": torch.uint8},
    "Adafactor": {},
    "Adagrad": {"sum": torch.uint8},
    "Adamax": {"exp_avg": torch.int8, "exp_inf": torch.uint8},
    "Muon": {"momentum_buffer": torch.int8},
    "RMSprop": {"momentum_buffer": torch.int8},
    "Rprop": {"prev": torch.int8, "step_size": torch.uint8},
    "SGD": {"momentum_buffer": torch.int8},
    **{name: {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8} for name in ("Adam", "AdamW", "NAdam", "RAdam")},
}


@pytest.mark.parametrize("name", HERE)
def test_a_step_is_decode_the_optimizers_own_step_encode_to_the_bit(name):
    settings: dict[str, Any] = OPTIMIZERS[name] | {"lr": 0.01}
    if name in ("Adam", "AdamW", "SGD"):
        settings["fused"] = True
        if not rounds_as_torch():
            pytest.skip("torch's fused kernels round otherwise on this machine")
    made = getattr(OPTIM, name)

    def params(model: nn.Module) -> list[nn.Parameter]:
        return [p for p in model.parameters() if p.dim() == 2 or name != "Muon"]

    model, plain = net(), net()
    reference = made(params(plain), **settings)
    model, optimizer = amp.initialize(
        model, made(params(model), **settings), opt_level="O0", optimizer_state="8bit", verbosity=0
    )
    for step in range(4):
        for one, other in ((model, optimizer), (plain, reference)):
            other.zero_grad()
            loss_of(one, step).backward()
            other.step()
        for param, state in reference.state.items():
            for key, dtype in KEPT[name].items():
                if param.numel() >= 4096:
                    state[key].copy_(in_eight_bits(state[key], dtype))
        assert same(model.parameters(), plain.parameters())
        assert same(state_of(optimizer), state_of(reference))
    assert coded(optimizer) == dict.fromkeys(KEPT[name], 2)


def test_state_that_stays_fp32_is_named_with_its_reason():
    _, optimizer = start(MAKERS["AdamW, amsgrad"])
    go_on(_, optimizer, range(1))
    assert set(coded(optimizer)) == {"exp_avg", "exp_avg_sq"}
    assert all(reason for reason in coded_state.IN_FP32.values())
    for state in optimizer.state.values():
        assert type(state["step"]) is Tensor and type(state["max_exp_avg_sq"]) is Tensor


# ---------------------------------------------------------------------------------------------------------------------
# Overflow, accumulation, clipping


def test_a_step_with_a_closure_takes_all_state_at_once():
    losses = []
    for closure in (True, False):
        model, optimizer = start(MAKERS["NAdam"], opt_level="O4")

        def evaluate(model: Any = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, 0)
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(evaluate) if closure else (evaluate(), optimizer.step())
        losses.append(evaluate().item())
        assert coded(optimizer) == {"exp_avg": 2, "exp_avg_sq": 2}
        amp.restore()
    assert losses[0] == losses[1]


# ---------------------------------------------------------------------------------------------------------------------
# Who looks, and who writes


@one_of_each_way
def test_a_read_returns_fp32(make):
    model, optimizer = start(make)
    go_on(model, optimizer, range(2))
    wanted = state_of(optimizer)
    for master, state in optimizer.state.items():
        for name, value in state.items():
            assert value is state[name] and value is state.get(name)
            if value.dim():
                assert isinstance(value, Tensor) and value.dtype is torch.float32 and value.shape == master.shape
                assert value.stride() == master.stride() and value.device == master.device
        assert same(state.values(), dict(state).values()) and same(state.values(), {**state}.values())
        assert list(state) == list(state.keys()) == list(state.copy())
    assert same([t for state in optimizer.state.values() for t in state.values()], wanted)
    del value, state
    go_on(model, optimizer, range(2, 3))


@one_of_each_way
def test_looking_changes_no_bit(make):
    ends = []
    for looks in (True, False):
        model, optimizer = start(make)
        for step in range(4):
            if looks:
                repr(dict(optimizer.state))
                sum(t.sum() for state in optimizer.state.values() for t in state.values())
            go_on(model, optimizer, range(step, step + 1))
        ends.append([*masters_of(optimizer), *state_of(optimizer)])
        amp.restore()
    assert same(*ends)


def written(optimizer: Any, way: str, new: Tensor) -> Tensor:
    """Return the state that is read after `new` was written into a large tensor of it."""
    param = list(amp.master_params(optimizer))[2]
    state = optimizer.state[param]
    name = "momentum_buffer" if "momentum_buffer" in state else "exp_avg"
    if way == "in place":
        state[name].copy_(new)
    elif way == "item":
        state[name] = new.clone()
    elif way == "update":
        state.update({name: new.clone()})
    elif way == "|=":
        state |= {name: new.clone()}
    elif way == "dict":
        optimizer.state[param] = {**state, name: new.clone()}
    elif way == "|= of states":
        optimizer.state |= {param: {**state, name: new.clone()}}
    else:
        state[name].data = new.clone()
    found: Tensor = optimizer.state[param][name]
    return found


@crossed(
    {
        "way": ["in place", "item", "update", "data", "|=", "dict", "|= of states"],
        "where": ["before backward", "before step", "in a hook"],
    },
    one_of_each_way,
)
def test_writes_are_encoded(make, where, way):
    def train(new: Tensor | None, way: str) -> list[Tensor]:
        model, optimizer = start(make)
        go_on(model, optimizer, range(2))
        write = (lambda *_: None) if new is None else (lambda *_: written(optimizer, way, new))
        if where == "before backward":
            found = write()
            in_codes = way == "in place"
            assert new is None or torch.equal(found, in_eight_bits(new, torch.int8) if in_codes else new)
        optimizer.zero_grad()
        backward(loss_of(model, 2), optimizer)
        if where == "before step":
            write()
        elif where == "in a hook":
            optimizer.register_step_pre_hook(lambda *_: (write(), None)[1])
        optimizer.step()
        assert set(coded(optimizer).values()) == {2}
        found = [*masters_of(optimizer), *state_of(optimizer)]
        amp.restore()
        return found

    new = torch.randn((48, 131), generator=torch.Generator().manual_seed(9))
    ours = train(new, way)
    assert same(ours, train(in_eight_bits(new, torch.int8), "item")) and not same(ours, train(None, way))


def trained_before(make: Any) -> tuple[Any, Any]:
    """A model and its optimizer of torch, with state from two steps, and the state's first large tensor."""
    model = net()
    optimizer = make(model.parameters())
    for step in range(2):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def loaded(make: Any) -> tuple[Any, Any]:
    model, optimizer = start(make)
    go_on(model, optimizer, range(2))
    optimizer.load_state_dict(through_file(optimizer.state_dict()))
    return model, optimizer


def entered(make: Any) -> tuple[Any, Any]:
    model, optimizer = trained_before(make)
    return amp.initialize(model, optimizer, opt_level="O5", optimizer_state="8bit", verbosity=0)


def copied(make: Any) -> tuple[Any, Any]:
    model, optimizer = start(make)
    go_on(model, optimizer, range(2))
    return copy.deepcopy((model, optimizer))


@one_of_each_way
@pytest.mark.parametrize("begin", [loaded, entered, copied])
def test_a_tensor_that_was_read_before_the_first_backward_follows_each_step_and_its_edits_count(begin, make):
    model, optimizer = begin(make)
    held = [t for t in optimizer.state[next(iter(amp.master_params(optimizer)))].values() if t.numel() >= 4096]
    assert held
    for step in range(2, 4):
        before = [t.clone() for t in held]
        go_on(model, optimizer, range(step, step + 1))
        state = optimizer.state_dict()["state"][0]
        assert same(held, [t for t in state.values() if t.numel() >= 4096])
        assert not any(map(torch.equal, held, before))
    held[0].zero_()
    assert not next(t for t in optimizer.state_dict()["state"][0].values() if t.numel() >= 4096).any()
    assert len(coded(optimizer)) == len(held) and set(coded(optimizer).values()) == {2}


@one_of_each_way
@pytest.mark.parametrize("whole", [False, True], ids=["tensor", "dict"])
def test_a_tensor_that_was_assigned_follows_each_step_and_its_edits_count(make, whole):
    model, optimizer = start(make)
    go_on(model, optimizer, range(2))
    param = list(amp.master_params(optimizer))[2]
    name = next(name for name in ("momentum_buffer", "exp_avg") if name in optimizer.state[param])
    held = torch.zeros(48, 131)
    if whole:
        optimizer.state[param] = {**optimizer.state[param], name: held}
    else:
        optimizer.state[param][name] = held
    for step in range(2, 4):
        before = held.clone()
        go_on(model, optimizer, range(step, step + 1))
        assert torch.equal(held, optimizer.state_dict()["state"][2][name]) and not torch.equal(held, before)
    held.zero_()
    backward(loss_of(model, 9), optimizer)
    assert not optimizer.state_dict()["state"][2][name].any()
    del held
    optimizer.step()


# ---------------------------------------------------------------------------------------------------------------------
# Memory


@pytest.mark.extension
def test_the_state_of_a_first_step_is_never_fp32_as_a_whole():
    """Of twelve layers the states of one are there at a time."""
    for make in (MAKERS["AdamW"], MAKERS["FusedAdam"], MAKERS["SGD"]):
        model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(12)))
        model, optimizer = start(make, model, master_weights="split")
        backward(model(torch.randn(4, 128)).square().mean(), optimizer)
        with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
            optimizer.step()
        events = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        held = most = 0
        for size in events:
            held += size
            most = max(most, held)
        assert most < 4 * 12 * 128 * 128, "FP32 of one state"
        amp.restore()


def small_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 85), nn.Linear(85, 5))  # 4,080 elements in the larger weight


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize(
    ("make", "model", "largest"),
    [
        (MAKERS["AdamW"], small_net, 4080),
        (MAKERS["NAdam"], small_net, 4080),
        (lambda p: OPTIM.SGD(p, lr=0.1), net, 0),
        (MAKERS["AdamW"], net, None),
    ],
)
def test_state_without_quantized_tensors_is_logged_once_after_the_first_step(
    make, model, largest, release, caplog, monkeypatch
):
    monkeypatch.setattr(gradient_release, "TOGETHER", 1)  # a small parameter is stepped before the large ones
    model, optimizer = start(make, model(), gradient_release=release)
    optimizer.step()  # without a gradient
    assert not caplog.records
    go_on(model, optimizer, range(3))
    logged = [record.getMessage() for record in caplog.records]
    if largest is None:
        assert not logged
    else:
        (message,) = logged
        assert "keeps no state of this" in message and f"largest state tensor has {largest} elements" in message
        assert "at least 4096 elements" in message


def test_a_run_s_record_counts_codes_and_scales_and_opens_nothing():
    with amp.record() as run:
        model, optimizer = start(MAKERS["AdamW"], master_weights="split")
        go_on(model, optimizer, range(2))
    large = [p.numel() for p in model.parameters() if p.numel() >= 4096]
    small = [p.numel() for p in model.parameters() if p.numel() < 4096]
    blocks = sum(-(-size // 256) for size in large)
    assert run.state == 2 * (sum(large) + 4 * blocks + 4 * sum(small)) + 4 * len(large + small)
