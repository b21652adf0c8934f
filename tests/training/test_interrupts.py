"""An exception at any call of an iteration, Ctrl-C above all: torch stays as it was, and the training goes on right."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType, SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import pytest
import torch
from conftest import WRAPPERS
from torch import Tensor, nn

from amp_patch import amp
from amp_patch.apex.amp import _forks
from amp_patch.apex.amp.opt import OptimWrapper
from amp_patch.casts import install, regions, thread_state
from amp_patch.casts import state as casts_state
from amp_patch.model import state as model_state
from amp_patch.support import generated_class
from amp_patch.training import known_optimizers, portions
from amp_patch.training.scaled_backward import ScaledBackward

INPUTS = {
    "first": torch.tensor([[1.0, 2.0, 0.0], [3.0, -1.0, 1.0]]),
    "second": torch.tensor([[2.0, -1.0, 1.0], [1.0, 1.0, -2.0]]),
    "overflows": torch.full((2, 3), 60000.0),
}
TARGETS = {
    "first": torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, -1.0]]),
    "second": torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 3.0]]),
    "overflows": torch.full((2, 3), -60000.0),
}


# ---------------------------------------------------------------------------------------------------------------------
# Raising at the n-th call.


class Raise:
    """Calls a function and raises `error` at its `at`-th call of a Python function, whoever's that is.

    "call" is where CPython notices a signal on entry; "c_return", the other event, where it does after a call into C.
    Of several such moments one raises: a second Ctrl-C within the cleaning up of the first is not promised anything.

    Meanwhile the garbage collector rests. It would close what earlier interrupts left behind at calls that are counted;
    and CPython 3.11, where one of these raises, goes on to call a profile function that it has freed.
    """

    def __init__(self, at: int = 0, error: type[BaseException] = KeyboardInterrupt, event: str = "call") -> None:
        self.at, self.error, self.event = at, error, event
        self.count = 0
        self.place: tuple[CodeType, ...] = ()  # where it raised, innermost first
        self.raised: BaseException | None = None

    def __call__(self, run: Callable[[], Any]) -> Raise:
        unraisable, sys.unraisablehook = sys.unraisablehook, lambda _: None  # what a generator's end swallows
        collects = gc.isenabled()
        gc.disable()
        try:
            sys.setprofile(self._look)
            run()
        except self.error as raised:
            self.raised = raised
        finally:
            sys.setprofile(None)
            sys.unraisablehook = unraisable
            if collects:
                gc.enable()
        assert self.raised is None or str(self.raised) == "here", self.raised
        return self

    def _look(self, frame: FrameType, event: str, _: Any) -> None:
        if event != self.event or frame.f_code is Raise.__call__.__code__:
            return
        self.count += 1
        if self.count == self.at:
            self.place = tuple(frame.f_code for frame in _outwards(frame))
            raise self.error("here")


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def spoken(place: Iterable[CodeType]) -> str:
    return " < ".join(f"{code.co_filename.rsplit('/', 1)[-1]}:{code.co_name}" for code in list(place)[:5])


# ---------------------------------------------------------------------------------------------------------------------
# What must be as it was.


def topmost_hooks() -> Any:
    """The innermost hooks for what autograd saves; None as well before torch 2.8, which does not tell."""
    topmost = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return None if topmost is None else topmost(False)


def surroundings() -> dict[str, Any]:
    """What an iteration changes while it runs, torch's and ours, on this thread and in the process."""
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "torch.autocast": [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")],
        "torch.autocast's depth": thread_state.native_depth(),
        "saved-tensor hooks": topmost_hooks(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "default type": torch.get_default_dtype(),
        "regions": [entry.region for entry in thread_state.this_thread.stack],
        "uncastable entries": len(thread_state.this_thread.uncastable_entries),
        "overrides": len(casts_state.overrides),
        "running model": model_state.running.policy,
        "casts": casts_state.current(),
    }


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


def network() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.LayerNorm(3))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 0.5, 0.0], [0.25, -1.0, 2.0], [1.0, 1.0, 1.0]]))
    return model


def sgd(model: nn.Module) -> torch.optim.SGD:
    """One call into C changes all weights: torch's own step is taken or not, wherever it is interrupted."""
    return torch.optim.SGD(model.parameters(), lr=0.5, foreach=True)


