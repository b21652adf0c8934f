"""The share of the cores that other work took, as the report states it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time

import pytest
from compared_runs import made_up_run

from amp_patch.comparison import other_work as processes
from amp_patch.comparison.comparison import Comparison
from amp_patch.comparison.other_work import OtherWork
from amp_patch.run.machine import machine


@pytest.mark.parametrize(
    ("readings", "words"),
    [
        ([], None),
        ([(10.0, 10.0, 9.5)], None),  # cores were idle, so the training did not wait
        ([(10.0, 39.0, 38.9)], None),  # the training had all cores
        ([(10.0, 39.0, 30.0)], "other work took 0.9 of 4 cores while it ran"),
        ([(9.5, 10.0, 10.0), (0.5, 2.0, 1.0)], None),  # a moment
        ([(8.0, 8.0, 8.0), (2.0, 8.0, 2.0)], "other work took 0.6 of 4 cores while it ran"),
    ],
)
def test_other_work_is_reported_if_it_crowded_the_cores(readings, words):
    load = OtherWork()
    load.cores = 4
    for reading in readings:
        load.add(*reading)
    assert load.words() == words and machine(load.words()).get("load") == words


def test_the_other_work_of_each_run_is_part_of_that_of_all():
    whole = OtherWork()
    first, second = OtherWork(whole), OtherWork(whole)
    for load in (whole, first, second):
        load.cores = 2
    first.add(10.0, 20.0, 10.0)
    second.add(10.0, 10.0, 10.0)
    assert (first.share, second.share, whole.share) == (0.5, 0.0, 0.25)


def test_a_report_names_the_spread_of_speeds_under_other_work():
    runs = [made_up_run(level, seed, ms=10 + seed) for seed in range(3) for level in ("O0", "O2")]
    runs[1].seconds = [0.005] * 40
    note = Comparison("t.py", runs, machine={"load": "other work took 1 of 2 cores while it ran"}).notes[0]
    assert note.startswith(
        "other work took 1 of 2 cores while it ran: the speeds may be wrong by up to 100 %; compare again while"
    )
    assert not any("other work" in note for note in Comparison("t.py", runs).notes)


@pytest.mark.parametrize(("share", "device", "speed"), [(0.3, "cpu", 2.0), (0.05, "cpu", 0.5), (0.3, "cuda", 0.5)])
@pytest.mark.parametrize("crowded", ["O0", "O2"])
def test_cpu_times_are_compared_if_other_work_took_more_than_a_tenth(share, device, speed, crowded):
    """By the clock O2 takes twice O0's time, by the CPU's time half of it."""
    runs = [made_up_run(level, seed, ms=ms) for seed in range(2) for level, ms in (("O0", 10), ("O2", 20))]
    for run in runs:
        run.device = device
        run.cpu_seconds = [0.016 if run.level == "O0" else 0.008] * run.steps
    next(run for run in runs if run.level == crowded).other_work = share
    comparison = Comparison("t.py", runs, machine={"load": "other work took 1 of 2 cores while it ran"})
    assert comparison.levels[1].speedup.median == pytest.approx(speed)
    assert comparison.levels[1].step_ms == pytest.approx(20)
    assert ("ratios of CPU times" in comparison.notes[0]) is (speed == 2.0)
    runs[0].cpu_seconds = [math.nan] * runs[0].steps  # of a version that did not record them
    assert Comparison("t.py", runs).levels[1].speedup.median == pytest.approx(0.5)


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_steps_that_other_work_has_lengthened_do_not_count(level):
    """Both levels take 10 ms. Other work adds up to a half to two thirds of the steps of one of them."""
    runs = [made_up_run(name, seed) for seed in range(2) for name in ("O0", "O2")]
    for run in runs:
        run.device, run.other_work, run.cpu_seconds = "cpu", 0.5, [0.01] * run.steps
        if run.level == level:
            run.cpu_seconds = [0.01 if step % 3 == 0 else 0.012 + 0.003 * (step % 2) for step in range(run.steps)]
    assert Comparison("t.py", runs).levels[1].speedup == (1.0, 1.0, 1.0)


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
def test_readings_count_the_cpu_time_of_child_processes():
    load = OtherWork()
    load.watch(os.getpid())
    spin = [sys.executable, "-c", "while True: pass"]
    own = subprocess.Popen(spin)
    try:
        assert own.pid in processes.tree(os.getpid())
        begun, busy = processes.cpu_seconds(os.getpid()), processes.busy_seconds()
        time.sleep(0.7)
        assert processes.busy_seconds() > busy
        while processes.cpu_seconds(os.getpid()) < begun + 0.1:  # the child's time is the training's own
            time.sleep(0.1)
        load.read()
        assert load._seconds > 0.5
    finally:
        own.kill()
        own.wait()
    gone = OtherWork()
    gone.watch(own.pid)
    gone.read()
    assert gone.words() is None and processes.cpu_seconds(own.pid) is None


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
def test_readings_count_other_processes_as_other_work():
    load = OtherWork()
    spin = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(spin) for _ in range(2 * load.cores)]
    idle = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        time.sleep(1.0)
        load.watch(idle.pid)
        time.sleep(1.0)
        load.read()
    finally:
        for each in (*others, idle):
            each.kill()
            each.communicate()
    assert load.words() is not None and load._taken > 0
