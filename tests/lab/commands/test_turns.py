"""Turns: compared runs train one at a time, with the same results as alone."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import platform
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
from contextlib import closing
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from paths import ROOT

from amp_patch.lab.commands import turn_client, turn_scheduler
from amp_patch.lab.commands.interrupts import Ended, Interrupts
from amp_patch.lab.commands.turn_client import LAST, TURN, TurnClient
from amp_patch.lab.commands.turn_scheduler import ScriptFailed
from amp_patch.lab.comparison.plan import Plan
from amp_patch.lab.recording.run import INTERRUPTED, OUT_OF_MEMORY, OVERDUE, Failure, Run, loads


@pytest.fixture
def taken(tmp_path, monkeypatch):
    """The turns of this process, and the end of the socket at which they are given."""
    monkeypatch.setattr(turn_client, "_SECONDS", 0.0)
    given, theirs = socket.socketpair()
    begun = TurnClient(theirs.detach(), str(tmp_path / "record.jsonl"), lambda: True, int)
    with given, closing(begun._socket), begun as taken:
        yield taken, given


def test_a_turn_is_passed_on_between_steps_and_the_process_waits_for_the_next(taken):
    taken, given = taken
    given.send(TURN)
    taken.between_steps()
    assert json.loads(given.recv(100)) == {"native": True, "cuda": torch.cuda.is_initialized()}
    waits = threading.Thread(target=taken.between_steps)
    waits.start()
    assert given.recv(100).endswith(b"\n")
    writes = threading.Thread(target=taken.keep, args=["writes files"])  # a thread of the script, while it waits
    writes.start()
    assert waits.is_alive() and taken.kept_for is None
    given.send(TURN)
    waits.join(60)
    writes.join(60)
    taken.between_steps()
    given.setblocking(False)
    with pytest.raises(BlockingIOError):  # it keeps its turn
        given.recv(1)


def test_the_last_turn_is_kept_to_the_end(taken):
    taken, given = taken
    given.send(LAST)
    taken.between_steps()
    taken.between_steps()
    assert given.recv(100).count(b"\n") == 1
    taken._is_last = False
    given.close()
    taken.between_steps()  # a closed connection does not end the process
    assert taken.kept_for is not None


def test_a_process_ends_if_compare_has_ended(taken):
    taken, given = taken
    given.shutdown(socket.SHUT_WR)
    with pytest.raises(SystemExit, match="compare, which started this process, has ended"):
        taken.between_steps()


def runs_a_process() -> None:
    process = multiprocessing.get_context("spawn").Process(target=int)
    process.start()
    process.join()


def makes_and_removes(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as own:
        Path(own, "file").write_text("")
        os.mkdir(Path(own, "folder"))
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("x")
    with tempfile.TemporaryFile() as file:
        file.write(b"x")


def loads_data(folder: Path) -> None:
    list(torch.utils.data.DataLoader(torch.zeros(4), num_workers=1))


def saves_safetensors(folder: Path) -> None:
    pytest.importorskip("safetensors.torch").save_file({"w": torch.zeros(1)}, folder / "w.safetensors")


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (lambda folder: open(folder / "best", "w").close(), "writes files"),
        (lambda folder: open(folder / "read", mode="r+b").close(), "writes files"),
        (lambda folder: (folder / "best").write_text(""), "writes files"),
        (lambda folder: os.close(os.open(folder / "best", os.O_WRONLY | os.O_CREAT)), "writes files"),
        (lambda folder: os.replace(folder / "read", folder / "best"), "writes files"),
        (lambda folder: (folder / "read").rename(folder / "best"), "writes files"),
        (lambda folder: shutil.copy(folder / "read", folder / "best"), "writes files"),
        (lambda folder: shutil.rmtree(folder / "full"), "writes files"),
        (lambda folder: torch.save(torch.zeros(1), folder / "best.pt"), "writes files"),
        (saves_safetensors, "writes files"),
        (lambda folder: sqlite3.connect(folder / "db").close(), "writes files"),
        (lambda folder: subprocess.run([sys.executable, "-c", ""]), "starts processes"),
        (lambda folder: os.system("true"), "starts processes"),
        (lambda folder: runs_a_process(), "starts processes"),
        (lambda folder: open(folder / "read").close(), None),
        (lambda folder: open(folder / "record.jsonl", "a").close(), None),
        (lambda folder: open(folder / "events.out.tfevents.1.host.2", "w").close(), None),
        (lambda folder: open(os.devnull, "w").close(), None),
        (lambda folder: os.mkdir(folder / "runs"), None),
        (makes_and_removes, None),
        (loads_data, None),
        (lambda folder: platform.processor(), None),
    ],
)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_script_that_writes_files_keeps_its_turn(what, why, tmp_path):
    (tmp_path / "read").write_text("")
    (tmp_path / "full").mkdir()
    before = open, os.open, os.fork, subprocess.Popen.__init__
    given, theirs = socket.socketpair()
    steps = [4]
    begun = TurnClient(theirs.detach(), str(tmp_path / "record.jsonl"), bool, lambda: steps[-1])
    with given, closing(begun._socket), begun as taken:
        what(tmp_path)
    assert taken.kept_for == why and (open, os.open, os.fork, subprocess.Popen.__init__) == before
    assert taken.note() is None
    steps.append(5)
    assert (taken.note() or "").startswith(f"the script {why}: ") is (why is not None)


# --- whose turn it is ---


class Made:
    """Stand-in for a process: each turn is a step, and `steps` has the result of each."""

    steps: ClassVar[dict[str, list]] = {}  # level -> what its turns give
    order: ClassVar[list[str]] = []
    begun: ClassVar[list[Made]] = []

    def __init__(self, plan, args, run, in_turns, load):
        self.run, self.in_turns, self.pid, self.kept = run, in_turns, 0, None
        self.left = list(self.steps.get(run.level, [None]))
        self.killed = self.told = False
        self.begun.append(self)

    def train(self, look, turn=TURN):
        while True:
            self.order.append(f"{self.run.level}{self.run.seed}")
            given = self.left.pop(0)
            if isinstance(given, BaseException):
                raise given
            if given is None or isinstance(given, Failure):
                self.run.error, self.run.error_kind, self.run.error_where = given or (None, "", "")
                return None
            self.run.loss.append(1.0)
            self.run.weights_type = (given or {}).pop("weights_type", "")
            if self.in_turns and turn == TURN:
                return {"native": False, "cuda": False, **given}

    def signal_interrupt(self):
        self.told = True

    def keep_outcome(self):
        self.kept = self.run.error

    def interrupt(self, until, hurried):
        assert not hurried()
        assert self.told and all(child.told for child in self.begun)
        self.run.error, self.run.error_kind = f"interrupted after {self.run.steps} steps", INTERRUPTED

    def kill(self):
        self.killed = True


@pytest.fixture
def order(monkeypatch):
    monkeypatch.setattr(turn_scheduler, "Child", Made)
    monkeypatch.setattr(Made, "steps", {"O0": [{}, {}, None], "O2": [{}, None], "O4": [{}, {}, {}, None]})
    monkeypatch.setattr(Made, "order", order := [])
    monkeypatch.setattr(Made, "begun", [])
    return order


def take(**options) -> tuple[list[Run], bool]:
    args = argparse.Namespace(**{"one_by_one": False, **options})
    scheduler = turn_scheduler.TurnScheduler(Plan(("O2", "O4"), seeds=2), args, Interrupts())
    interrupted = scheduler.train()
    return scheduler.runs, interrupted


def names(runs: list[Run]) -> list[str]:
    return [f"{run.level}{run.seed}" for run in runs]


def test_the_levels_of_a_seed_take_turns(order):
    runs, interrupted = take()
    of_seed = ["O0", "O2", "O4", "O0", "O2", "O4", "O0", "O4", "O4"]
    assert order == [f"{level}{seed}" for seed in (0, 1) for level in of_seed]
    assert names(runs) == ["O00", "O20", "O40", "O01", "O21", "O41"] and not interrupted


ONE_BY_ONE = ["O0"] * 3 + ["O2"] * 2 + ["O4"] * 4


@pytest.mark.parametrize("why", ["asked", "cuda", "memory"])
def test_runs_are_made_one_by_one_on_request_on_cuda_and_with_little_memory(why, order, monkeypatch):
    if why == "cuda":
        Made.steps["O0"][0] = {"cuda": True}
    if why == "memory":
        monkeypatch.setattr(turn_scheduler, "private_bytes", lambda _: 500)
        monkeypatch.setattr(turn_scheduler, "free_bytes", lambda: 1200)
    take(one_by_one=why == "asked")
    assert order == [f"{level}{seed}" for seed in (0, 1) for level in ONE_BY_ONE]


def test_a_native_script_gets_a_row_for_its_own_precision(order):
    Made.steps["O0"][1] = {"native": True}
    runs, _ = take()
    assert names(runs) == ["O00", "O20", "O40", "native0", "O01", "O21", "O41", "native1"]
    assert order.index("O40") < order.index("native0") < order.index("O01")


def test_a_script_with_low_weights_gets_a_row_with_masters(order):
    Made.steps["O0"] = [{"weights_type": "bfloat16"}, {}, None]
    runs, _ = take()
    assert names(runs) == ["O00", "O20", "O40", "O50", "O01", "O21", "O41", "O51"]
    assert order.index("O40") < order.index("O50") < order.index("O01")
    # If a level of the plan has masters of that type, no level is added.
    runs = [Run(level, 0, weights_type="float16" if level == "O0" else "") for level in ("O0", "O2")]
    scheduler = turn_scheduler.TurnScheduler(
        Plan(("O2",), seeds=1), argparse.Namespace(one_by_one=True), Interrupts(), runs
    )
    assert names(scheduler.runs) == ["O00", "O20"]
    # A resumed comparison derives the added level from its runs.
    runs[0].weights_type = "bfloat16"
    scheduler = turn_scheduler.TurnScheduler(
        Plan(("O2",), seeds=1), argparse.Namespace(one_by_one=True), Interrupts(), runs
    )
    assert names(scheduler.runs) == ["O00", "O20", "O50"]


def test_a_run_that_ran_out_of_memory_is_repeated_alone(order):
    Made.steps["O2"] = [{}, Failure("out of memory: MemoryError", OUT_OF_MEMORY)]
    runs, _ = take()
    assert order[:11] == ["O00", "O20", "O40", "O00", "O20", "O40", "O40", "O40", "O00", "O20", "O20"]
    assert names(runs) == ["O00", "O20", "O40", "O01", "O21", "O41"]
    assert runs[1].notes == ["the memory did not do for all levels at once: this run was made again by itself"]
    assert order[11:] == ["O01"] * 3 + ["O21"] * 2 + ["O41"] * 4


def test_a_level_with_a_step_that_is_overdue_gets_no_other_seed(order):
    Made.steps["O2"] = [{}, Failure("step 2 had taken about 2 minutes", OVERDUE)]
    runs, _ = take()
    assert names(runs) == ["O00", "O20", "O40", "O01", "O41"] and runs[1].error == "step 2 had taken about 2 minutes"


def test_an_interrupt_keeps_runs_that_took_steps(order):
    Made.steps["O2"] = [{}, Ended(signal.SIGINT)]
    runs, interrupted = take()
    assert interrupted == 130 and names(runs) == ["O00", "O20", "O40"]
    assert [run.error for run in runs] == [f"interrupted after {steps} steps" for steps in (2, 1, 1)]
    assert [child.kept for child in Made.begun] == [run.error for run in runs]


@pytest.mark.parametrize("steps", [[], [{}]])
def test_other_seeds_are_skipped_if_every_level_fails_with_the_first(steps, order, capsys):
    """Failures after the first step. A failure before it ends the comparison at once."""
    for level in ("O0", "O2", "O4"):
        Made.steps[level] = [*(steps or [{}] * (level == "O0")), Failure("KeyError: 'x'", "", "train.py, line 3")]
    runs, interrupted = take()
    assert names(runs) == ["O00", "O20", "O40"] and not interrupted
    assert "every level has failed with seed 0: other seeds are not tried" in capsys.readouterr().out


def test_a_script_that_fails_before_its_first_step_is_started_once(order, capsys):
    Made.steps["O0"] = [Failure("KeyError: 'x'", "", "train.py, line 3")]
    with pytest.raises(ScriptFailed, match=r"at O0, before its first step: KeyError: 'x' \(train.py, line 3\)$"):
        take()
    assert order == ["O00"] and [child.kept for child in Made.begun] == ["KeyError: 'x'"]
    assert "KeyError" not in capsys.readouterr().out, "said once, by whoever catches it"


def test_a_first_level_that_runs_out_of_memory_is_a_row(order):
    Made.steps["O0"] = [Failure("out of memory: MemoryError", OUT_OF_MEMORY)]
    runs, _ = take()
    assert names(runs) == ["O00", "O20", "O40", "O01", "O21", "O41"]


# --- as a user starts it ---

# Levels go astray in their fourth step. O0 and O2 keep files of one name, and read them back.
SCRIPT = """
import os, signal, sys, time
import torch
from amp_patch import amp

