"""A recorded training equals an unrecorded one; the ends of a recording, and its content then."""

from __future__ import annotations

import copy
import gc
import math
import os
import pickle
import time

import pytest
import torch
from apexed import apex_amp  # noqa: F401  the fixture `apex`
from recordings import (
    HALF,
    nothing_left_fixture,  # noqa: F401  the fixture `nothing_left`
    one_step,
    read_lines,
    started,
)
from torch import nn
from training import ADAM, LEVELS, SGD, backward, convnet, linear, same, train, weights

from amp_patch import amp
from amp_patch.diagnose.recording import outbox
from amp_patch.diagnose.recording import recorder as recording
from amp_patch.diagnose.recording.recorder import Enough, Recorder
from amp_patch.diagnose.recording.run import PARTS, Run
from amp_patch.diagnose.recording.sinks import JsonLines


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
        assert recorder.enabled
    assert (run.level, run.steps, run.samples, run.weights, run.notes) == ("O5", 1, [1], 4, [])
    one_step(other, other_optimizer)
    assert run.steps == 1


def test_a_training_with_enabled_false_is_not_recorded():
    with Recorder([run := Run("none")]) as recorder:
        model, optimizer = started("O2", enabled=False)
        one_step(model, optimizer)
    assert not recorder.enabled
    assert recorder.losses == recorder.steps == 0 and run.steps == 0 and run.level == "none"


def test_apex_scripts_are_recorded(amp):
    with Recorder([run := Run("")]):
        model = linear([[1.0, 2.0]])
        model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level="O2", verbosity=0)
        backward(model(torch.ones(1, 2)).sum(), optimizer)
        optimizer.step()
        amp.initialize(linear([[1.0]]), enabled=False)
    assert run.loss == [3.0] and run.scale == [65536.0] and run.samples == [1]
    assert run.gradients == 2 * HALF


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


def test_an_exception_leaves_nothing_behind_and_keeps_the_recorded_steps(tmp_path):
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


def test_samples_are_counted_in_the_forward_before_the_body():
    with amp.record() as run:
        model, optimizer = started("O0")
        one_step(model, optimizer)
        model(torch.ones(7, 2))  # an evaluation that forgot its no_grad
        with pytest.raises(RuntimeError):
            model(torch.ones(9, 3))
        one_step(model, optimizer, inputs=((1.0, 1.0), (1.0, 1.0)))
    assert run.samples == [1, 2]


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
def test_log_refuses_values_other_than_numbers_without_a_recorder(wrong):
    with pytest.raises(TypeError, match="log: accuracy is"):
        amp.log(accuracy=wrong)


def test_lines_of_json_hold_the_run_and_appear_while_it_continues(tmp_path):
    path = tmp_path / "run.jsonl"
    with amp.record(path) as run:
        model, optimizer = started()
        for _ in range(49):
            one_step(model, optimizer)
        amp.log(accuracy=math.nan)
        one_step(model, optimizer)
        killed = read_lines(path.read_text().splitlines())
    assert sum(event["event"] == "step" for event in killed) >= 40, "a batch is 50 events"
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


def test_an_unwritable_path_is_refused_before_anything(tmp_path):
    with pytest.raises(TypeError, match="record: to is an int"), amp.record(3):
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


def test_a_step_has_the_cpu_time_of_the_process():
    class Waits(nn.Linear):
        def forward(self, inputs):
            time.sleep(0.1)
            return super().forward(inputs)

    model = Waits(2, 1)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)
    with Recorder([run := Run("")]):
        for _ in range(2):
            one_step(model, optimizer)
    assert len(run.cpu_seconds) == 2 and 0 < run.cpu_seconds[1] < run.seconds[1] - 0.05


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
    assert kinds == ["begin", "step", "step", "updates", "end"] and run.steps == 2 and not run.logged


def test_a_recording_has_weights_and_inputs_of_the_first_forward_and_counts_forwards():
    with amp.record() as run:
        model, optimizer = started(lr=0.5)
        for step in range(60):  # the figures are read meanwhile
            with torch.no_grad():
                model(torch.ones(1, 2))
            one_step(model, optimizer, [[step + 0.5, 3.0]])
    assert run.start == [1.0, 2.0, 0.5, 3.0] and run.forwards == 60
    assert model.weight.tolist() != [[1.0, 2.0]]
