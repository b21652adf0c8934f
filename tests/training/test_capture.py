"""A whole step in a CUDA graph, as far as the host can be seen to keep still: a CPU acts the device that captures.

What a GPU then makes of it is in test_cuda_graphs.py.
"""

from __future__ import annotations

import logging

import pytest
import torch
import training
from captured_steps import LEVELS, MAKERS, iteration, start
from syncs import CopiesToOrFrom, count

from amp_patch import amp, optimizers
from amp_patch.support import capture
from amp_patch.training import overflow, stash


@pytest.fixture
def capturing(monkeypatch):
    """While set, a CUDA graph is being captured, and nobody may ask for what travels to the host."""
    state = {"on": False}

    class NoNumbers(stash.DeviceNumbers):
        def __init__(self, values):
            assert not state["on"], "an event and pinned memory in a capture"
            super().__init__(values)

        def here(self):
            assert not state["on"], "an event is asked in a capture"
            return super().here()

    monkeypatch.setattr(capture, "is_capturing", lambda: state["on"])
    monkeypatch.setattr(overflow, "waits", lambda device: True)
    monkeypatch.setattr(stash, "DeviceNumbers", NoNumbers)
    return state


def persistent(model, optimizer):
    """What a graph reads and writes at each replay: where it lies."""
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    scaler = vars(optimizer._amp_stash.scalers[0]).values()
    tensors = [*model.parameters(), *amp.master_params(optimizer), *state, *scaler]
    return [t.data_ptr() for t in tensors if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("skipped_before", [False, True])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_a_captured_step_asks_nothing_and_does_what_another_does(maker, level, skipped_before, capturing):
    results = []
    for captured in (False, True):
        model, optimizer = start(maker, level)
        capturing["on"] = False
        for index in range(3):
            bad = skipped_before and index == 2
            iteration(model, optimizer, *training.images(index), float("inf") if bad and level != "O5" else 1.0)
        assert optimizer._amp_stash.step_skipped is (skipped_before and level != "O5")
        capturing["on"] = captured
        before = persistent(model, optimizer)
        batch = training.images(7)
        asked = count("cpu", lambda m=model, o=optimizer, b=batch: iteration(m, o, *b))
        assert asked == 0 or not captured
        assert persistent(model, optimizer) == before
        if level != "O5":
            iteration(model, optimizer, *batch, factor=float("inf"))
        assert "found_inf" not in vars(optimizer)
        capturing["on"] = False
        results.append([*training.weights(model), amp.state_dict()])
    (*eager, scales), (*graphed, scales_of_graph) = results
    assert training.same(eager, graphed) and scales == scales_of_graph


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_cannot_skip_by_itself_is_refused_by_name(level, capturing):
    model, optimizer = start(lambda params: torch.optim.SGD(params, lr=0.1), level)
    iteration(model, optimizer, *training.images(0))
    capturing["on"] = True
    with pytest.raises(RuntimeError, match=r"^SGD\.step: a CUDA graph is being captured.*fused=True, capturable=True"):
        iteration(model, optimizer, *training.images(1))
    capturing["on"] = False
    optimizer.zero_grad()
    iteration(model, optimizer, *training.images(1))


@pytest.mark.parametrize("name", ["FusedAdam", "FusedLAMB", "FusedNovoGrad"])
@pytest.mark.parametrize("level", ["O0", "O5", None])
def test_steps_that_the_host_counts_are_refused_by_name(name, level, capturing):
    model, optimizer = start(lambda params: getattr(optimizers, name)(params, lr=0.1), level or "O5")
    if level is None:  # without amp
        model = torch.nn.Linear(4, 4)
        optimizer = getattr(optimizers, name)(model.parameters(), lr=0.1)

    def step(index):
        if level is None:
            model(torch.ones(2, 4) + index).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            iteration(model, optimizer, *training.images(index))

    step(0)
    before, counted = training.weights(model), [group["step"] for group in optimizer.param_groups]
    capturing["on"] = True
    with pytest.raises(
        RuntimeError, match=rf"^{name}\.step: a CUDA graph is being captured.*FusedAdam\(capturable=True"
    ):
        step(1)
    capturing["on"] = False
    assert training.same(before, training.weights(model))
    assert counted == [group["step"] for group in optimizer.param_groups]
    optimizer.zero_grad()
    step(1)
    assert not training.same(before, training.weights(model))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_first_step_is_refused(level, capturing):
    model, optimizer = start(MAKERS["FusedSGD"], level)
    capturing["on"] = True
    with pytest.raises(RuntimeError, match=r"^FusedSGD\.step: .* let it take a step that is not skipped"):
        iteration(model, optimizer, *training.images(0))


def test_verdicts_from_before_the_capture_are_heard_after_it(capturing, caplog):
    model, optimizer = start(MAKERS["FusedSGD"], "O2")
    optimizer._amp_stash.scalers[0].verbosity = 1
    iteration(model, optimizer, *training.images(0))
    with caplog.at_level(logging.WARNING, "amp_patch"):
        iteration(model, optimizer, *training.images(1), factor=float("inf"))
        capturing["on"] = True
        iteration(model, optimizer, *training.images(2))
        assert not caplog.records
        capturing["on"] = False
        assert optimizer._amp_stash.step_skipped
    assert "skip 1 of loss scaler 0" in caplog.text


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["FusedSGD", "FusedAdam", "FusedMixedPrecisionLamb"])
def test_nothing_is_copied_between_host_and_device(name, level, capturing, monkeypatch):
    """A copy from ordinary memory of the host waits for the device, and no graph can hold it; "meta" acts that."""
    for kernel in ("_fused_sgd_", "_fused_adam_", "_fused_adamw_"):  # torch has none of these for meta tensors
        monkeypatch.setattr(torch, kernel, lambda *lists, **options: None)
    model, optimizer = start(MAKERS[name], level, "meta")
    batch = [tensor.to("meta") for tensor in training.images(0)]
    with monkeypatch.context() as patch:  # a meta tensor has no flag to be read
        patch.setattr(overflow, "read_found", lambda stash: [])
        iteration(model, optimizer, *batch)
    capturing["on"] = True
    with CopiesToOrFrom("meta") as copies:
        iteration(model, optimizer, *batch)
    assert not copies.counts
