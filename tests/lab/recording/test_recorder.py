"""What a recording says is what happened, what happened is what happens without one, and nothing of it stays."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import mmap
import os
import pickle
import sys
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from apexed import apex_amp  # noqa: F401  the fixture `apex`
from conftest import DEVICES
from recordings import read_lines
from syncs import count
from torch import nn
from training import ADAM, LEVELS, SGD, backward, convnet, images, linear, same, train, weights

from amp_patch import amp
from amp_patch.lab.recording import compiled_forwards, outbox
from amp_patch.lab.recording import recorder as recording
from amp_patch.lab.recording.recorder import Enough, Recorder
from amp_patch.lab.recording.run import PARTS, Run
from amp_patch.lab.recording.sinks import JsonLines
from amp_patch.multi_tensor import backend
from amp_patch.training import observers

torch_hooks = sys.modules["torch.optim.optimizer"]


HALF = 2 if backend() == "cpp" else 4  # bytes of a gradient that waits for a step; plain torch makes the master's


def started(level="O2", lr=2.0**-20, optimizer=None, device="cpu", **options):
    """A linear layer with the weights 1 and 2, and its SGD; where the scale moves it starts at 2**10."""
    model = linear([[1.0, 2.0]], device)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr) if optimizer is None else optimizer(model.parameters())
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, max_loss_scale=2.0**10, **options)


def one_step(model, optimizer, inputs=((1.0, 1.0),), factor=1.0, **options):
    optimizer.zero_grad()
    loss = model(torch.tensor(inputs, device=model.weight.device)).sum() * factor
    backward(loss, optimizer, **options)
    optimizer.step()


def untouched():
    """Whether nothing of a recorder is in the process."""
    return (
        not observers._observers
        and not torch_hooks._global_optimizer_pre_hooks
        and not torch_hooks._global_optimizer_post_hooks
        and not recording._recorders
        and not compiled_forwards._listeners
        and not compiled_forwards._installation.installed
    )


@pytest.fixture(autouse=True)
def nothing_left():
    assert untouched()
    yield
    assert untouched()


@pytest.mark.parametrize("device", DEVICES)
def test_the_losses_scales_skips_and_samples_are_those_of_the_training(device):
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
def test_an_eps_that_is_0_in_the_type_of_the_weights_is_told(level, eps, lost):
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
    monkeypatch.setattr("amp_patch.training.overflow.waits", lambda device: True)  # as if the CPU were one to wait for
    arrived = False
    monkeypatch.setattr("amp_patch.training.stash.DeviceSkip.here", lambda self: arrived)
    with amp.record() as run:
        model, optimizer = started(optimizer=lambda params: torch.optim.SGD(params, lr=0.0, fused=True))
        for step in range(4):
            one_step(model, optimizer, factor=2.0**9 if step == 2 else 1.0)
            assert len(optimizer._amp_stash.device_skips) == step  # the first step is not one of these
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


def test_the_scale_is_the_one_of_loss_id_0():
    with amp.record() as run:
        model, optimizer = started(num_losses=2, lr=0.0)
        for _ in range(2):
            backward(model(torch.ones(1, 2)).sum() * 2.0**9, optimizer, loss_id=1)
            backward(model(torch.ones(1, 2)).sum(), optimizer)
            optimizer.step()
        assert amp.loss_scale(optimizer, 1).item() == 2.0**8
    assert run.scale == [1024.0, 1024.0] and run.skipped == [True, True]


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


class Clock:
    """What time it is, is what the test says."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr("amp_patch.lab.recording.step_clock.clock", lambda: self.now)

    def wait(self, seconds):
        self.now += seconds


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


def test_phases_that_come_again_add_up(slow):
    clock, model, optimizer = slow
    with amp.record() as run:
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1", num_losses=2, loss_scale=8.0, verbosity=0)
        for _ in range(3):
            clock.wait(1.0)  # fetches the next micro-batch: not between
            outputs = model(torch.ones(1, 2))
            scaled_backward(clock, outputs.sum(), optimizer)
        clock.wait(64.0)  # computes another loss of the same outputs
        with amp.scale_loss(model.weight.sum(), optimizer, loss_id=1) as scaled_loss:
            scaled_loss.backward()
        clock.wait(32.0)
        optimizer.step()
    assert {part: seconds for part, (seconds,) in run.parts.items()} == {
        "data": 3.0,
        "forward": 6.0 + 64.0,
        "backward": 24.0,
        "between": 32.0,
        "optimizer": 16.0,
    }


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


