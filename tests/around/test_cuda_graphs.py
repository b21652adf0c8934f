"""Whole steps, and forwards with backwards, in CUDA graphs; conftest.py leaves this file out where there is no GPU."""

from __future__ import annotations

import pytest
import torch
import training
from captured_steps import LEVELS, MAKERS, SCALED, iteration, loss_and_gradients, start_capturable

from amp_patch import amp
from amp_patch.training.training import scalers_of

OVERFLOWS = range(7, 1000, 50)  # which of the steps


def run_on_gpu(maker, level, captured, replays=1000):
    """The weights after 20 steps, those after all, and the scale; of a graph, or of the loop that it holds."""
    model, optimizer = start_capturable(maker, level, "cuda")
    scalers_of(optimizer, "a test")[0].growth_interval = 30  # so that the scale rises between two overflows
    images, classes = (t.clone() for t in training.images(0, "cuda"))
    factor = torch.ones((), device="cuda")
    side = torch.cuda.Stream()  # as torch's documentation of CUDA graphs has it
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            iteration(model, optimizer, images, classes, factor)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph):
            iteration(model, optimizer, images, classes, factor)
    for index in range(replays):
        for target, value in zip((images, classes), training.images(index % 20, "cuda"), strict=True):
            target.copy_(value)
        factor.fill_(float("inf") if index in OVERFLOWS and level in SCALED else 1.0)
        if captured:
            graph.replay()
        else:
            iteration(model, optimizer, images, classes, factor)
        if index == 19:
            early = training.weights(model)
    return early, training.weights(model), amp.state_dict()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_a_thousand_replays_are_a_thousand_steps(maker, level):
    early, _, scales = run_on_gpu(maker, level, captured=False)
    early_too, late_too, scales_too = run_on_gpu(maker, level, captured=True)
    assert scales_too == scales
    for one, other in zip(early_too, early, strict=True):  # later cuBLAS's other choices in a capture have added up
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)
    assert all(bool(weight.isfinite().all()) for weight in late_too)
    assert not training.same(late_too, early_too)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_captured_forward_and_backward_follow_the_batch_and_the_weights(level):
    model, _ = start_capturable(MAKERS["FusedSGD"], level, "cuda")
    images, classes = (t.clone() for t in training.images(0, "cuda"))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            loss_and_gradients(model, images, classes)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = loss_and_gradients(model, images, classes)
    for index in range(1, 5):
        for target, value in zip((images, classes), training.images(index, "cuda"), strict=True):
            target.copy_(value)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(0.9)
        graph.replay()
        for one, other in zip(captured, loss_and_gradients(model, images, classes), strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("level", LEVELS)
def test_a_learning_rate_on_the_device_is_read_at_each_replay(level):
    lr = torch.tensor(0.01, device="cuda")
    model, optimizer = start_capturable(
        lambda params: torch.optim.AdamW(params, lr=lr, fused=True, capturable=True), level, "cuda"
    )
    batch, side = training.images(0, "cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            iteration(model, optimizer, *batch)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        iteration(model, optimizer, *batch)
    for rate in (0.0, 0.01):
        before = training.weights(model)
        lr.fill_(rate)
        graph.replay()
        assert training.same(before, training.weights(model)) is (rate == 0)