class Training:
    """A model and its optimizer at a level."""

    def __init__(self, level: str, **options: Any) -> None:
        self.model = network()
        self.optimizer = sgd(self.model)
        if level not in ("O0", "O3"):
            options["keep_fp32"] = nn.LayerNorm  # at O3 torch's step would be one call for each type
        if level in ("O1", "O2", "O3"):
            options.setdefault("loss_scale", 128.0)
        amp.initialize(self.model, self.optimizer, opt_level=level, verbosity=0, **options)

    def loss(self, batch: str) -> Tensor:
        return nn.functional.mse_loss(self.model(INPUTS[batch]), TARGETS[batch])

    def backward(self, batch: str, **options: Any) -> None:
        with amp.scale_loss(self.loss(batch), self.optimizer, **options) as scaled_loss:
            scaled_loss.backward()

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(amp.master_params(self.optimizer), 1e4)
        self.optimizer.step()

    def iteration(self, batch: str) -> None:
        self.optimizer.zero_grad()
        self.backward(batch)
        self.step()

    def weights(self) -> list[Tensor]:
        """Those that the optimizer updates, and the model's own."""
        params = [*amp.master_params(self.optimizer), *self.model.parameters()]
        return [param.detach().clone() for param in params]


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
    *(Case(level, FIRST, {"cpu_fp16": way}) for level in ("O1", "O2", "O3") for way in ("emulate", "native")),
    *(Case("O1", wrappers, {"cpu_fp16": "emulate"}) for wrappers in WRAPPERS[1:]),
    Case("O5", FIRST, {"master_weights": "split"}),
]


# ---------------------------------------------------------------------------------------------------------------------
# The sweep.


def left_without_grad_mode_by_torch(event: str = "call") -> set[tuple[CodeType, ...]]:
    """Where a plain training of torch's, without amp_patch, is left with grad mode off for good by an interrupt."""

    def train(model: nn.Module, optimizer: Any) -> None:
        model(INPUTS["first"]).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e4)
        optimizer.step()

    model = network()
    optimizer = sgd(model)
    train(model, optimizer)  # what is imported at first use is no part of this
    places = set()
    for at in range(1, Raise(event=event)(lambda: train(model, optimizer)).count + 1):
        raised = Raise(at, event=event)(lambda: train(model, optimizer))
        if not torch.is_grad_enabled():
            torch.set_grad_enabled(True)
            places.add(raised.place[:2])
    return places


def ends(case: Case, story: Story, interrupted: bool) -> list[Tensor]:
    """The weights that the story comes to, with the part that is to be interrupted, or without it."""
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


def sweep(
    case: Case, story: Story, places: set[Any], error: type[BaseException], stride: int = 1, event: str = "call"
) -> list[str]:
    """What is wrong after an `error` at every `stride`-th call of the story's interrupted part."""
    faults: list[str] = []
    plain, names = gradients_of_a_plain_model(), namespace()
    wanted = [ends(case, story, interrupted) for interrupted in (False, True)]
    wanted += [ends(case, Story(between, lambda t: None), True) for between in story.between]
    training = case.make()
    story.before(training)
    calls = Raise(event=event)(lambda: story.interrupted(training)).count
    for at in range(stride, calls + 1, stride):
        amp.restore()
        training = case.make()
        story.before(training)
        before = surroundings()
        raised = Raise(at, error, event)(lambda: story.interrupted(training))  # noqa: B023

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


ERRORS = (KeyboardInterrupt, ValueError)
SWEEPS = [
    (case, name) for case in CASES for name in STORIES if name == "iteration" or case in (CASES[0], CASES[3], CASES[5])
]


@pytest.fixture(scope="module")
def places() -> set[Any]:
    """Torch's own fault: these calls are left out where grad mode is looked at."""
    found = left_without_grad_mode_by_torch()
    assert {place[0].co_filename.rsplit("/", 1)[-1] for place in found} <= {"grad_mode.py", "decorators.py"}
    return found


