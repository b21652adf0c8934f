"""Steps in one pass: which take it, and that hooks, interrupts, copies and refusals are as of the optimizer's own step.

tests/optimizers/test_every_optimizer.py has the numbers.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import training
from crossed import crossed
from interrupts import send, sent_again_by_the_test
from python_forks import python
from three_ways import spied_kernels
from torch import Tensor, nn

from amp_patch import amp, multi_tensor
from amp_patch.optimizers import FusedAdam, FusedSGD
from amp_patch.ways import one_pass

pytestmark = pytest.mark.extension

SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
both_levels = pytest.mark.parametrize("level", ["O2", "O5"])
casting_levels = pytest.mark.parametrize("level", ["O2", "O5", "O1", "O4"])
ONE_OF_EACH = pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
        (ADAMW, {"lr": 1e-2}),
        (FusedAdam, {"lr": 1e-2, "weight_decay": 0.01, "adam_w_mode": False}),
    ],
    ids=["SGD", "AdamW", "FusedAdam"],
)


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    return spied_kernels(monkeypatch)


class SmallNet(nn.Module):
    """A model with low-precision layers, and a layer that stays FP32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(7, 11), nn.LayerNorm(11), nn.Linear(11, 5, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(inputs))))


def own(kind: Any) -> Any:
    """Return a class that steps by torch's own code."""
    return type(kind.__name__, (kind,), {})


def trained(level: str, kind: Any, settings: dict[str, Any], steps: int = 3) -> tuple[SmallNet, Any]:
    """Return a training after some steps; the first of its two groups has low-precision layers and FP32 ones."""
    model = SmallNet()
    groups = [{"params": [*model.first.parameters(), *model.norm.parameters()]}, {"params": [model.last.weight]}]
    kept = {"keep_fp32": nn.LayerNorm} if level in ("O2", "O5") else {}
    model, optimizer = start(level, model, kind(groups, **settings), **kept)
    go_on(model, optimizer, range(steps))
    return model, optimizer


def start(level: str, model: Any, optimizer: Any, **options: Any) -> tuple[Any, Any]:
    options |= {"loss_scale": 128.0} if level in ("O1", "O2") else {}
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


