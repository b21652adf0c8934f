"""Ctrl-C at any call of an iteration: torch's state is restored, and the training goes on."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import pytest
import torch
import wrapper_backends
from conftest import WRAPPERS
from interrupts import INPUTS, Interrupt, Training, network, sgd, surroundings, topmost_hooks
from torch import Tensor, nn

from amp_patch import amp
from amp_patch.casts import regions, thread_state
from amp_patch.casts import state as casts_state
from amp_patch.model import of_model as model_state
from amp_patch.storage import coded_state
from amp_patch.support import generated_class, held_names
from amp_patch.ways import one_pass, portions

# ---------------------------------------------------------------------------------------------------------------------
# Raising at the n-th call.


def spoken(place: Iterable[CodeType]) -> str:
    return " < ".join(f"{code.co_filename.rsplit('/', 1)[-1]}:{code.co_name}" for code in list(place)[:5])


# ---------------------------------------------------------------------------------------------------------------------
# What must be as it was.


OWNERS = (
    torch,
    torch.Tensor,
    torch.linalg,
    torch.special,
    nn.functional,
    nn.Module,
    nn.DataParallel,
    nn.utils.clip_grad,
)


OWNERS += (nn.utils, torch.autograd, torch.utils.checkpoint, torch.utils.checkpoint.CheckpointFunction)


OWNERS += (torch.optim.Optimizer, torch.backends.mha, nn.RNNBase, nn.parallel.DistributedDataParallel)


def namespace(owners: Iterable[Any] = OWNERS) -> dict[tuple[int, str], int]:
    return {(id(owner), name): id(value) for owner in owners for name, value in vars(owner).items()}


def gradients_of_a_plain_model() -> list[Tensor]:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    with torch.no_grad():
        for index, param in enumerate(model.parameters()):
            param.fill_(0.25 + index)
    model(INPUTS["first"]).square().sum().backward()
    return [param.grad for param in model.parameters()]


# ---------------------------------------------------------------------------------------------------------------------
# The trainings, and the part of them that is interrupted.


class Story(NamedTuple):
    """An interrupted part of a training, what came before it, and what comes after it."""

    interrupted: Callable[[Any], Any]
    after: Callable[[Any], Any]
    before: Callable[[Any], Any] = lambda training: None
    parts: bool = False  # whether backward may have reached some parameters only, as in plain torch
    between: tuple[Callable[[Any], Any], ...] = ()  # where it may come to besides, with or without what is interrupted


STORIES = {
    "iteration": Story(lambda t: t.iteration("first"), lambda t: t.iteration("second")),
    "iteration, then a step": Story(
        lambda t: t.iteration("first"),
        lambda t: t.optimizer.step(),
        between=(lambda t: None, lambda t: t.iteration("first")),
    ),
    "iteration, then a forward": Story(
        lambda t: t.iteration("first"), lambda t: (t.loss("first"), t.iteration("second"))
    ),
    "second backward": Story(
        lambda t: t.backward("second"),
        lambda t: t.step(),
        lambda t: t.backward("first"),
        parts=True,
        between=(lambda t: None,),  # the gradients were dropped
    ),
    "backward after a delayed one": Story(
        lambda t: t.backward("second"),
        lambda t: t.step(),
        lambda t: t.backward("first", delay_unscale=True),
        parts=True,
        between=(lambda t: None,),
    ),
    "delayed backward": Story(
        lambda t: t.backward("first", delay_unscale=True),
        lambda t: (t.backward("second"), t.step()),
    ),
}


class Case(NamedTuple):
    level: str
    wrappers: str
    options: dict[str, Any]

    def __str__(self) -> str:
        return "-".join([self.level, self.wrappers, *map(str, self.options.values())])

    def make(self) -> Training:
        return Training(self.level, **self.options)


FIRST = WRAPPERS[0]
CASES = [
    *(Case(level, FIRST, {}) for level in ("O0", "O4", "O5")),
    *(Case(level, FIRST, {"cpu_half": way}) for level in ("O1", "O2", "O3") for way in ("emulate", "native")),
    *(Case("O1", wrappers, {"cpu_half": "emulate"}) for wrappers in WRAPPERS[1:]),
    *(Case("O5", FIRST, {"master_weights": form}) for form in ("split", "stochastic")),
    Case("O5", FIRST, {"optimizer_state": "8bit"}),
]


# ---------------------------------------------------------------------------------------------------------------------
# The sweep.


def left_without_grad_mode_by_torch(event: str = "call") -> set[tuple[CodeType, ...]]:
    """Return the calls at which an interrupt leaves grad mode off in a plain training of torch, without amp_patch."""

    def train(model: nn.Module, optimizer: Any) -> None:
        model(INPUTS["first"]).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e4)
        optimizer.step()

    model = network()
    optimizer = sgd(model)
    train(model, optimizer)  # what is imported at first use is no part of this
    places = set()
    for at in range(1, Interrupt(event=event)(lambda: train(model, optimizer)).count + 1):
        raised = Interrupt(at, event=event)(lambda: train(model, optimizer))
        if not torch.is_grad_enabled():
            torch.set_grad_enabled(True)
            places.add(raised.place[:2])
    return places


def ends(case: Case, story: Story, interrupted: bool) -> list[Tensor]:
    """Return the final weights of the story, with or without the part that is to be interrupted."""
    training = case.make()
    story.before(training)
    if interrupted:
        story.interrupted(training)
    story.after(training)
    return training.weights()


def legal(weights: list[Tensor], ends: list[list[Tensor]], parts: bool) -> bool:
    if parts:
        return all(
            any(torch.equal(got, wanted) for wanted in choice) for got, *choice in zip(weights, *ends, strict=True)
        )
    return any(all(map(torch.equal, weights, wanted)) for wanted in ends)


def sweep(case: Case, story: Story, places: set[Any], stride: int = 1, event: str = "call") -> list[str]:
    """Send Ctrl-C at every `stride`-th call of the story's interrupted part; return the faults found afterwards."""
    faults: list[str] = []
    plain, names = gradients_of_a_plain_model(), namespace()
    wanted = [ends(case, story, interrupted) for interrupted in (False, True)]
    wanted += [ends(case, Story(between, lambda t: None), True) for between in story.between]
    training = case.make()
    story.before(training)
    calls = Interrupt(event=event)(lambda: story.interrupted(training)).count
    for at in range(stride, calls + 1, stride):
        amp.restore()
        training = case.make()
        story.before(training)
        before = surroundings()
        raised = Interrupt(at, event)(lambda: story.interrupted(training))  # noqa: B023

        def note(fault: str) -> None:
            faults.append(f"{at}: {fault}: {spoken(raised.place)}")  # noqa: B023

        if raised.place[:2] in places and not torch.is_grad_enabled():
            torch.set_grad_enabled(True)
        if thread_state.this_thread.stack and thread_state.this_thread.stack[-1].region.call is not None:
            with regions.region(None):  # nothing is cast after a step that was left, until the next region of ours
                pass
        now = surroundings()
        for name, value in before.items():
            if now[name] != value:
                note(f"{name}: {now[name]}")
        try:
            story.after(training)
            if not legal(training.weights(), wanted, story.parts):
                note(f"weights {training.weights()}")
            amp.restore()
        except Exception as other:
            note(repr(other))
        if namespace() != names:
            note("names of torch's")
        if not all(map(torch.equal, gradients_of_a_plain_model(), plain)):
            note("a plain model's gradients")
        _force()
    return faults


