"""A whole step in a CUDA graph: the host does nothing that a capture forbids. A CPU stands in for the GPU.

What a GPU then makes of it is in test_cuda_graphs.py.
"""

from __future__ import annotations

import captured_steps
import pytest
import torch
import training
from captured_steps import LEVELS, MAKERS, SCALED, iteration, start_capturable
from crossed import crossed
from split_masters import low_half
from syncs import CopiesToOrFrom, count

from amp_patch import amp, multi_tensor, optimizers
from amp_patch.masters.closed_master import ClosedMaster
from amp_patch.support import device_sync
from amp_patch.training import overflow, stash
from amp_patch.training.training import scalers_of


@pytest.fixture
def capturing(monkeypatch):
    """A stand-in for a capture: while it is set, a read of a value that is copied to the host fails."""
    state = {"on": False}

    class NoNumbers(stash.DeviceNumbers):
        def __init__(self, values):
            assert not state["on"], "an event and pinned memory in a capture"
            super().__init__(values)

        def here(self):
            assert not state["on"], "an event is asked in a capture"
            return super().here()

    monkeypatch.setattr(device_sync, "is_capturing", lambda: state["on"])
    monkeypatch.setattr(device_sync, "waits", lambda device: True)
    monkeypatch.setattr(stash, "DeviceNumbers", NoNumbers)
    return state


def persistent(model, optimizer):
    """What a graph reads and writes at each replay: where it lies."""
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    scaler = vars(scalers_of(optimizer, "a test")[0]).values()
    masters = [m if (half := low_half(m)) is None else half for m in amp.master_params(optimizer)]
    tensors = [*model.parameters(), *masters, *state, *scaler]
    return [t.data_ptr() for t in tensors if isinstance(t, torch.Tensor)]


@crossed({"maker": MAKERS, "level": LEVELS, "skipped_before": [False, True]})
def test_a_captured_step_asks_nothing_and_does_what_another_does(maker, level, skipped_before, capturing):
    results = []
    for captured in (False, True):
        model, optimizer = start_capturable(maker, level)
        capturing["on"] = False
        for index in range(3):
            bad = skipped_before and index == 2
            iteration(model, optimizer, *training.images(index), float("inf") if bad and level in SCALED else 1.0)
        assert training.skipped(optimizer) is (skipped_before and level in SCALED)
        capturing["on"] = captured
        before = persistent(model, optimizer)
        batch = training.images(7)
        asked = count("cpu", lambda m=model, o=optimizer, b=batch: iteration(m, o, *b))
        assert asked == 0 or not captured
        assert persistent(model, optimizer) == before
        if level in SCALED:
            iteration(model, optimizer, *batch, factor=float("inf"))
        assert "found_inf" not in vars(optimizer)
        capturing["on"] = False
        results.append([*training.weights(model), amp.state_dict()])
    (*eager, scales), (*graphed, scales_of_graph) = results
    assert training.same(eager, graphed) and scales == scales_of_graph


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_optimizers_that_cannot_skip_on_the_device_are_refused_by_name(level, capturing):
    model, optimizer = start_capturable(lambda params: torch.optim.SGD(params, lr=0.1), level)
    iteration(model, optimizer, *training.images(0))
    capturing["on"] = True
    with pytest.raises(RuntimeError, match=r"^SGD\.step: a CUDA graph is being captured.*fused=True, capturable=True"):
        iteration(model, optimizer, *training.images(1))
    capturing["on"] = False
    optimizer.zero_grad()
    iteration(model, optimizer, *training.images(1))


@pytest.mark.parametrize("name", ["FusedAdam", "FusedLAMB", "FusedMixedPrecisionLamb", "FusedNovoGrad"])
@pytest.mark.parametrize("level", ["O0", "O5", None])
def test_steps_that_the_host_counts_are_refused_by_name(name, level, capturing):
    model, optimizer = start_capturable(lambda params: getattr(optimizers, name)(params, lr=0.1), level or "O5")
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
    with pytest.raises(RuntimeError, match=rf"^{name}\.step: a CUDA graph is being captured.*AdamW\(.*capturable=True"):
        step(1)
    capturing["on"] = False
    assert training.same(before, training.weights(model))
    assert counted == [group["step"] for group in optimizer.param_groups]
    optimizer.zero_grad()
    step(1)
    assert not training.same(before, training.weights(model))


FIRST = MAKERS | {
    "torch's SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "torch's NAdam": lambda params: torch.optim.NAdam(params, lr=0.05),
}


@crossed({"maker": FIRST, "level": LEVELS}, meet=1)
def test_a_first_step_is_refused(maker, level, capturing):
    """Each replay would initialize the state again: SGD's momentum would become the gradient of the batch."""
    model, optimizer = start_capturable(maker, level)
    before = training.weights(model)
    capturing["on"] = True
    first = r"\.step: .* the first step of body\.0\.weight, .* let it take a step that is not skipped"
    with pytest.raises(RuntimeError, match=first):
        iteration(model, optimizer, *training.images(0))
    assert training.same(before, training.weights(model)) and not optimizer.state
    capturing["on"] = False
    optimizer.zero_grad()
    twin, its = start_capturable(maker, level)
    for _ in range(2):  # the second with the state of the first
        iteration(model, optimizer, *training.images(1))
        iteration(twin, its, *training.images(1))
    assert training.same(training.weights(model), training.weights(twin))


