"""Commands that a signal ends: they leave no process, and keep finished runs if they can."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from paths import ROOT
from scripts import SECONDS, in_folder, wait_until, wait_until_left

from amp_patch.comparison.commands.interrupts import Interrupts
from amp_patch.diagnose.recording.run import Run, loads

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="nothing tells where processes run")

# In its fourth step, O1 starts a process that ignores SIGTERM and one in a new session, and waits.
SCRIPT = """
import os, subprocess, sys, time
import torch
from amp_patch import amp

model = torch.nn.Linear(4, 2)
model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), verbosity=0)
for step in range(8):
    if step == 3 and os.environ["AMP_PATCH_OPT_LEVEL"] == "O1":
        stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True)"
        command = [sys.executable, "-I", "-c", stubborn + "; time.sleep(600)"]
        subprocess.Popen(command, stdout=subprocess.PIPE).stdout.read(1)
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        open("waiting", "w").close()
        time.sleep(600)
    with amp.scale_loss(model(torch.ones(8, 4)).square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
"""

# Run a command in a new terminal, which is its standard input.
IN_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture(autouse=True)
def signals_end() -> Iterator[None]:
    """Unblock signals and reset ignored ones (SIGHUP under nohup): child processes would inherit that."""
    numbers = (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    ignored = [number for number in numbers if before[number] is signal.SIG_IGN]
    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, before[number])
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


@contextmanager
def running(folder: Path, command: list[str], **given: object) -> Iterator[subprocess.Popen[bytes]]:
    """Start the command and yield once its script waits. At the end, no process of either may be left."""
    (folder / "train.py").write_text(SCRIPT)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **given) as process:
        try:
            wait_until(lambda: (folder / "waiting").exists() or process.poll() is not None)
            assert process.poll() is None
            yield process
            process.wait(SECONDS)
            wait_until_left(folder)
        finally:
            for pid in (process.pid, *in_folder(folder)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def compare(*options: str) -> list[str]:
    return [sys.executable, "-m", "amp_patch", "compare", "--levels", "O0,O1", "--seeds", "1", *options, "train.py"]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -9)])
def test_an_ended_comparison_leaves_no_process_and_keeps_finished_runs(how, code, tmp_path):
    with running(tmp_path, compare("--out", "out")) as process:
        assert len(in_folder(tmp_path)) > 4
        process.send_signal(how)
    assert process.returncode == code
    if how != signal.SIGKILL:
        runs = [Run.from_dict(run) for run in loads((tmp_path / "out" / "report.json").read_text())["runs"]]
        assert [run.level for run in runs] == ["O0", "O1"] and runs[1].steps == 3 and runs[0].error is None
        assert runs[1].error == "interrupted after 3 steps"


@pytest.mark.slow
def test_a_comparison_whose_terminal_closes_writes_its_report(tmp_path):
    ours, theirs = os.openpty()
    command = [sys.executable, "-I", "-S", "-c", IN_TERMINAL, *compare()]
    with running(tmp_path, command, stdin=theirs, stdout=theirs, stderr=theirs):
        os.close(theirs)
        os.close(ours)
    assert (tmp_path / "amp_compare" / "report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_an_ended_search_leaves_no_process(how, code, tmp_path):
    options = ["--batch-search", "1GiB", "--batch-flag", "--batch", "--levels", "O1"]
    with running(tmp_path, compare(*options)) as process:
        process.send_signal(how)
    assert process.returncode == code


def test_a_signal_is_raised_once_at_a_safe_place():
    """A signal that was ignored stays ignored, as under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN), signal.getsignal(signal.SIGINT)
    try:
        with Interrupts() as noted:
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            noted.check()
            signal.raise_signal(signal.SIGTERM)
            with pytest.raises(KeyboardInterrupt) as raised:
                noted.check()
            assert raised.value.status == 143 and not noted.hurried
            signal.raise_signal(signal.SIGINT)
            noted.check()
            assert noted.hurried
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and signal.getsignal(signal.SIGINT) is before[1]
    finally:
        signal.signal(signal.SIGHUP, before[0])