level = os.environ["AMP_PATCH_OPT_LEVEL"]
model = torch.nn.Linear(4, 2)
model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), verbosity=0)
for step in range(8):
    print(time.monotonic(), flush=True)
    time.sleep(0.2)
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    if step == 4 and level in sys.argv[1:3]:
        torch.save(level, "best.pt")
    if step > 4 and level in sys.argv[1:3]:
        assert torch.load("best.pt") == level, "another run's file"
    if step == 3 and level == "O3":
        os.kill(os.getpid(), signal.SIGKILL)
    if step == 3 and level == "O4":
        os.execv(sys.executable, [sys.executable, "-c", "pass"])
    if step == 3 and level == "O5":
        if os.fork() == 0:
            time.sleep(600)
        print("forked", os.getpid() + 0, flush=True)
        os._exit(3)
    print(time.monotonic(), flush=True)
    optimizer.step()
"""


def compare(folder: Path, *options: str) -> dict[str, Run]:
    (folder / "train.py").write_text(SCRIPT)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "amp_patch", "compare", "--seeds", "1", "--out", "out", "train.py", *options]
    subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, check=True)
    runs = [Run.from_dict(run) for run in loads((folder / "out" / "report.json").read_text())["runs"]]
    return {run.level: run for run in runs}


def steps_of(folder: Path, level: str) -> list[tuple[float, float]]:
    """When each of the level's steps began and ended, as its script saw it."""
    times = [float(line) for line in (folder / f"out/runs/{level}-seed0.log").read_text().split()]
    return list(zip(times[::2], times[1::2], strict=True))