def test_unseen_forwards_are_data(slow):
    clock, model, optimizer = slow
    with amp.record() as run:
        model, optimizer = amp.initialize(model, optimizer, opt_level="O0")
        loss = model.forward(torch.ones(1, 2)).sum()  # no hook of a module's runs
        scaled_backward(clock, loss, optimizer)
        optimizer.step()
    assert run.parts["data"] == [2.0] and run.parts["forward"] == [0.0] and run.samples == [0]


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


def test_sizes_are_known_though_the_model_is_gone_or_restored():
    def training():
        model, optimizer = started("O2", optimizer=ADAM)
        for _ in range(3):
            one_step(model, optimizer)
        return model, optimizer

    sizes = []
    for restored in (False, True):
        with amp.record() as run:
            kept = training() if restored else (training(), None)[1]
            if restored:
                amp.restore()
        del kept
        sizes.append((run.weights, run.masters, run.gradients, run.state))
    assert sizes == [(4, 8, 2 * HALF, 2 * 8 + 4)] * 2


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


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak of a process cannot be begun anew")
def test_a_recording_inside_of_another_leaves_that_its_peak():
    with amp.record() as outer:
        hold(2**28)
        with amp.record() as inner:
            hold(2**26)
    assert outer.peak_memory > 0.95 * 2**28
    assert 0.95 * 2**26 < inner.peak_memory < 2**27


@pytest.mark.parametrize("level", LEVELS)
def test_a_recorded_training_is_bit_for_bit_the_other_one(level, tmp_path):
    found = []
    for recorded in (False, True):
        model = convnet()
        if recorded:
            with amp.record(tmp_path / "run.jsonl") as run:
                model, optimizer = amp.initialize(model, ADAM(model.parameters()), opt_level=level, verbosity=0)
                losses = train(model, optimizer, 4)
            assert run.loss == losses
            assert not model._forward_pre_hooks and not model._forward_pre_hooks_with_kwargs
        else:
            model, optimizer = amp.initialize(model, ADAM(model.parameters()), opt_level=level, verbosity=0)
            losses = train(model, optimizer, 4)
        state = [value for each in optimizer.state.values() for value in each.values()]
        found.append((losses, weights(model) + [tensor.clone() for tensor in state]))
        amp.restore()
    assert found[0][0] == found[1][0] and len(found[0][1]) > 20 and same(found[0][1], found[1][1])


def test_a_recording_that_begins_later_knows_the_training():
    model, optimizer = started("O5")
    other, other_optimizer = started("O0")
    with Recorder([run := Run("")]) as recorder:
        one_step(model, optimizer)
        assert recorder.trainings == 1 and recorder.enabled
    assert (run.level, run.steps, run.samples, run.weights, run.notes) == ("O5", 1, [1], 4, [])
    one_step(other, other_optimizer)
    assert run.steps == 1


def test_several_recordings_at_once_each_get_all_of_their_time():
    model, optimizer = started("O2")
    with amp.record() as outer:
        one_step(model, optimizer)
        with amp.record() as inner:
            one_step(model, optimizer, factor=2.0)
        one_step(model, optimizer)
    assert len(outer.loss) == 3 and outer.loss[1:2] == inner.loss and inner.level == "O2"


def test_another_level_in_the_same_recording_is_noted():
    with Recorder([run := Run("")]) as recorder:
        for level in ("O0", "O2"):
            model, optimizer = started(level)
            one_step(model, optimizer)
            del model, optimizer
    assert recorder.trainings == 2 and run.level == "O0" and run.steps == 2
    assert len(run.notes) == 1 and "O2" in run.notes[0]


def test_enabled_false_is_told_from_no_initialize():
    with Recorder([run := Run("none")]) as recorder:
        assert recorder.trainings == 0
        model, optimizer = started("O2", enabled=False)
        one_step(model, optimizer)
    assert recorder.trainings == 1 and not recorder.enabled
    assert recorder.losses == recorder.steps == 0 and run.steps == 0 and run.level == "none"


