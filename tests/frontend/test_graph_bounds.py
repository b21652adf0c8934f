"""Graphs: their use of torch.compile, and errors for wrong use."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from captured_steps import (
    LOW,
    F,
    Step,
    Sum,
    cleared_fixture,  # noqa: F401  the fixture `cleared`
    scaler_on,
)
from torch import Tensor
from torch._dynamo.utils import counters
from training import LEVELS, SGD, convnet, images, linear, same, weights

from amp_patch import amp
from amp_patch.graph import Graph

# ---------------------------------------------------------------------------------------------------------------------
# Compiled: one graph, none of whose breaks is ours.


def assert_one_graph(graph: Graph, calls: int = 4) -> None:
    for step in range(calls):
        graph(*images(step))
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.parametrize("dtype", LOW)
def test_the_native_form_is_one_graph(dtype):
    model = convnet()
    assert_one_graph(Step(model, SGD(model.parameters()), scaler=scaler_on("cpu"), dtype=dtype, fullgraph=True))


@pytest.mark.parametrize("level", LEVELS)
def test_each_level_is_one_graph(level):
    model = convnet()
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level=level, verbosity=0)
    assert_one_graph(Step(model, optimizer, fullgraph=True))


# ---------------------------------------------------------------------------------------------------------------------
# Bad use, by name.


def test_a_graph_that_never_calls_backward_is_refused_and_changes_nothing():
    class Silent(Step):
        def build(self, inputs: Tensor, targets: Tensor) -> Any:
            return F.cross_entropy(self.model(inputs), targets)

    model = linear([[1.0], [2.0]])
    graph = Silent(model, SGD(model.parameters()))
    with pytest.raises(RuntimeError, match=r"Silent_\d+: .* optimizer, but build calls no loss\.backward\(\)"):
        graph(torch.ones(1, 1), torch.zeros(1, dtype=torch.long))
    assert model.weight.tolist() == [[1.0], [2.0]]


def test_backward_without_an_optimizer_is_refused():
    graph = Step(convnet())
    with pytest.raises(RuntimeError, match=r"the graph has no optimizer; call self\.add_optimizer"):
        graph(*images(0))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda outputs: outputs.backward(), r"a tensor of shape \[8, 5\]; wanted a scalar"),
        (lambda outputs: outputs.backward(outputs), r"build calls backward\(gradient\)"),
        (lambda outputs: outputs.sum().backward(create_graph=True), r"build calls backward\(create_graph\)"),
        (lambda outputs: outputs.detach().sum().backward(), "a loss that requires no grad"),
    ],
    ids=["no scalar", "gradient", "create_graph", "no grad"],
)
def test_a_backward_that_cannot_be_is_refused(call, message):
    class Wrong(Step):
        def build(self, inputs: Tensor) -> Any:
            call(self.model(inputs))

    model = convnet()
    before = weights(model)[:2]
    graph = Wrong(model, SGD(model.parameters()))
    with pytest.raises(RuntimeError, match=message):
        graph(images(0)[0])
    assert same(before, weights(model)[:2])


def test_build_must_be_overridden_and_super_init_called():
    class Empty(Graph):
        pass

    class Headless(Graph):
        def __init__(self) -> None:
            self.model = convnet()

    with pytest.raises(NotImplementedError, match=r"Empty\.build must be overridden"):
        Empty()()
    for use in (Headless.__call__, lambda g: g.config, lambda g: g.add_optimizer(None)):
        with pytest.raises(RuntimeError, match=r"Headless: call super\(\).__init__\(\) first"):
            use(Headless())


def test_arguments_of_the_setup_are_checked_by_name():
    model = convnet()
    optimizer, other = SGD(model.parameters()), SGD(convnet().parameters())
    schedule = torch.optim.lr_scheduler.StepLR(other, 1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    graph = Step(model)
    for error, call, message in [
        (TypeError, lambda: graph.add_optimizer(model), "optim is a ConvNet; wanted a torch.optim.Optimizer"),
        (ValueError, lambda: graph.add_optimizer(torch.optim.LBFGS(model.parameters())), "LBFGS"),
        (TypeError, lambda: graph.add_optimizer(optimizer, lr_sch=0.1), "lr_sch is a float"),
        (ValueError, lambda: graph.add_optimizer(optimizer, lr_sch=schedule), "made for another optimizer"),
        (ValueError, lambda: graph.add_optimizer(optimizer, lr_sch=plateau), "ReduceLROnPlateau steps by a metric"),
        (TypeError, lambda: graph.set_grad_scaler(2.0**16), "grad_scaler is a float; wanted an amp.GradScaler"),
        (TypeError, lambda: graph.config.enable_amp(torch.float16), "mode is torch.float16"),
        (ValueError, lambda: graph.config.enable_amp(dtype=torch.float32), "dtype is torch.float32"),
        (ValueError, lambda: graph.config.set_gradient_accumulation_steps(0), "value is 0"),
        (AttributeError, lambda: graph.config.enable_zero(), "ZeroRedundancyOptimizer"),
        (NotImplementedError, lambda: graph.debug(1), "TORCH_LOGS=recompiles,graph_breaks"),
    ]:
        with pytest.raises(error, match=message):
            call()
    graph.add_optimizer(optimizer)
    with pytest.raises(ValueError, match="added before"):
        graph.add_optimizer(optimizer)


def test_the_setup_is_closed_by_the_first_call():
    model = convnet()
    optimizer = SGD(model.parameters())
    graph = Step(model, optimizer)
    graph.config.allow_fuse_add_to_output(True)
    graph(*images(0))
    assert graph.is_compiled
    for call in (
        lambda: graph.config.enable_amp(),
        lambda: graph.config.set_gradient_accumulation_steps(2),
        lambda: graph.config.compile(),
        lambda: graph.add_optimizer(SGD(convnet().parameters())),
        lambda: graph.set_grad_scaler(amp.GradScaler()),
    ):
        with pytest.raises(RuntimeError, match=r"Step_\d+ has been called already"):
            call()


class Fails(torch.optim.SGD):
    """Its first step is an exception."""

    fails = True

    def step(self, *args: Any) -> Any:
        if self.fails:
            self.fails = False
            raise MemoryError("the first step")
        return super().step(*args)


@pytest.mark.parametrize("kind", [amp.GradScaler, torch.amp.GradScaler])
def test_after_an_exception_in_a_step_gradients_are_unscaled_again(kind):
    model = linear([[1.0, 1.0]], "cpu")
    optimizer = Fails(model.parameters(), lr=1.0)
    graph = Sum(model, optimizer, scaler=kind("cpu", init_scale=4.0))
    for group in optimizer.param_groups:
        group["clip_grad_max_norm"] = 100.0
    with pytest.raises(MemoryError, match="the first step"):
        graph(torch.ones(1, 2))
    graph(torch.ones(1, 2))
    assert torch.equal(model.weight, torch.zeros(1, 2))


def test_a_copy_of_a_called_graph_trains_its_own_model():
    model = linear([[1.0, 1.0]], "cpu")
    graph = Sum(model, torch.optim.SGD(model.parameters(), lr=1.0))
    assert graph(torch.ones(1, 2)) == 2.0
    twin = copy.deepcopy(graph)
    assert [twin(torch.ones(1, 2)).item() for _ in range(2)] == [0.0, -2.0]
    assert torch.equal(twin.model.weight, torch.full((1, 2), -2.0))
    assert torch.equal(model.weight, torch.zeros(1, 2))