def backward(model: nn.Module, optimizer: Any, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(6, 7, generator=generator), torch.randint(5, (6,), generator=generator)
    training.backward(nn.functional.cross_entropy(model(inputs).float(), targets), optimizer)


def go_on(model: nn.Module, optimizer: Any, steps: range = range(3, 6)) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(model, optimizer, step)
        optimizer.step()


def ends(model: nn.Module, optimizer: Any) -> Any:
    return list(model.parameters()), list(amp.master_params(optimizer)), optimizer.state_dict()["state"]


# ---------------------------------------------------------------------------------------------------------------------
# What goes the optimizer's own way


def put_in_the_state(name: str, change: Any, group: int = 0) -> Any:
    def put(optimizer: Any) -> None:
        state = optimizer.state[optimizer.param_groups[group]["params"][0]]
        state[name] = change(state[name])

    return put


def add_a_setting(optimizer: Any) -> None:
    """Make it an optimizer of a later torch, whose class has a setting that the kernels do not read."""
    for settings in (optimizer.defaults, *optimizer.param_groups):
        settings["cautious"] = True


def leave_it(optimizer: Any) -> None:
    pass


def in_another_order(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous().t()


BETAS = (torch.tensor(0.9), torch.tensor(0.999))
# name: (class, settings, what is done to it after two steps, how many calls of the kernels the third step has)
OWN_WAYS = {
    "none": (ADAM, {"lr": 1e-2}, leave_it, 3),
    "betas that are tensors": (ADAM, {"lr": 1e-2, "betas": BETAS}, leave_it, 0),
    "a subclass": (own(ADAM), {"lr": 1e-2}, leave_it, 0),
    **{f"one more setting of {kind.__name__}": (kind, {"lr": 1e-2}, add_a_setting, 0) for kind in one_pass.KERNELS},
    "weight decay that is a tensor": (SGD, {"lr": 0.1, "weight_decay": torch.tensor(0.5)}, leave_it, 0),
    "a state of another type": (
        *(SGD, {"lr": 0.1, "momentum": 0.9}, put_in_the_state("momentum_buffer", Tensor.double), 2),
    ),
    "a state in another order": (ADAM, {"lr": 1e-2}, put_in_the_state("exp_avg", in_another_order), 2),
    "a count of another type": (ADAM, {"lr": 1e-2}, put_in_the_state("step", Tensor.long), 2),
    "FusedAdam's decay": (FusedAdam, {"lr": 1e-2, "weight_decay": 0.1}, leave_it, 0),
    "FusedSGD's decay": (FusedSGD, {"lr": 0.1, "weight_decay": 0.1, "wd_after_momentum": True}, leave_it, 0),
    "a state of FusedAdam's in another order": (
        *(FusedAdam, {"lr": 1e-2}, put_in_the_state("exp_avg", in_another_order), 2),
    ),
}


@crossed(
    pytest.mark.parametrize("kind, settings, change, calls", OWN_WAYS.values(), ids=OWN_WAYS), casting_levels, meet=1
)
def test_what_the_kernels_do_not_know_is_stepped_by_the_optimizer_itself(level, kind, settings, change, calls, kernels):
    ours, theirs = trained(level, kind, settings, 2), trained(level, own(kind), settings, 2)
    for both, wanted in ((ours, calls), (theirs, 0)):
        change(both[1])
        kernels.clear()
        go_on(*both, range(2, 3))
        # Where all weights have one type, the first group is one batch.
        assert len(kernels) == (wanted if level in ("O2", "O5") else min(wanted, 2 if calls == 3 else 1))
        go_on(*both)
    torch.testing.assert_close(ends(*ours)[1:], ends(*theirs)[1:], rtol=1e-4, atol=1e-6)  # other formulas


def test_a_refusal_by_the_extension_is_told(monkeypatch):
    def refuse(*_args: Any, **_options: Any) -> None:
        raise multi_tensor.extension().Refused("refused by the extension: an alignment")

    ours, theirs = trained("O5", ADAMW, {"lr": 1e-2}, 2), trained("O5", own(ADAMW), {"lr": 1e-2}, 2)
    monkeypatch.setattr(multi_tensor, "multi_tensor_adam", refuse)
    with pytest.warns(RuntimeWarning, match=r"^step: the extension refuses tensors of AdamW .*an alignment.*report"):
        go_on(*ours, range(2, 3))
    go_on(*theirs, range(2, 3))
    torch.testing.assert_close(ends(*ours), ends(*theirs), rtol=1e-4, atol=1e-6)  # other formulas in the first steps


REFUSED = {
    "differentiable": ({"differentiable": True}, RuntimeError, "in-place operation"),
    "capturable": ({"capturable": True}, AssertionError, "capturable=True"),
    "a state of another type": ({}, RuntimeError, "dtype"),
}


@casting_levels
@pytest.mark.parametrize("settings, error, message", REFUSED.values(), ids=REFUSED)
def test_arguments_that_torch_refuses_are_refused_by_torch(level, settings, error, message, kernels):
    model = training.linear([[1.0, 2.0]])
    model, optimizer = start(level, model, ADAM(model.parameters(), **settings))
    (master,) = amp.master_params(optimizer)
    if message == "dtype":
        zeros = torch.zeros_like(model.weight, dtype=torch.float64)
        optimizer.state[master] = {"step": torch.tensor(1.0), "exp_avg": zeros, "exp_avg_sq": zeros.float()}
    training.backward(model(torch.ones(1, 2)).float().sum(), optimizer)
    with pytest.raises(error, match=message):
        optimizer.step()
    assert not kernels and model.weight.tolist() == [[1, 2]]


@pytest.mark.parametrize("level", ["O1", "O4"])
@pytest.mark.parametrize("base", [[], [nn.Parameter(torch.ones(2, dtype=torch.bfloat16), requires_grad=False)]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parameters_of_fp64_step_by_themselves_and_frozen_low_ones_change_nothing(level, base, dtype, kernels):
    """An adapter's base of BF16 is often in the optimizer's groups too, before the FP32 adapter."""
    model = training.linear([[1.0, 2.0]]).to(dtype)
    model, optimizer = start(level, model, SGD([*base, *model.parameters()], lr=0.25))
    for _ in range(2):
        optimizer.zero_grad()
        training.backward((model.weight * torch.tensor([4.0, -4.0])).float().sum(), optimizer)
        optimizer.step()
    assert model.weight.tolist() == [[-1, 4]] and model.weight.dtype is dtype
    assert kernels == ([1, 1] if dtype is torch.float32 else [])


@both_levels
@pytest.mark.parametrize("make", [SGD, ADAM])
def test_a_sparse_gradient_leaves_the_whole_step_to_torch(level, make, kernels):
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), training.linear([[1.0, 2.0]]))
    nn.init.ones_(model[0].weight)
    optimizer = make([{"params": model[0].parameters()}, {"params": model[1].parameters()}], lr=0.5)
    model, optimizer = start(level, model, optimizer, keep_fp32=nn.Embedding)
    training.backward(model(torch.tensor([1, 1, 3])).float().sum(), optimizer)
    if make is ADAM:  # torch refuses it before it has stepped others
        with pytest.raises(RuntimeError, match="sparse gradients"):
            optimizer.step()
        assert model[1].weight.tolist() == [[1, 2]]
    else:
        optimizer.step()
        assert model[0].weight.tolist() == [[1, 1], [0, -1], [1, 1], [0.5, 0]]
        assert model[1].weight.tolist() == [[-0.5, 0.5]]
    assert not kernels


# ---------------------------------------------------------------------------------------------------------------------
# Hooks, interrupts, copies


class Interrupting:
    """Kernels at whose call of that number Ctrl-C comes, as it begins or as it ends; once."""

    def __init__(self, at: int, after: bool) -> None:
        self.at, self.after, self.calls = at, after, 0

    def __call__(self, kernel: Any) -> Any:
        def call(*args: Any, **options: Any) -> None:
            self.calls += 1
            now = self.calls == self.at
            if now and not self.after:
                send()
            try:
                kernel(*args, **options)
            finally:
                if now and self.after:
                    send()

        return call


@crossed(
    pytest.mark.parametrize("first", [False, True], ids=["later", "first"]),
    pytest.mark.parametrize("own_way", [False, True], ids=["in one pass", "partly its own way"]),
    ONE_OF_EACH,
    both_levels,
)
def test_an_interrupt_waits_for_the_end_of_the_step(level, kind, settings, own_way, first, monkeypatch):
    def begin() -> tuple[SmallNet, Any]:
        model, optimizer = trained(level, kind, settings, 0 if first else 3)
        if own_way:
            if first:
                optimizer.param_groups[1]["differentiable"] = True
            else:
                put_in_the_state("momentum_buffer" if kind is SGD else "exp_avg", in_another_order, 1)(optimizer)
            model.last.weight.data[0] = 0.25  # an edit to adopt, which writes to the master
        backward(model, optimizer, 3)
        return model, optimizer

    model, optimizer = begin()
    optimizer.step()
    wanted = copy.deepcopy(ends(model, optimizer)[1])
    go_on(model, optimizer)
    later = copy.deepcopy(ends(model, optimizer))
    for at in range(1, 5 if own_way and not first else 4):  # the kernels, one that refuses, the optimizer's own way
        for after in (False, True):
            model, optimizer = begin()
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), sent_again_by_the_test():
                interrupting = Interrupting(at, after)
                for name in ("multi_tensor_adam", "multi_tensor_sgd"):
                    patch.setattr(multi_tensor, name, interrupting(getattr(multi_tensor, name)))
                patch.setattr(one_pass, "_step_with_torch", interrupting(one_pass._step_with_torch))
                optimizer.step()
            training.assert_unchanged(ends(model, optimizer)[1], wanted)
            go_on(model, optimizer)
            training.assert_unchanged(ends(model, optimizer), later)


IN_A_FRESH_PROCESS = """
import sys, torch
from amp_patch import amp
model, optimizer = torch.load(sys.argv[1], weights_only=False)
def closure():
    with amp.scale_loss(model(torch.ones(1, 2)).float().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
if sys.argv[2] == "closure":
    optimizer.step(closure)
else:
    closure()
    optimizer.step()
assert model.weight.tolist() == [[0.5, 1.5]], model.weight
"""


@pytest.mark.parametrize("how", ["closure", "plain"])
def test_a_pickle_goes_on_in_a_process_that_has_made_no_optimizer(how, tmp_path):
    model = training.linear([[1.0, 2.0]])
    both = amp.initialize(model, SGD(model.parameters(), lr=0.5), opt_level="O5", verbosity=0)
    torch.save(both, tmp_path / "both.pt")
    python("-c", IN_A_FRESH_PROCESS, tmp_path / "both.pt", how).check_returncode()
