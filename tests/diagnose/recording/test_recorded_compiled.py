"""Recordings of compiled models."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from apexed import apex_amp  # noqa: F401  the fixture `apex`
from recordings import (
    nothing_left_fixture,  # noqa: F401  the fixture `nothing_left`
)
from torch import nn
from training import SGD, backward, convnet, images, train

from amp_patch import amp


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
