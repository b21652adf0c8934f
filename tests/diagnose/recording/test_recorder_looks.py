"""Inspected steps of a recording, and recordings of compiled models."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from apexed import apex_amp  # noqa: F401  the fixture `apex`
from recordings import (
    nothing_left_fixture,  # noqa: F401  the fixture `nothing_left`
    one_step,
    started,
)
from torch import nn
from training import SGD, backward, convnet, images, train

from amp_patch import amp
from amp_patch.diagnose.recording.run import PARTS


def test_looks_at_the_step_after_1_and_10():
    with amp.record(inspect=True) as run:
        model, optimizer = started("O2", lr=0.0)
        for _ in range(12):
            one_step(model, optimizer)
    assert [look.step for look in run.looks] == [1, 10] and run.notes == []
    assert [math.isnan(s) for s in run.seconds] == [step in (1, 10) for step in range(12)]
    assert all(math.isnan(run.parts[part][1]) and run.parts[part][2] >= 0 for part in PARTS)
    assert run.loss == [3.0] * 12
    look = run.looks[0]
    # The weights are 1 and 2, the gradients 1 and 1.
    assert look.counts["weights"] == {"zeros": 0, "not_finite": 0, "exponents": {"0": 1, "1": 1}}
    assert look.counts["gradients"] == {"zeros": 0, "not_finite": 0, "exponents": {"0": 2}}
    assert look.counts["activations"]["exponents"] == {"1": 1}
    assert look.scale == 1024.0 and look.best_scale == 2.0**15
    assert look.flushed == {"weight": [0.0, 0.0, 0.0]} and look.overflowed == {"weight": [0.0, 0.0, 0.0]}
    assert look.errors == {"": 0.0} and look.not_finite is None and look.keep_fp32 == []


def test_a_look_says_in_words_where_the_first_number_overflowed():
    with amp.record(inspect=True) as run:
        model, optimizer = started("O2", lr=0.0)
        one_step(model, optimizer)
        one_step(model, optimizer, inputs=[[60000.0, 60000.0]])
    assert "overflow" not in run.notes and "linear in the model itself" in run.looks[0].not_finite


class Passes(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def stack():
    return torch.overrides._get_current_function_mode_stack()


def test_no_look_begins_inside_of_a_mode_that_may_end_first():
    with amp.record(inspect=True) as run:
        model, optimizer = started()
        for _ in range(3):
            with Passes() as mine:
                one_step(model, optimizer)
                assert stack() == [mine]
            assert stack() == []
    assert run.looks == [] and len(run.notes) == 1 and "Passes" in run.notes[0]
    assert not any(map(math.isnan, run.seconds))


def test_a_recording_that_ends_during_a_look_ends_the_look():
    with amp.record(inspect=True) as run:
        model, optimizer = started()
        one_step(model, optimizer)
        assert stack()
    assert not stack() and run.looks == [] and run.steps == 1
    assert not model._forward_hooks


def test_an_inspection_that_cannot_be_is_a_note(monkeypatch):
    def refuse(*_):
        raise ValueError("inspect: this model is sharded")

    monkeypatch.setattr("amp_patch.support.distributed.refuse", refuse)
    with amp.record(inspect=True) as run:
        model, optimizer = started()
        for _ in range(2):
            one_step(model, optimizer)
    assert run.notes == ["inspect: this model is sharded"] and run.steps == 2


def compile_whole(model):
    return torch.compile(model, backend="eager", fullgraph=True)


def compile_in_place(model):
    model.compile(backend="eager", fullgraph=True)
    return model


def compile_wrapper(model):
    """A module that the model is in, as it is in DistributedDataParallel."""

    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model

        def forward(self, inputs):
            return self.net(inputs)

    return compile_whole(Wrapper())


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "make, when",
    [
        *itertools.product([compile_whole, compile_in_place], ["before initialize"]),
        *itertools.product(
            [compile_whole, compile_in_place, compile_wrapper], ["before the recording", "during the recording"]
        ),
    ],
)
def test_compiled_models_stay_one_graph_and_their_forwards_are_seen(make, when):
    model = convnet()
    if when == "before initialize":
        model = make(model)
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level="O5")
    net = make(model) if when == "before the recording" else model
    with amp.record() as run, amp.record() as other:
        net = make(model) if when == "during the recording" else net
        losses = train(net, optimizer, 2)
    assert run.loss == other.loss == losses and run.samples == other.samples == [8, 8]
    assert images(0)[0].shape[0] == 8
    for each in run, other:
        assert min(each.parts["forward"]) > 0 and len(each.parts["forward"]) == 2
    began = len(run.loss)
    train(net, optimizer, 1)
    assert len(run.loss) == began


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_model_that_is_not_trained_here_begins_nothing():
    class Brighter(nn.Module):
        def forward(self, inputs):
            return inputs + 1.0

    compiled, in_place = compile_whole(Brighter()), compile_in_place(Brighter())
    model = convnet()
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level="O0")
    with amp.record() as run:
        inputs, targets = images(0)
        in_place(compiled(inputs.repeat(2, 1, 1, 1)))
        loss = nn.functional.cross_entropy(model(inputs), targets)
        backward(loss, optimizer)
        optimizer.step()
    assert run.samples == [8]


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.usefixtures("fresh_compiler")
def test_after_a_recording_nothing_of_it_is_in_compiled_models():
    optimized = torch._dynamo.OptimizedModule
    before = optimized.__call__, nn.Module.compile
    model = compile_in_place(convnet())
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level="O5")
    compiled = model._compiled_call_impl
    with amp.record():
        assert model._compiled_call_impl is not compiled
        with amp.record():
            train(model, optimizer, 1)
        assert copy.deepcopy(model)._compiled_call_impl is None
        assert model._compiled_call_impl is not compiled
        assert (optimized.__call__, nn.Module.compile) != before
    assert model._compiled_call_impl is compiled
    assert (optimized.__call__, nn.Module.compile) == before


def test_an_optimizer_that_steps_no_more_gives_its_place_to_one_that_does():
    model = nn.Linear(2, 1)
    first, second = SGD(model.parameters()), SGD(model.parameters())
    model, (first, second) = amp.initialize(model, [first, second], opt_level="O0")
    with amp.record() as run:
        for optimizer in (first, *[second] * 110):
            backward(model(torch.ones(1, 2)).sum(), optimizer)
            optimizer.step()
    assert run.steps == 1 + 10, "from the hundred-and-first step on, each of the second's is one"
    assert repr(run) == f"Run(O0 seed 0: 11 steps, last loss {run.loss[-1]:.4g})"