def test_apex_scripts_are_recorded(amp):
    with Recorder([run := Run("")]) as recorder:
        model = linear([[1.0, 2.0]])
        model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level="O2", verbosity=0)
        with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        amp.initialize(linear([[1.0]]), enabled=False)
    assert run.loss == [3.0] and run.scale == [65536.0] and run.samples == [1] and recorder.trainings == 2
    assert run.gradients == 2 * HALF


def test_apexs_oldest_form_is_recorded(amp):
    with Recorder([run := Run("")]) as recorder:
        handle = amp.init()
        try:
            model = linear([[1.0, 2.0]])
            optimizer = handle.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            with optimizer.scale_loss(model(torch.ones(1, 2)).sum()) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        finally:
            handle._deactivate()
    assert run.level == "O1" and run.loss == [3.0] and run.weights == 8 and recorder.enabled


def test_enough_ends_the_training_after_the_step_was_recorded():
    with pytest.raises(Enough) as ended, Recorder([run := Run("")], stop_after=2) as recorder:
        model, optimizer = started("O0", lr=0.5)
        while True:
            one_step(model, optimizer)
    assert ended.value.code == 0 and isinstance(ended.value, SystemExit)
    assert run.steps == recorder.steps == recorder.losses == 2
    assert model.weight.tolist() == [[0.0, 1.0]]
    one_step(model, optimizer)  # and goes on, if it must
    caught = 0
    with Recorder([run := Run("")], stop_after=2):
        for _ in range(4):
            try:
                one_step(model, optimizer)
            except BaseException:
                caught += 1
    assert run.steps == 2 and caught == 3
    with pytest.raises(ValueError, match="stop_after is 0"):
        Recorder([], stop_after=0)


def test_an_exception_leaves_nothing_behind_and_keeps_what_was_recorded(tmp_path):
    path = tmp_path / "run.jsonl"
    with pytest.raises(ZeroDivisionError), amp.record(path) as run:
        model, optimizer = started("O2")
        one_step(model, optimizer)
        with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer):
            raise ZeroDivisionError
    assert run.loss == [3.0] and run.weights == 4
    assert not model._forward_pre_hooks
    events = read_lines(path.read_text().splitlines())
    assert [event["event"] for event in events] == ["begin", "step", "end"]


def test_the_loss_of_a_body_that_failed_does_not_count():
    with amp.record() as run:
        model, optimizer = started("O2", lr=0.0)
        with pytest.raises(ZeroDivisionError), amp.scale_loss(model(torch.ones(1, 2)).sum() * 7, optimizer):
            raise ZeroDivisionError
        one_step(model, optimizer)
    assert run.loss == [3.0]


class Padded(nn.Linear):
    def forward(self, given):
        ragged = given["ragged"] if isinstance(given, dict) else given
        return super().forward(torch.nested.to_padded_tensor(ragged, 0.0))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_inputs_whose_samples_cannot_be_counted_do_no_harm():
    ragged = torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(3, 2)])
    circular = {}
    circular.update(itself=circular, ragged=ragged)
    with amp.record() as run:
        model = Padded(2, 1)
        model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level="O0", verbosity=0)
        for given in (ragged, circular):
            backward(model(given).sum(), optimizer)
            optimizer.step()
    assert run.samples == [2, 0]


def test_the_samples_are_those_of_the_forward_that_a_body_followed():
    with amp.record() as run:
        model, optimizer = started("O0")
        one_step(model, optimizer)
        model(torch.ones(7, 2))  # an evaluation that forgot its no_grad
        with pytest.raises(RuntimeError):
            model(torch.ones(9, 3))
        one_step(model, optimizer, inputs=((1.0, 1.0), (1.0, 1.0)))
    assert run.samples == [1, 2]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
def test_a_copy_for_export_has_no_trace_of_the_recording():
    with amp.record():
        model, optimizer = started("O2")
        one_step(model, optimizer)
        plain = amp.fp32_copy(model)
        assert not plain._forward_pre_hooks and not plain._forward_pre_hooks_with_kwargs
        assert torch.equal(torch.jit.script(plain)(torch.ones(1, 2)), plain(torch.ones(1, 2)))


