"""Scripts that fail at once, never end, or ignore signals: `compare` ends cleanly, and resumes later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from paths import ROOT
from scripts import SECONDS, in_folder, start_script, wait_until, wait_until_left

from amp_patch.diagnose.recording.run import OVERDUE, Run, loads

pytestmark = pytest.mark.slow

TRAINS = """
import sys, threading, time
import torch

net = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

def step(micro=1):
    for _ in range(micro):
        net(torch.ones(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
# Scripts that would never end.
ENDLESS = {
    "a loop": "while True:\n    step()",
    "accumulation": "while True:\n    step(micro=4)",
    "a bare except": "while True:\n    try:\n        step()\n    except:\n        time.sleep(0.01)",
    "a thread": "def run():\n    while True:\n        step()\nthreading.Thread(target=run).start()\ntime.sleep(600)",
    "a crash behind them": "try:\n    while True:\n        step()\nexcept SystemExit:\n    undefined",
}
# A script that waits after its third step, and ignores Ctrl-C.
STUBBORN = (
    TRAINS
    + """
import os, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
for number in range(5):
    step()
    if number == 2 and os.path.exists("wait") and not os.path.exists(f"waiting{os.getpid()}"):
        open("waiting", "w").close()
        time.sleep(600)
"""
)


def compare(*given: str) -> list[str]:
    return ["-m", "amp_patch", "compare", "--levels", "O0,O4", *given]


def runs_of(folder: Path) -> list[Run]:
    return [Run.from_dict(run) for run in loads((folder / "amp_compare" / "report.json").read_text())["runs"]]


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        (
            "open('data/input.txt')",
            "FileNotFoundError: [Errno 2] No such file or directory: 'data/input.txt' (train.py, line 2",
        ),
        (
            "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--data', required=True)\n"
            "parser.parse_args()",
            "the script exited with status 2: train.py: error: the following arguments are required: --data (train.py",
        ),
        (
            r"import sys; print('\r 50 %\x1b[31m\x1b]0;title\x07', flush=True); sys.exit('\x1b[1mno\x1b[0m data')",
            "saying no data (train.py, line 2",
        ),
    ],
)
def test_a_script_that_fails_at_once_is_started_once_and_its_error_printed_once(fails, said, tmp_path):
    script = f"open('begun', 'a').write('.')\n{fails}\n"
    done = start_script(tmp_path, script, *compare())
    assert done.returncode == 1 and (tmp_path / "begun").read_text() == "."
    assert done.stderr.startswith("compare: train.py has failed at O0, before its first step: ")
    assert said in done.stderr and done.stderr.count("\n") == 1
    assert f"see {Path('amp_compare/runs/O0-seed0.log')}" in done.stderr
    assert "\x1b" not in done.stderr + done.stdout and "failed" not in done.stdout


@pytest.mark.parametrize("kind", ENDLESS)
def test_every_loop_is_ended_after_the_steps_asked_for(kind, tmp_path):
    done = start_script(tmp_path, TRAINS + ENDLESS[kind], *compare("--seeds", "1", "--steps", "4"))
    assert done.returncode == 0, done.stdout + done.stderr
    o0, o4 = runs_of(tmp_path)
    assert (o0.steps, o0.error, o4.steps, o4.error) == (4, None, 4, None) and o0.weights == 40
    went_on = ["the script ran on after the 4 steps asked for, and was ended"]
    assert o0.notes == (went_on if kind in ("a bare except", "a thread") else [])


def test_a_step_that_never_ends_at_a_level_is_ended_and_the_report_says_so(tmp_path):
    """As an adaptive solver that cannot meet its tolerance in BF16. Other seeds of that level are not tried."""
    waits = "while net.weight.dtype is torch.bfloat16:\n        time.sleep(0.01)"
    script = f"{TRAINS}\nfor number in range(6):\n    step()\n    {waits}\n"
    sooner = (
        "import sys; from amp_patch import __main__; from amp_patch.comparison.commands import long_steps as limits; "
        "limits.OVERDUE_SECONDS, limits.OVERDUE_TIMES = 2.0, 0; __main__.main()"
    )
    done = start_script(tmp_path, script, "-c", sooner, "compare", "--levels", "O0,O5,O4", "--seeds", "2")
    assert "A loop that ends by a tolerance" in done.stdout and "keep_fp32=" in done.stdout, done.stdout + done.stderr
    found = [(run.level, run.seed, run.steps, run.error_kind) for run in runs_of(tmp_path)]
    assert found == [("O0", 0, 6, ""), ("O5", 0, 1, OVERDUE), ("O4", 0, 6, ""), ("O0", 1, 6, ""), ("O4", 1, 6, "")]


def test_a_second_signal_ends_a_stubborn_run_and_resume_makes_the_missing_ones(tmp_path):
    """The report has the runs that were made."""
    (tmp_path / "train.py").write_text(STUBBORN)
    (tmp_path / "wait").touch()
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *compare("--seeds", "2", "train.py")]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            wait_until(lambda: (tmp_path / "waiting").exists() or process.poll() is not None)
            process.send_signal(signal.SIGINT)
            begun = time.monotonic()
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            printed, _ = process.communicate(timeout=SECONDS)
            took = time.monotonic() - begun
            wait_until_left(tmp_path)
        finally:
            for pid in (process.pid, *in_folder(tmp_path)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    assert process.returncode == 130 and took < 60
    assert "interrupted: what trains has 5 seconds to end; again, and it is ended now" in printed
    assert "Only O0" in printed or "Nothing to compare" in printed
    assert (
        "python -m amp_patch compare --resume amp_compare" in printed
        and (tmp_path / "amp_compare/report.html").exists()
    )
    (run,) = runs_of(tmp_path)  # it was killed, and its record has the steps that it had flushed
    assert run.level == "O0" and 1 <= run.steps <= 3 and run.error == f"interrupted after {run.steps} steps"
    (tmp_path / "wait").unlink()
    done = start_script(tmp_path, STUBBORN, "-m", "amp_patch", "compare", "--resume", "amp_compare")
    assert done.returncode == 0, done.stdout + done.stderr
    runs = runs_of(tmp_path)
    assert [(run.level, run.seed, run.steps, run.error) for run in runs] == [
        (level, seed, 5, None) for seed in (0, 1) for level in ("O0", "O4")
    ]
