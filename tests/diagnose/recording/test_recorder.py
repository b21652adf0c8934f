"""A recording has the figures of the training, does not change the training, and leaves no hooks."""

from __future__ import annotations

import math
import mmap
import sys
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from apexed import apex_amp  # noqa: F401  the fixture `apex`
from conftest import DEVICES
from recordings import (
    HALF,
    Clock,
    nothing_left_fixture,  # noqa: F401  the fixture `nothing_left`
    one_step,
    started,
)
from syncs import count
from torch import nn
from training import SGD, backward, linear

from amp_patch import amp
from amp_patch.diagnose.recording.run import PARTS


@pytest.mark.parametrize("device", DEVICES)
def test_losses_scales_skips_and_samples_equal_the_training_s(device):
    with amp.record() as run:
        model, optimizer = started(lr=0.0, device=device)
        one_step(model, optimizer)
        one_step(model, optimizer, inputs=((2.0, 2.0), (2.0, 2.0), (0.0, 0.0)), factor=2.0)
        one_step(model, optimizer, factor=2.0**9)  # 2**9 * 2**10 overflows: the scale is halved
        one_step(model, optimizer, factor=2.0**-4)
    assert run.level == "O2" and run.dtype == "float16" and run.device == device and run.policy.startswith("O2 (")
    assert run.loss == [3.0, 24.0, 1536.0, 0.1875]
    assert run.scale == [1024.0, 1024.0, 1024.0, 512.0]
    assert run.skipped == [False, False, True, False]
    assert run.samples == [1, 3, 1, 1]
    assert run.error is None and run.notes == []
    assert all(map(math.isfinite, run.seconds)) and min(run.parts["optimizer"]) > 0
    assert run.seconds == [sum(run.parts[part][step] for part in PARTS) for step in range(4)]


@pytest.mark.filterwarnings("ignore:initialize. eps=:UserWarning")
@pytest.mark.parametrize(("level", "eps", "lost"), [("O3", 1e-8, 1e-8), ("O3", 1e-4, None), ("O2", 1e-8, None)])
def test_an_eps_that_is_0_in_the_type_of_the_weights_gives_a_note(level, eps, lost):
    net = nn.Linear(2, 1)
    with amp.record() as run:
        amp.initialize(net, torch.optim.Adam(net.parameters(), eps=eps), opt_level=level, verbosity=0)
    assert run.lost_eps == lost


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_recording_a_step_does_not_wait_for_the_device(level, device):
    waits = []
    for recorded in (False, True):
        with amp.record() if recorded else nullcontext():
            model, optimizer = started(level, device=device)
            inputs = torch.ones(1, 2, device=device)
            counts = []
            for _ in range(3):
                loss = model(inputs).sum()
                counts.append(count(device, partial(backward, loss, optimizer)))
                counts.append(count(device, optimizer.step))
                amp.log(loss=loss)
        waits.append(counts)
    assert waits[0] == waits[1]


def test_a_skip_on_the_device_is_recorded(monkeypatch):
    # As if the CPU were a device to wait for.
    monkeypatch.setattr("amp_patch.support.device_sync.waits", lambda device: True)
    arrived = False
    monkeypatch.setattr("amp_patch.support.device_sync.DeviceNumbers.here", lambda self: arrived)
    with amp.record() as run:
        model, optimizer = started(optimizer=lambda params: torch.optim.SGD(params, lr=0.0, fused=True))
        for step in range(4):
            one_step(model, optimizer, factor=2.0**9 if step == 2 else 1.0)
        arrived = True
        one_step(model, optimizer)
    assert run.skipped == [False, False, True, False, False]


def test_the_loss_is_the_one_at_scale_loss_though_it_is_changed_later():
    with amp.record() as run:
        model, optimizer = started("O0")
        loss = model(torch.ones(1, 2)).sum()
        backward(loss, optimizer)
        with torch.no_grad():
            loss.zero_()
        optimizer.step()
        with amp.scale_loss(model(torch.ones(2, 2)) * torch.tensor([[1.0], [3.0]]), optimizer) as scaled_loss:
            scaled_loss.sum().backward()
        optimizer.step()
    assert run.loss[0] == 3.0
    assert run.loss[1] == pytest.approx(6.0)  # of several numbers their mean


def test_micro_batches_are_averaged_and_losses_added():
    with amp.record() as run:
        model, optimizer = started(num_losses=2, lr=0.0)
        for inputs in ([[1.0, 1.0]], [[2.0, 2.0], [1.0, 0.0]]):
            backward(model(torch.tensor(inputs)).sum(), optimizer)
        backward(16 * model(torch.ones(5, 2))[0].sum(), optimizer, loss_id=1)
        optimizer.step()
    assert run.loss == [(3 + 7) / 2 + 48]
    assert run.samples == [5]  # of the loss with most of them: 1 + 2, and 5


def test_a_step_of_a_gan_is_one_of_the_optimizer_that_stepped_first():
    with amp.record() as run:
        critic, maker = linear([[1.0, 1.0]]), linear([[2.0]] * 2)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.0) for m in (critic, maker)]
        (critic, maker), optimizers = amp.initialize([critic, maker], optimizers, opt_level="O2", verbosity=0)
        for step in range(3):
            for _ in range(2):
                loss = critic(torch.ones(4, 2)).sum() + critic(maker(torch.ones(4, 1)).detach()).sum()
                backward(loss, optimizers[0])
                optimizers[0].step()
            backward(critic(maker(torch.ones(4, 1))).sum() * (step + 1), optimizers[1])
            optimizers[1].step()
    # A maker's step belongs to the critic's that follows it.
    assert run.loss == [24.0, 24.0, 24.0 + 16.0, 24.0, 24.0 + 32.0, 24.0]
    assert run.samples == [4] * 6
    assert run.weights == (2 + 2) * 2 and run.masters == (2 + 2) * 4