def test_copies_and_pickles_of_a_recorded_model_are_of_the_model_alone():
    with amp.record() as run:
        model, optimizer = started("O2")
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        for each in copies:
            assert torch.equal(each(torch.ones(1, 2)), model(torch.ones(1, 2)))
        one_step(model, optimizer)
    assert run.steps == 1


def test_log_gives_figures_of_the_scripts_own():
    amp.log(nobody=1.0)
    with amp.record() as run:
        model, optimizer = started()
        accuracy = torch.tensor([0.25])
        amp.log(accuracy=accuracy, seen=0)
        accuracy.zero_()
        one_step(model, optimizer)
        amp.log(accuracy=0.5, lr=torch.tensor(2.0, dtype=torch.float64, requires_grad=True))
    assert run.logged == {"accuracy": [(0, 0.25), (1, 0.5)], "seen": [(0, 0.0)], "lr": [(1, 2.0)]}


@pytest.mark.parametrize("wrong", ["0.5", None, [0.5], torch.ones(2), torch.ones((), dtype=torch.complex64), 1j])
def test_log_refuses_what_is_no_number_though_nobody_records(wrong):
    with pytest.raises(TypeError, match="log: accuracy is"):
        amp.log(accuracy=wrong)


def test_lines_of_json_are_the_run_and_are_there_while_it_goes_on(tmp_path):
    path = tmp_path / "run.jsonl"
    with amp.record(path) as run:
        model, optimizer = started()
        for _ in range(49):
            one_step(model, optimizer)
        amp.log(accuracy=math.nan)
        one_step(model, optimizer)
        killed = read_lines(path.read_text().splitlines())
    assert sum(event["event"] == "step" for event in killed) >= 49
    again = Run("")
    for event in read_lines(path.read_text().splitlines()):
        again.add(event)
    assert math.isnan(again.logged["accuracy"][0][1]) and again.logged["accuracy"][0][0] == 49
    again.logged = run.logged
    assert again == run and run.steps == 50


class Writer:
    def __init__(self):
        self.scalars = []

    def add_scalar(self, tag, value, step):
        self.scalars.append((tag, value, step))


def test_scalars_go_to_tensorboard():
    writer = Writer()
    with amp.record(writer) as run:
        model, optimizer = started()
        one_step(model, optimizer)
        one_step(model, optimizer, factor=2.0**9)
        amp.log(held_out=0.5)
    scalars = {(tag, step): value for tag, value, step in writer.scalars}
    assert len(scalars) == len(writer.scalars)
    assert scalars["amp/loss", 0] == 3.0 and scalars["amp/skipped", 1] == 1.0 and scalars["amp/loss_scale", 1] == 1024.0
    assert scalars["amp/seconds/step", 1] == run.seconds[1] and scalars["held_out", 2] == 0.5
    assert [scalars[f"amp/seconds/{part}", 0] for part in PARTS] == [run.parts[part][0] for part in PARTS]
    assert scalars["amp/samples_per_second", 0] == 1 / run.seconds[0]


def test_what_cannot_be_written_to_is_refused_before_anything(tmp_path):
    with pytest.raises(TypeError, match="record: to is a int"), amp.record(3):
        raise AssertionError
    with pytest.raises(FileNotFoundError), amp.record(tmp_path / "none" / "run.jsonl"):
        raise AssertionError


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_full_disk_ends_the_recording_and_not_the_training(monkeypatch):
    monkeypatch.setattr(outbox, "_FLUSH_EVENTS", 2)
    model, optimizer = started()
    with pytest.warns(UserWarning, match="breaks off at step [12]: .*No space left") as warned, amp.record("/dev/full"):
        for _ in range(6):
            one_step(model, optimizer)
    assert len(warned) == 1
    gc.collect()
    with pytest.warns(UserWarning, match="breaks off"), pytest.raises(KeyError), amp.record("/dev/full"):
        raise KeyError


def test_between_two_steps_the_caller_finds_their_events_written_and_its_time_is_in_none(tmp_path, monkeypatch):
    monkeypatch.setattr(outbox, "_FLUSH_EVENTS", 1)
    time, path, written = Clock(monkeypatch), tmp_path / "run.jsonl", []

    def between_steps():
        written.append([event["event"] for event in read_lines(path.read_text().splitlines())])
        time.wait(10.0)

    recorder = Recorder([JsonLines(path), run := Run("")], between_steps=between_steps)
    with recorder:
        model, optimizer = started()
        for _ in range(2):
            one_step(model, optimizer)
    assert written == [["begin", "step"], ["begin", "step", "step"]], "and not when the recording ends"
    assert run.seconds == [0.0, 0.0]
    recorder.close()


