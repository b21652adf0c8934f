"""The order of one step among users' hooks, which is a contract: hooks see gradients unscaled and weights published."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from crossed import crossed
from small_trainings import backward_row
from torch import nn
from torch._dynamo.testing import CompileCounter
from training import linear

from amp_patch import amp


class Foreign(torch.optim.Optimizer):
    """An optimizer of no library that we know."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"])
        return loss


class Child(Foreign):
    """A step that calls its parent's, as subclasses of torch's optimizers do."""

    def step(self, closure=None):
        return super().step(closure)


class WithoutHooks:
    """An optimizer that is not torch's: no hooks, no base class."""

    def __init__(self, params, lr):
        self.param_groups = [{"params": list(params), "lr": lr}]
        self.state = {}

    step = Foreign.step

    def zero_grad(self):
        for param in self.param_groups[0]["params"]:
            param.grad = None


MAKES = {"one pass": torch.optim.SGD, "portions": torch.optim.ASGD, "foreign": Foreign, "child": Child}
LEVELS = {
    "O1": {"opt_level": "O1", "loss_scale": 64.0},
    "O2": {"opt_level": "O2", "loss_scale": 64.0},
    "O5": {"opt_level": "O5", "loss_scale": 64.0},
    "split": {"opt_level": "O5", "master_weights": "split", "loss_scale": 64.0},
    "stochastic": {"opt_level": "O5", "master_weights": "stochastic", "loss_scale": 64.0},
}
KINDS = pytest.mark.parametrize("make", MAKES.values(), ids=list(MAKES))
AT_LEVELS = pytest.mark.parametrize("level", LEVELS.values(), ids=list(LEVELS))
REGISTERED = pytest.mark.parametrize("registered", ["before", "after"])


def start_observed(make, level, registered="after", pre=None, post=None):
    """Return a training with the gradients [4, -4], whose step changes the weights [1, 2] to [-1, 4]."""
    model = linear([[1.0, 2.0]])
    optimizer = make(model.parameters(), lr=0.5)

    def register():
        if pre is not None:
            optimizer.register_step_pre_hook(pre)
        if post is not None:
            optimizer.register_step_post_hook(post)

    if registered == "before":
        register()
    model, optimizer = amp.initialize(model, optimizer, verbosity=0, **level)
    if registered == "after":
        register()
    return model, optimizer


def backward_observed(model, optimizer, value=4.0, **options):
    backward_row(model, optimizer, gradient=(value, -value), **options)


def parameters_of_groups(optimizer):
    return [master for group in optimizer.param_groups for master in group["params"]]


@crossed({"delay": [False, True]}, KINDS, AT_LEVELS, REGISTERED)
def test_pre_hooks_find_unscaled_gradients(make, level, registered, delay):
    seen = []
    model, optimizer = start_observed(
        make, level, registered, pre=lambda o, *_: seen.append(parameters_of_groups(o)[0].grad.tolist())
    )
    backward_observed(model, optimizer, delay_unscale=delay)
    optimizer.step()
    assert seen[0] == [[4.0, -4.0]]


@crossed(KINDS, AT_LEVELS, REGISTERED)
def test_post_hooks_find_published_weights(make, level, registered):
    seen, held = [], []
    model, optimizer = start_observed(make, level, registered, post=lambda *_: seen.append(held[0].weight.tolist()))
    held.append(model)
    backward_observed(model, optimizer)
    optimizer.step()
    wanted = [[-1.0, 4.0]]
    assert model.weight.tolist() == wanted if make is not torch.optim.ASGD else model.weight.tolist() != [[1.0, 2.0]]
    assert seen[-1] == model.weight.tolist()


@crossed(KINDS, AT_LEVELS, REGISTERED)
@torch.no_grad()
def test_the_step_begins_from_what_a_pre_hook_has_written(make, level, registered):
    def write(optimizer, *_):
        for master in parameters_of_groups(optimizer):
            master.zero_()

    model, optimizer = start_observed(make, level, registered, pre=write)
    with torch.enable_grad():
        backward_observed(model, optimizer)
    optimizer.step()
    if make in (torch.optim.SGD, Foreign):
        assert model.weight.tolist() == [[-2.0, 2.0]]
    first, second = parameters_of_groups(optimizer)[0].tolist()[0]
    assert first == -second != 0.0


@crossed(KINDS, AT_LEVELS, REGISTERED)
def test_a_post_hook_s_writes_into_masters_are_in_the_model_after_the_step(make, level, registered):
    @torch.no_grad()
    def write(optimizer, *_):
        for master in parameters_of_groups(optimizer):
            master.fill_(0.25)

    model, optimizer = start_observed(make, level, registered, post=write)
    for _ in range(2):
        backward_observed(model, optimizer)
        optimizer.step()
        assert model.weight.tolist() == [[0.25, 0.25]]