class SlowLinear(nn.Linear):
    clock = None

    def forward(self, inputs):
        self.clock.wait(2.0)
        return super().forward(inputs)


class SlowSGD(torch.optim.SGD):
    clock = None

    def step(self, closure=None):
        self.clock.wait(16.0)
        return super().step(closure)


@pytest.fixture
def slow(monkeypatch):
    clock = Clock(monkeypatch)
    monkeypatch.setattr(SlowLinear, "clock", clock)
    monkeypatch.setattr(SlowSGD, "clock", clock)
    model = SlowLinear(2, 1)
    return clock, model, SlowSGD(model.parameters(), lr=0.1)


def scaled_backward(clock, loss, optimizer):
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        clock.wait(8.0)
        scaled_loss.backward()


def test_the_parts_of_a_step_are_its_times_and_add_up(slow):
    clock, model, optimizer = slow
    with amp.record() as run:
        clock.wait(1000.0)  # before the training is none of it
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale=8.0, verbosity=0)
        for step in range(2):
            clock.wait(1.0)
            with torch.no_grad():
                model(torch.ones(1, 2))  # an evaluation
            loss = model(torch.ones(3, 2)).sum()
            clock.wait(4.0)
            scaled_backward(clock, loss, optimizer)
            clock.wait(32.0 * (1 + step))
            optimizer.step()
    assert run.parts == {
        "data": [1.0 + 2.0] * 2,
        "forward": [6.0] * 2,
        "backward": [8.0] * 2,
        "between": [32.0, 64.0],
        "optimizer": [16.0] * 2,
    }
    assert run.seconds == [65.0, 97.0]
    assert run.samples == [3, 3]


def test_a_closure_runs_in_its_own_phases(slow):
    clock, model, optimizer = slow
    with amp.record() as run:
        model, optimizer = amp.initialize(model, optimizer, opt_level="O0")

        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(2, 2)).sum()
            scaled_backward(clock, loss, optimizer)
            return loss

        clock.wait(1.0)
        optimizer.step(closure)
    # Before the first forward is "between", as before any step.
    assert {part: seconds for part, (seconds,) in run.parts.items()} == {
        "data": 0.0,
        "forward": 2.0,
        "backward": 8.0,
        "between": 1.0,
        "optimizer": 16.0,
    }


class Twice(torch.optim.SGD):
    """Its step is its parent's, which calls the hooks again, and then some."""

    after = staticmethod(lambda: None)

    @torch.optim.Optimizer.profile_hook_step
    def step(self, closure=None):
        result = super().step(closure)
        self.after()
        return result


def test_a_step_that_calls_its_parents_is_one_step(monkeypatch):
    clock = Clock(monkeypatch)
    with amp.record() as run:
        model, optimizer = started(optimizer=lambda params: Twice(params, lr=0.0))
        optimizer.after = lambda: clock.wait(5.0)
        for _ in range(3):
            one_step(model, optimizer)
    assert run.steps == 3 and run.parts["optimizer"] == [5.0] * 3


class Duck:
    """No torch.optim.Optimizer."""

    state = None

    def __init__(self, params):
        self.param_groups = [{"params": list(params)}]
        self.stepped = 0

    def zero_grad(self):
        for param in self.param_groups[0]["params"]:
            param.grad = None

    def step(self):
        self.stepped += 1


def test_an_optimizer_without_hooks_is_recorded():
    with amp.record() as run:
        model, optimizer = started(optimizer=Duck)
        one_step(model, optimizer)
        one_step(model, optimizer, factor=2.0**9)
        one_step(model, optimizer)
    assert run.skipped == [False, True, False] and run.scale == [1024.0, 1024.0, 512.0]
    assert optimizer.stepped == 2


@pytest.mark.parametrize(
    ("level", "weight", "masters", "gradients"),
    [("O0", 6 * 4, 0, 6 * 4), ("O2", 6 * 2, 6 * 4, 6 * HALF), ("O3", 6 * 2, 0, 6 * 2), ("O5", 6 * 2, 6 * 4, 6 * HALF)],
)
def test_sizes(level, weight, masters, gradients):
    with amp.record() as run:
        model = linear([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
        model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level=level, verbosity=0)
        for _ in range(2):
            optimizer.zero_grad()
            one_step(model, optimizer, inputs=[[1.0] * 3])
    momentum = weight if level == "O3" else 6 * 4
    assert (run.weights, run.masters, run.gradients, run.state) == (weight, masters, gradients, momentum)
    assert run.dtype == {"O0": None, "O5": "bfloat16"}.get(level, "float16")


def hold(size):
    """Take memory from the system and give it back: malloc may have some left that the process holds already."""
    with mmap.mmap(-1, size) as memory:
        torch.frombuffer(memory, dtype=torch.uint8).fill_(1)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak of a process cannot be begun anew")
def test_peak_memory_is_of_the_recording():
    with amp.record() as earlier:
        hold(2**28)
    with amp.record() as run:
        hold(2**26)
    # Linux counts pages per thread before it adds them up.
    assert earlier.peak_memory > 0.95 * 2**28
    assert 0.95 * 2**26 < run.peak_memory < 2**27


def test_log_refuses_a_number_that_no_float_can_hold():
    with amp.record() as run, pytest.raises(ValueError, match="log: acc is larger than any float"):
        amp.log(acc=10**400)
    assert run.logged == {}