def test_the_last_events_of_a_caller_stand_behind_the_end_in_the_same_file(tmp_path):
    path = tmp_path / "run.jsonl"
    recorder = Recorder([JsonLines(path), run := Run("")])
    with recorder:
        model, optimizer = started()
        one_step(model, optimizer)
    recorder.close({"event": "note", "text": "all is said"})
    kinds = [event["event"] for event in read_lines(path.read_text().splitlines())]
    assert kinds == ["begin", "step", "end", "note"] and run.notes == ["all is said"]


def test_one_process_of_a_job_writes(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    writer = Writer()
    with Recorder([JsonLines(tmp_path / "run.jsonl"), *recording.sinks_for(writer), run := Run("")]):
        model, optimizer = started()
        one_step(model, optimizer)
    assert not (tmp_path / "run.jsonl").exists() and not writer.scalars and run.steps == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_does_not_write(tmp_path):
    path = tmp_path / "run.jsonl"
    model, optimizer = started()
    with amp.record(path) as run:
        one_step(model, optimizer)
        if (child := os.fork()) == 0:
            try:
                one_step(model, optimizer)
                amp.log(child=1.0)
                recording._recorders[0].__exit__(None, None, None)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        one_step(model, optimizer)
    kinds = [event["event"] for event in read_lines(path.read_text().splitlines())]
    assert kinds == ["begin", "step", "step", "end"] and run.steps == 2 and not run.logged


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


def test_a_look_that_cannot_begin_leaves_the_peak_measured(monkeypatch):
    held = [2**20]
    monkeypatch.setattr("amp_patch.lab.recording.peak_memory._status", lambda name: held[0])
    with amp.record(inspect=True, activations=False) as run:
        model, optimizer = started()
        for _ in range(2):
            with Passes():
                one_step(model, optimizer)
        held[0] = 2**22
    assert len(run.notes) == 1 and run.peak_memory == 2**22 - 2**20


def test_a_mode_that_is_entered_during_a_look_stays_when_the_look_ends():
    with amp.record(inspect=True) as run:
        model, optimizer = started()
        one_step(model, optimizer)
        assert len(stack()) == 1
        with Passes() as mine, Passes() as inner:
            one_step(model, optimizer)
            assert stack() == [mine, inner]
        assert stack() == []
    assert [look.step for look in run.looks] == [1]


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
def test_a_compiled_model_is_known_as_soon_as_initialize_is_called():
    with amp.record() as run:
        first, optimizer = started("O0")
        one_step(first, optimizer)
        for _ in range(2):
            model = convnet()
            compiled = compile_wrapper(model)
            compiled(images(0)[0])
            model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level="O0")
            train(compiled, optimizer, 1)
    assert run.samples == [1, 8, 8]


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


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be instantiated")
def test_a_compiled_loop_is_recorded_and_nothing_of_that_is_compiled():
    model, optimizer = amp.initialize(model := convnet(), SGD(model.parameters()), opt_level="O2", verbosity=0)

    def step(inputs, targets):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        backward(loss, optimizer)
        optimizer.step()
        return loss

    compiled = torch.compile(step, backend="eager")
    with amp.record(inspect=True) as run:
        losses = [compiled(*images(index)).item() for index in range(3)]
    assert run.loss == losses and [look.step for look in run.looks] == [1] and run.notes == []


def test_an_optimizer_that_steps_no_more_gives_its_place_to_one_that_does():
    model = nn.Linear(2, 1)
    first, second = SGD(model.parameters()), SGD(model.parameters())
    model, (first, second) = amp.initialize(model, [first, second], opt_level="O0")
    with amp.record() as run:
        for optimizer in (first, *[second] * 110):
            with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as loss:
                loss.backward()
            optimizer.step()
    assert run.steps == 1 + 10, "from the hundred-and-first step on, each of the second's is one"
    assert repr(run) == f"Run(O0 seed 0: 11 steps, last loss {run.loss[-1]:.4g})"