@pytest.mark.parametrize("level", LEVELS)
def test_a_first_loss_is_refused_where_its_scale_is_copied_to_the_device(level, capturing):
    _, optimizer = start_capturable(MAKERS["FusedSGD"], level)
    loss = torch.ones((), device="meta", requires_grad=True)
    capturing["on"] = True
    if level in SCALED:
        first = (
            r"^scale_loss: a CUDA graph is being captured, .* first loss on meta: .* run an iteration with scale_loss"
        )
        with pytest.raises(RuntimeError, match=first), amp.scale_loss(loss, optimizer):
            pass
        capturing["on"] = False
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled.device.type == "meta" and (scaled is loss) is (level not in SCALED)
        scaled.sum().backward()


@pytest.mark.parametrize("level", LEVELS)
def test_a_learning_rate_of_the_host_that_a_scheduler_moves_is_named(level, capturing):
    def captured(lr):
        model, optimizer = start_capturable(
            lambda params: torch.optim.AdamW(params, lr=lr, fused=True, capturable=True), level
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        iteration(model, optimizer, *training.images(0))
        scheduler.step()
        capturing["on"] = True
        try:
            iteration(model, optimizer, *training.images(1))
        finally:
            capturing["on"] = False

    named = r"^AdamW\.step: .* the learning rate of group 0, .* every replay uses its current value, 0\.005; "
    with pytest.warns(UserWarning, match=named) as warned:
        captured(0.01)
    assert [warning.filename for warning in warned] == [captured_steps.__file__]
    captured(torch.tensor(0.01))  # of the device, which `capturing` says the CPU is


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_is_copied_between_host_and_device(level, capturing, monkeypatch):
    """A copy from pageable host memory syncs, and cannot be captured. The device "meta" stands in for the GPU."""
    for kernel in ("_fused_sgd_", "_fused_adam_", "_fused_adamw_"):  # torch has none of these for meta tensors
        monkeypatch.setattr(torch, kernel, lambda *lists, **options: None)
    model, optimizer = start_capturable(MAKERS["FusedSGD"], level, "meta")
    batch = [tensor.to("meta") for tensor in training.images(0)]
    with monkeypatch.context() as patch:  # a meta tensor has no flag to be read
        patch.setattr(overflow, "read_found", lambda stash: [])
        iteration(model, optimizer, *batch)
    capturing["on"] = True
    with CopiesToOrFrom("meta") as copies:
        iteration(model, optimizer, *batch)
    assert not copies.counts


# ---------------------------------------------------------------------------------------------------------------------
# Split masters


def start_split(maker="FusedSGD"):
    model, optimizer = start_capturable(MAKERS[maker], "O5, split")
    iteration(model, optimizer, *training.images(0))
    return model, optimizer


def replay(model, optimizer):
    """1 off the masters by a kernel on the halves, of which Python hears nothing. The masters, and what they are."""
    params, masters = list(model.parameters()), list(amp.master_params(optimizer))
    split = [(p, m, half) for p, m in zip(params, masters, strict=True) if (half := low_half(m)) is not None]
    weights, halves = [p for p, _, _ in split], [half for _, _, half in split]
    before = [torch.empty_like(p, dtype=torch.float32) for p in weights]
    multi_tensor.multi_tensor_join(weights, halves, before)
    ones = [torch.ones_like(value) for value in before]
    with torch.no_grad():
        multi_tensor.multi_tensor_sgd(
            ones, halves, None, weights, lr=1.0, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False
        )
    return [m for _, m, _ in split], [value - 1 for value in before]


def test_masters_that_are_read_between_replays_have_the_values_of_the_last_one():
    model, optimizer = start_split()
    held = None
    for _ in range(3):
        sum(master.sum() for master in amp.master_params(optimizer))
        masters, wanted = replay(model, optimizer)
        assert training.same(masters, wanted)
        held = held or [master.detach() for master in masters]
        assert training.same(held, wanted)
        assert training.same([m.clone() for m in masters], wanted)
    del held
    masters, wanted = replay(model, optimizer)
    model.state_dict()
    assert training.same(masters, wanted)
    masters, wanted = replay(model, optimizer)
    amp.restore()
    assert all(any(torch.equal(p, value) for p in model.parameters()) for value in wanted)


def test_a_capture_neither_keeps_nor_writes_memory_that_was_there_before(capturing):
    model, optimizer = start_split()
    masters, wanted = replay(model, optimizer)
    held = [master.detach() for master in masters]
    outside = [master.data_ptr() for master in held]
    capturing["on"] = True
    iteration(model, optimizer, *training.images(1))
    assert training.same(held, wanted)
    inside = [master.detach().data_ptr() for master in masters]
    assert not set(outside) & set(inside)
    capturing["on"] = False
    iteration(model, optimizer, *training.images(2))
    masters, wanted = replay(model, optimizer)
    assert training.same(masters, wanted)


def test_masters_that_wait_to_be_split_are_not_captured(capturing):
    model, optimizer = start_split("torch's fused AdamW")
    with torch.no_grad():
        next(amp.master_params(optimizer)).mul_(2)
    capturing["on"] = True
    with pytest.raises(RuntimeError, match="was written before the capture of a CUDA graph began"):
        model(training.images(1)[0])
    capturing["on"] = False
    model(training.images(1)[0])
    capturing["on"] = True
    iteration(model, optimizer, *training.images(1))


def test_memory_waits_for_the_stream_that_uses_it(monkeypatch):
    model, optimizer = start_split()
    first = next(amp.master_params(optimizer))
    said = []

    def record(self, stream):
        with torch._C.DisableTorchFunctionSubclass():
            said.append((stream, self.untyped_storage().nbytes() > 0))

    current = {"stream": "side"}
    monkeypatch.setattr(ClosedMaster, "is_cuda", True, raising=False)
    monkeypatch.setattr(ClosedMaster, "record_stream", record, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current["stream"])
    first.sum()
    assert said == [("side", True)]
    current["stream"] = "main"
    iteration(model, optimizer, *training.images(1))
    assert said[-1] == ("main", True) and not first.is_open