def _force() -> None:
    """Keep one fault from being blamed on the calls that come after it."""
    while topmost_hooks() is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    torch.set_grad_enabled(True)
    thread_state.this_thread.stack.clear()
    thread_state.this_thread.uncastable_entries = []
    casts_state.overrides.clear()
    casts_state.state().leave()
    model_state.running.policy = None


SWEEPS = [
    (case, name) for case in CASES for name in STORIES if name == "iteration" or case in (CASES[0], CASES[3], CASES[5])
]


@pytest.fixture(autouse=True)
def states_are_large(monkeypatch):
    monkeypatch.setattr(coded_state, "LEAST", 1)


@pytest.fixture(autouse=True)
def modules_hold_nothing(monkeypatch):
    """Keep `initialize`, which is called thousands of times here, from searching the names of all modules."""
    monkeypatch.setattr(held_names, "replace_in_modules", lambda patches, replaced: None)


@pytest.fixture(scope="module")
def places() -> set[Any]:
    """Return the calls at which an interrupt of torch itself leaves grad mode off; that check skips them."""
    found = left_without_grad_mode_by_torch()
    assert {place[0].co_filename.rsplit("/", 1)[-1] for place in found} <= {"grad_mode.py", "decorators.py"}
    return found


@pytest.mark.parametrize("case", [CASES[2], CASES[3], CASES[5]], ids=str)
def test_an_interrupt_at_some_calls_of_an_iteration_leaves_everything_right(case, places):
    with wrapper_backends.use_backend(case.wrappers):
        assert sweep(case, STORIES["iteration"], places, stride=23) == []


def consistent(training: Training) -> None:
    """Every weight is its master, rounded."""
    masters = amp.master_params(training.optimizer)
    assert all(torch.equal(p, m.to(p.dtype)) for p, m in zip(training.model.parameters(), masters, strict=True))


# Any code of torch's may be interrupted between two portions: what was stepped stays so, and nothing is stepped twice.
IN_PORTIONS = Story(
    lambda t: t.optimizer.step(),
    lambda t: (t.optimizer.step(), consistent(t)),
    lambda t: t.backward("first"),
    parts=True,
    between=(lambda t: None,),  # the gradients were dropped
)


@pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("event", ["call", pytest.param("c_return", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", [CASES[2], CASES[5]], ids=str)
def test_an_interrupt_of_a_step_in_portions_leaves_each_parameter_stepped_or_not(case, event, stride, monkeypatch):
    monkeypatch.delitem(one_pass.KERNELS, torch.optim.SGD)
    monkeypatch.setattr(portions, "PORTION", 1)
    monkeypatch.setattr(generated_class, "_classes", WeakValueDictionary())
    larger = nn.Sequential(*network(), nn.Linear(3, 3))
    monkeypatch.setattr(sys.modules[__name__], "network", lambda: copy.deepcopy(larger))
    Training("O2").iteration("first")  # the trial is made
    amp.restore()
    places = left_without_grad_mode_by_torch(event)
    assert sweep(case, IN_PORTIONS, places, stride=stride, event=event) == []


def test_an_interrupt_at_many_calls_of_a_first_forward_leaves_everything_right(places):
    story = Story(lambda t: t.loss("first"), lambda t: t.iteration("second"))
    assert sweep(CASES[2], story, places, stride=3) == []


# If the interrupt prevents the second backward, its gradients stay scaled, and the story clips them.
@pytest.mark.filterwarnings("ignore:clipping. called after scale_loss")
@pytest.mark.slow
@pytest.mark.parametrize(("case", "name"), SWEEPS, ids=str)
def test_an_interrupt_at_any_call_of_an_iteration_leaves_everything_right(case, name, places):
    with wrapper_backends.use_backend(case.wrappers):
        assert sweep(case, STORIES[name], places) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_interrupt_after_any_call_into_c_leaves_everything_right(case):
    places = left_without_grad_mode_by_torch("c_return")
    with wrapper_backends.use_backend(case.wrappers):
        assert sweep(case, STORIES["iteration"], places, event="c_return") == []