@pytest.mark.slow
def test_runs_in_turns_have_the_times_and_losses_of_runs_alone(tmp_path):
    levels = ["O0", "O2", "O1"]
    runs = compare(tmp_path, "--levels", ",".join(levels))
    steps = sorted((*step, level) for level in levels for step in steps_of(tmp_path, level))
    assert all(end <= begin for (_, end, _), (begin, _, _) in itertools.pairwise(steps))
    assert sum(a[2] != b[2] for a, b in itertools.pairwise(steps)) > 3, "they followed each other"
    for level in levels:
        own = [step for step in steps if step[2] == level]
        meanwhile = sum(end - begin for begin, end, of in steps if of != level and own[0][1] < begin < own[-1][0])
        timed = sum(filter(math.isfinite, runs[level].seconds[1:-1]))  # NaN: something was measured within that step
        assert meanwhile > 0.6 and timed + meanwhile <= own[-1][1] - own[0][1]
    alone = compare(tmp_path, "--levels", ",".join(levels), "--one-by-one")
    assert [alone[level].loss for level in levels] == [runs[level].loss for level in levels]
    assert not any(run.notes for run in (*runs.values(), *alone.values()))


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_each_level_has_its_own_files_and_a_stuck_run_blocks_no_other(tmp_path):
    runs = compare(tmp_path, "--levels", "O0,O2,O3,O4,O5,O1", "--", "O0", "O2")
    assert {level: (run.error or "")[:16] for level, run in runs.items()} == {
        "O0": "", "O2": "", "O3": "killed by signal", "O4": "the recording br", "O5": "exit status 3: f", "O1": "",
    }  # fmt: skip
    assert [runs[level].steps for level in ("O0", "O2", "O1")] == [8, 8, 8]
    note = "the script writes files: from the first time on it ran to its end, while the other levels waited"
    assert runs["O0"].notes == runs["O2"].notes == [note] and not runs["O1"].notes