@pytest.mark.parametrize("case", [CASES[2], CASES[3], CASES[5]], ids=str)
def test_an_interrupt_at_some_calls_of_an_iteration_leaves_everything_right(case, places):
    with install.use_backend(case.wrappers):
        assert sweep(case, STORIES["iteration"], places, KeyboardInterrupt, stride=23) == []


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
    monkeypatch.delitem(known_optimizers.KERNELS, torch.optim.SGD)
    monkeypatch.setattr(portions, "PORTION", 1)
    monkeypatch.setattr(generated_class, "_classes", WeakValueDictionary())
    larger = nn.Sequential(*network(), nn.Linear(3, 3))
    monkeypatch.setattr(sys.modules[__name__], "network", lambda: copy.deepcopy(larger))
    Training("O2").iteration("first")  # the trial is made
    amp.restore()
    places = left_without_grad_mode_by_torch(event)
    assert sweep(case, IN_PORTIONS, places, KeyboardInterrupt, stride=stride, event=event) == []


def entry_of(function: Callable[..., Any], run: Callable[[], Any]) -> int:
    """At which call within `run` the function is called first."""
    seen: list[int] = []

    class Looks(Raise):
        def _look(self, frame: FrameType, event: str, argument: Any) -> None:
            super()._look(frame, event, argument)
            if event == "call" and frame.f_code is function.__code__:
                seen.append(self.count)

    Looks()(run)
    return seen[0]


@pytest.mark.parametrize("keeps_the_traceback", [False, True])
def test_ctrl_c_as_scale_loss_closes(keeps_the_traceback):
    training, before = Training("O2", cpu_fp16="emulate"), surroundings()
    training.iteration("first")  # what is imported at first use is no part of this
    at = entry_of(ScaledBackward.close, lambda: training.iteration("first"))
    raised = Raise(at)(lambda: training.iteration("second"))
    assert raised.place[0] is ScaledBackward.close.__code__
    if not keeps_the_traceback:  # as a notebook does
        raised.raised = None
    assert surroundings() == before
    training.iteration("second")


@pytest.mark.parametrize("around", ["OptimWrapper", "combine_ddp"])
def test_ctrl_c_as_what_apex_has_around_scale_loss_closes(around, monkeypatch):
    monkeypatch.setattr(_forks, "_average", lambda targets: None)  # which needs other processes
    training, before = Training("O2"), surroundings()
    handle = SimpleNamespace(is_active=lambda: True)

    def scaling(loss: Tensor) -> Any:
        if around == "OptimWrapper":
            return OptimWrapper(training.optimizer, handle, num_loss=1).scale_loss(loss)
        return _forks.averaged(amp.scale_loss(loss, training.optimizer), training.optimizer)

    def run() -> None:
        with scaling(training.loss("first")) as scaled_loss:
            scaled_loss.backward()

    for _ in range(2):  # a first backward leaves its gradients in low precision, a second adds to them
        run()
    leave = type(scaling(training.loss("first"))).__exit__
    raised = Raise(entry_of(leave, run))(run)
    assert raised.place[0] is leave.__code__
    assert surroundings() == before
    training.iteration("second")  # while the traceback is there


@pytest.mark.parametrize("keeps_the_traceback", [False, True])
def test_ctrl_c_at_the_exit_of_a_region_of_the_user(wrappers, keeps_the_traceback):
    region, before = amp.autocast("cpu", torch.float16), surroundings()

    def run() -> None:
        with region:
            torch.ones(2, 2) @ torch.ones(2, 2)

    run()
    at = entry_of(type(region).leave_block, run)
    raised = Raise(at)(run)
    assert raised.place[0] is type(region).leave_block.__code__
    if not keeps_the_traceback:
        raised.raised = None
    assert surroundings() == before
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize(("case", "name"), SWEEPS, ids=str)
def test_an_exception_at_any_call_of_an_iteration_leaves_everything_right(case, name, error, places):
    with install.use_backend(case.wrappers):
        assert sweep(case, STORIES[name], places, error) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_interrupt_after_any_call_into_c_leaves_everything_right(case):
    places = left_without_grad_mode_by_torch("c_return")
    with install.use_backend(case.wrappers):
        assert sweep(case, STORIES["iteration"], places, KeyboardInterrupt, event="c_return") == []