@crossed(
    pytest.mark.parametrize("value", [4.0, math.inf], ids=["taken", "skipped"]),
    pytest.mark.parametrize(
        "make", [torch.optim.SGD, torch.optim.ASGD, Foreign], ids=["one pass", "portions", "foreign"]
    ),
    AT_LEVELS,
)
def test_hooks_run_once_around_each_step_taken_or_skipped(make, level, value):
    seen = []
    model, optimizer = start_observed(
        make, level, "before", lambda *_: seen.append("pre"), lambda *_: seen.append("post")
    )
    optimizer.register_step_pre_hook(lambda *_: seen.append("later pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("later post"))
    before = model.weight.tolist()
    backward_observed(model, optimizer, value)
    optimizer.step()
    assert seen == ["pre", "later pre", "post", "later post"]
    assert (model.weight.tolist() == before) is (value == math.inf)


@AT_LEVELS
@KINDS
def test_a_pre_hook_that_raises_leaves_the_gradients_for_the_next_step(make, level):
    failing = [True]

    def refuse(*_):
        if failing.pop():
            raise ValueError("not yet")

    model, optimizer = start_observed(make, level, pre=refuse)
    backward_observed(model, optimizer)
    with pytest.raises(ValueError, match="not yet"):
        optimizer.step()
    assert model.weight.tolist() == [[1.0, 2.0]]
    failing.extend([False, False, False])
    optimizer.step()
    assert model.weight.tolist() != [[1.0, 2.0]]


@AT_LEVELS
@KINDS
def test_a_post_hook_that_raises_comes_after_a_whole_step(make, level):
    def refuse(*_):
        raise ValueError("too late")

    model, optimizer = start_observed(make, level, post=refuse)
    backward_observed(model, optimizer)
    with pytest.raises(ValueError, match="too late"):
        optimizer.step()
    once = model.weight.tolist()
    assert once != [[1.0, 2.0]]
    optimizer._optimizer_step_post_hooks.clear()
    if make is torch.optim.SGD:  # a gradient that is left at O1 is stepped with again, as in plain torch
        assert level["opt_level"] == "O1" or (optimizer.step(), model.weight.tolist())[1] == once


@AT_LEVELS
def test_an_optimizer_without_hooks_steps_and_skips(level):
    model, optimizer = start_observed(WithoutHooks, level)
    for value, wanted in ((math.inf, [[1.0, 2.0]]), (4.0, [[-1.0, 4.0]])):
        optimizer.zero_grad()
        backward_observed(model, optimizer, value)
        optimizer.step()
        assert model.weight.tolist() == wanted


def captured(optimizer):
    return optimizer.step


def wrapped(optimizer):
    inner = optimizer.step
    optimizer.step = functools.wraps(inner)(lambda *args, **kwargs: inner(*args, **kwargs))
    return optimizer.step


def wrapped_for_a_scheduler(optimizer):
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return wrapped(optimizer)


def compiled(optimizer):
    return torch.compile(optimizer.step, backend="eager")


@crossed(KINDS, AT_LEVELS, {"capture": [captured, wrapped, wrapped_for_a_scheduler, compiled]})
def test_a_method_that_was_captured_before_initialize_steps_and_skips(make, level, capture):
    model = linear([[1.0, 2.0]])
    optimizer = make(model.parameters(), lr=0.5)
    step = capture(optimizer)
    model, optimizer = amp.initialize(model, optimizer, verbosity=0, **level)
    backward_observed(model, optimizer, math.inf)
    step()
    assert optimizer._amp_stash.step_skipped and model.weight.tolist() == [[1.0, 2.0]]
    optimizer.zero_grad()
    backward_observed(model, optimizer, delay_unscale=True)
    step()
    assert model.weight.tolist() != [[1.0, 2.0]] and model.weight.isfinite().all()
    assert make not in (torch.optim.SGD, Foreign) or model.weight.tolist() == [[-1.0, 4.0]]


@AT_LEVELS
def test_a_script_s_step_in_the_class_and_the_hooks_are_called_where_it_is_skipped(level, monkeypatch):
    seen = []
    model, optimizer = start_observed(
        torch.optim.SGD, level, "after", lambda *_: seen.append("pre"), lambda *_: seen.append("post")
    )
    original = torch.optim.SGD.step
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self, *args: (seen.append("script"), original(self, *args))[1])
    backward_observed(model, optimizer, math.inf)
    optimizer.step()
    assert seen == ["script", "pre", "post"] and model.weight.tolist() == [[1.0, 2.0]]


@KINDS
def test_a_closure_that_is_refused_leaves_delayed_gradients_as_they_are(make):
    model, optimizer = start_observed(make, LEVELS["O1"])
    backward_observed(model, optimizer, delay_unscale=True)
    with pytest.raises(RuntimeError, match="a closure computes new gradients"):
        optimizer.step(lambda: None)
    assert model.weight.grad.tolist() == [[256.0, -256.0]]
    optimizer.step()
    assert model.weight.tolist() != [[1.0, 2.0]]


@pytest.mark.filterwarnings("ignore:.torch.jit")  # torch's own, of what Dynamo imports
def test_the_step_of_an_optimizer_in_no_training_is_compiled():
    def frames():
        torch._dynamo.reset()
        param, counter = nn.Parameter(torch.ones(3)), CompileCounter()
        step = torch.compile(torch.optim.SGD([param], lr=0.5).step, backend=counter)
        for _ in range(2):
            param.grad = torch.ones(3)
            step()
        return counter.frame_count, counter.op_count, param.tolist()

    alone = frames()
    start_observed(torch.optim.SGD, LEVELS["O2"])
    assert frames() == alone and alone[0] > 0
