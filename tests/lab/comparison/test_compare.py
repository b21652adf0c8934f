"""`python -m amp_patch compare` and `amp.compare`: levels and seeds, errors as rows, Ctrl-C, the state left behind."""

from __future__ import annotations

import io
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from paths import ROOT
from recordings import read_lines
from torch import nn
from training import ADAM, ConvNet, convnet, images, train

from amp_patch import amp
from amp_patch.__main__ import main
from amp_patch.casts import install
from amp_patch.lab.commands import compare, compare_progress
from amp_patch.lab.commands.compare_child import add_events
from amp_patch.lab.commands.compare_progress import Progress
from amp_patch.lab.comparison.other_work import OtherWork
from amp_patch.lab.comparison.outcome import failure
from amp_patch.lab.comparison.plan import Plan
from amp_patch.lab.comparison.seeds import seeded
from amp_patch.lab.recording.recorder import Enough, Recorder
from amp_patch.lab.recording.run import EXITED, INTERRUPTED, KILLED, OUT_OF_MEMORY, PARTS, Failure, Run, dumps, loads
from amp_patch.training.training import newest_training

# Draws from every kind of generator that a script has, and prints what it drew and its losses, to the bit.
SCRIPT = """
import random, sys
import torch
from amp_patch import amp

torch.manual_seed(7)
random.seed(7)
held_out = torch.randn(4, generator=torch.Generator().manual_seed(3)).sum().item()
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
for step in range(int(sys.argv[1])):
    loss = model(torch.randn(8, 4)).square().mean() * (1 + random.random())
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    print(loss.item().hex())
print("held out", held_out)
amp.log(held_out=held_out)
"""


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """The package under test is what the child processes find."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    for name in ("AMP_PATCH_OPT_LEVEL", "AMP_PATCH_DTYPE", "AMP_PATCH_SEED"):
        monkeypatch.delenv(name, raising=False)


def runs_of(folder: Path) -> list[Run]:
    return [Run.from_dict(run) for run in loads((folder / "report.json").read_text())["runs"]]


def recorded(folder: Path, name: str) -> list[float]:
    run = Run("?")
    for event in read_lines((folder / "runs" / f"{name}.jsonl").read_text().splitlines()):
        run.add(event)
    return run.loss


@pytest.mark.parametrize("seeds", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_script_at_two_levels(seeds, tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    main(["compare", "train.py", "--levels", "O0,O2", "--seeds", str(seeds), "--", "6"])

    out = tmp_path / "amp_compare"
    runs = runs_of(out)
    names = [f"{level}-seed{seed}" for seed in range(seeds) for level in ("O0", "O2")]
    assert [f"{run.level}-seed{run.seed}" for run in runs] == names
    assert [(run.dtype, run.error, run.steps) for run in runs] == [(None, None, 6), ("float16", None, 6)] * seeds
    logs = [(out / "runs" / f"{name}.log").read_text().split("\n") for name in names]

    # O0 at seed 0 is the script as it is, to the bit.
    environment = {**os.environ, "AMP_PATCH_OPT_LEVEL": "O0"}
    plain = subprocess.run([sys.executable, "train.py", "6"], env=environment, capture_output=True, text=True)
    assert plain.stdout.split("\n") == logs[0] and len(logs[0]) == 8
    assert recorded(out, "O0-seed0") == runs[0].loss == [float.fromhex(line) for line in logs[0][:6]]

    # A seed is another training for all levels, which start alike; the script's own generators stay.
    for o0, o2 in zip(runs[::2], runs[1::2], strict=True):
        assert o0.loss[0] == pytest.approx(o2.loss[0], rel=1e-2) and o0.loss != o2.loss
    if seeds > 1:
        assert abs(runs[0].loss[0] / runs[2].loss[0] - 1) > 0.05
    assert {log[6] for log in logs} == {plain.stdout.split("\n")[6]}
    assert all(run.logged["held_out"] == [(6, float(logs[0][6].split()[2]))] for run in runs)

    printed = capsys.readouterr().out
    words = {f"{run.level} seed {run.seed}" for run in runs}
    assert {line.split(":")[0] for line in printed.splitlines()[: len(words)]} == words
    assert f"report: {Path('amp_compare/report.html')}" in printed
    assert "train.py 6" in (out / "report.html").read_text()


# What it does depends on level and seed. All but O0 and O4 of seed 0 go wrong.
MISBEHAVES = """
import os, signal, sys
import torch
from amp_patch import amp

case = os.environ["AMP_PATCH_OPT_LEVEL"] + os.environ["AMP_PATCH_SEED"]
steps = 10
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if case == "O20":
    raise ValueError("two\\nlines")
if case == "O30":
    sys.exit(3)
if case != "O10":
    model, optimizer = amp.initialize(model, optimizer, enabled=case != "O11", verbosity=0)
if case in ("O10", "O50"):
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    sys.exit()
if case == "O40":
    steps = 4
if case == "O21":
    raise MemoryError
if case == "O51":
    sys.stdin.readline()
    print("the last words", flush=True)
    os._exit(5)
for step in range(steps):
    loss = model(torch.ones(8, 4)).square().mean()
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    if step == 2 and case == "O31":
        torch.empty(2**60, dtype=torch.uint8)
    if step == 2 and case == "O41":
        os.kill(os.getpid(), signal.SIGKILL)
    if step == 2 and case == "O01":
        os.kill(os.getpid(), signal.SIGINT)
assert case in ("O40", "O11"), "never reached: --steps ends the script before"
"""


@pytest.mark.slow
def test_what_goes_wrong_is_a_row_and_the_others_go_on(tmp_path, capsys):
    (tmp_path / "train.py").write_text(MISBEHAVES)
    out = tmp_path / "out"
    given = ["--levels", "O0,O1,O2,O3,O4,O5", "--seeds", "2", "--steps", "7", "--out", str(out)]
    main(["compare", *given, str(tmp_path / "train.py")])
    runs = {f"{run.level}{run.seed}": run for run in runs_of(out)}
    errors = {case: run.error for case, run in runs.items()}
    assert errors["O00"] is None and runs["O00"].steps == 7
    assert errors["O40"] is None and runs["O40"].steps == 4
    assert errors["O10"].startswith("the script never called amp.initialize (or with enabled=False only")
    assert errors["O11"] == errors["O10"].replace("O1-seed0", "O1-seed1")
    assert errors["O20"] == f"ValueError: two lines (see {Path('runs/O2-seed0.log')})"
    assert errors["O30"].startswith("the script exited with status 3 (see")
    assert errors["O50"].startswith("the script never called amp.scale_loss")
    assert errors["O21"].startswith("out of memory: MemoryError")
    assert errors["O31"].startswith("out of memory: RuntimeError: ") and runs["O31"].steps == 3
    assert errors["O41"].startswith("killed by signal 9 (SIGKILL), perhaps for memory")
    assert errors["O51"].startswith("exit status 5: the last words")
    assert errors["O01"].startswith("interrupted after 3 steps")
    kinds = {name: run.error_kind for name, run in runs.items() if run.error_kind}
    memory = dict.fromkeys(("O21", "O31"), OUT_OF_MEMORY)
    assert kinds == {"O30": EXITED, **memory, "O41": KILLED, "O01": INTERRUPTED}
    printed = capsys.readouterr().out
    assert "O4 seed 0: 4 of 7 steps" in printed and "O3 seed 0: failed: the script exited with status 3" in printed
    assert "ValueError: two" in (out / "runs" / "O2-seed0.log").read_text()


LEAVES = """
import os, sys
import torch
from amp_patch import amp

model = torch.nn.Linear(4, 2)
model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), verbosity=0)
for step in range(7):
    with amp.scale_loss(model(torch.ones(8, 4)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
if os.environ["AMP_PATCH_OPT_LEVEL"] == "O0":
    os._exit(0)
if os.fork() == 0:
    sys.exit(5)
os.wait()
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_process_that_leaves_in_silence_has_an_error_and_one_that_forks_has_none(tmp_path):
    (tmp_path / "train.py").write_text(LEAVES)
    given = ["--levels", "O0,O1", "--seeds", "1", "--out", str(tmp_path), str(tmp_path / "train.py")]
    with pytest.raises(SystemExit) as exit_:
        main(["compare", *given])
    left, forked = runs_of(tmp_path)
    assert exit_.value.code == 1 and left.error.startswith(f"the recording breaks off after {left.steps} steps: ")
    assert forked.error is None and forked.steps == 7


def test_a_line_that_a_full_disk_has_cut_is_left_out():
    run = Run("O2")
    line = dumps({"event": "note", "text": "seen"}).encode()
    assert add_events(run, line[:9] + line + b"\n" + line + b"\n" + line[:9]) == line[:9]
    assert run.notes == ["seen"]


@pytest.mark.slow
def test_nothing_to_compare_is_an_error(tmp_path, capsys):
    (tmp_path / "train.py").write_text(MISBEHAVES)
    given = ["--levels", "O0,O2", "--seeds", "1", "--steps", "3", "--out", str(tmp_path), str(tmp_path / "train.py")]
    with pytest.raises(SystemExit) as exit_:
        main(["compare", *given])
    assert exit_.value.code == 1 and [run.steps for run in runs_of(tmp_path)] == [3, 0]
    # A metric that nobody logged.
    (tmp_path / "train.py").write_text(SCRIPT)
    with pytest.raises(SystemExit) as exit_:
        main(["compare", "--metric", "accuracy", *given[:4], *given[6:], "--", "3"])
    assert exit_.value.code == 1 and [run.steps for run in runs_of(tmp_path)] == [3, 3]
    printed = " ".join(capsys.readouterr().out.split())
    assert "accuracy" in printed and "held_out" in printed


SEED_FLAG = """
import argparse, random
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int)
parser.add_argument("--lr", type=float)
args = parser.parse_args()
unseeded = random.random(), torch.rand(()).item()
from apex import amp
torch.manual_seed(100 + args.seed)
print(args.lr, args.seed, torch.initial_seed(), __name__, *unseeded)
model = torch.nn.Linear(2, 2, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), args.lr)
model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
with amp.scale_loss(model(torch.ones(1, 2, device="cuda")).sum(), optimizer) as scaled_loss:
    scaled_loss.backward()
optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize("call", ["torch.zeros(1, device='cuda')", "torch.cuda.set_device(0)"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="it goes well where CUDA is")
def test_a_script_that_wants_cuda_is_told_of_the_cpu(call, tmp_path, capsys):
    (tmp_path / "train.py").write_text(f"import torch; {call}")
    with pytest.raises(SystemExit):
        main(["compare", "--levels", "O0,O2", "--seeds", "1", "--out", str(tmp_path), str(tmp_path / "train.py")])
    assert all("; --device cpu takes the CPU instead (see" in run.error for run in runs_of(tmp_path))


@pytest.mark.slow
def test_an_apex_module_with_a_seed_option_and_without_a_gpu(tmp_path, monkeypatch):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(SEED_FLAG)
    monkeypatch.chdir(tmp_path)
    given = ["--levels", "O0,O5", "--seeds", "2", "--seed-flag", "--seed", "--device", "cpu", "-m", "package.train"]
    main(["compare", *given, "--", "--lr", "0.5"])
    logs = {log.stem: log.read_text().splitlines() for log in (tmp_path / "amp_compare" / "runs").glob("*.log")}
    lines = {name: next(line for line in log if "__main__" in line).split() for name, log in logs.items()}
    assert lines["O0-seed0"][:4] == ["0.5", "0", "100", "__main__"]
    assert lines["O5-seed1"][:4] == ["0.5", "1", "101", "__main__"]
    assert lines["O0-seed1"] == lines["O5-seed1"] and lines["O0-seed0"][4:] != lines["O0-seed1"][4:]
    assert [run.dtype for run in runs_of(tmp_path / "amp_compare")] == [None, "bfloat16"] * 2


WAITS = """
import os, sys, time
import torch
from amp_patch import amp
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, verbosity=0)
for step in range(10):
    if step == 2 and os.environ["AMP_PATCH_OPT_LEVEL"] == sys.argv[1]:
        open("waiting", "w").close()
        time.sleep(600)
    with amp.scale_loss(model(torch.ones(8, 4)).square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("waits_at", "code"), [("O4", 0), ("O1", 130)])
def test_an_interrupt_keeps_what_has_finished(tmp_path, waits_at, code):
    (tmp_path / "train.py").write_text(WAITS)
    command = [sys.executable, "-m", "amp_patch", "compare", "--levels", "O0,O1,O4,O5", "--seeds", "1"]
    command += ["train.py", "--", waits_at]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, start_new_session=True) as compare:
        try:
            while not (tmp_path / "waiting").exists() and compare.poll() is None:
                time.sleep(0.05)
            os.killpg(compare.pid, signal.SIGINT)
            compare.communicate(timeout=120)
        finally:
            if compare.poll() is None:
                os.killpg(compare.pid, signal.SIGKILL)
    assert compare.returncode == code
    runs = runs_of(tmp_path / "amp_compare")
    # The others have taken a step at least before that one waits, or are done; it has kept its turn by its file.
    steps = {run.level: run.steps for run in runs}
    assert list(steps) == ["O0", "O1", "O4", "O5"] and steps[waits_at] == 2 and steps["O0"] == 10
    assert (steps["O1"] == 10) is (waits_at == "O4") and 1 <= steps["O5"] <= 10
    for run in runs:
        assert run.error == (None if run.steps == 10 else f"interrupted after {run.steps} steps")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--levels", "O0,02"], "level '02' is none of O0, O1, O2, O3, O4, O5 (the letter O, not zero)"),
        (["--levels", "O0,O1,O0"], "O0 is in levels twice"),
        (["--levels", "O0"], "levels is O0; wanted one beside O0"),
        (["--seeds", "0"], "seeds is 0; wanted a positive integer"),
        (["--seeds", "1000000000"], "seeds is 1000000000; wanted at most 1000"),
        (["--steps", "-1"], "steps is -1; wanted a positive integer"),
        (["--dtype", "half"], "dtype is 'half'; wanted float16 or bfloat16"),
        (["--seeds", "many"], "invalid int value"),
        (["-m", "missing.py", "theirs"], "unrecognized arguments: theirs; the script's own go after --"),
        (["--epochs", "3"], "unrecognized arguments: --epochs 3; the script's own go after --"),
        (["--levels", "O0", "O2"], "levels are given as O0,O2"),
    ],
)
def test_arguments_that_cannot_be_are_refused_before_anything_runs(given, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("open('ran', 'w')")
    with pytest.raises(SystemExit) as exit_:
        main(["compare", *(["train.py"] if "-m" not in given else []), *given, "--", "--levels", "theirs"])
    assert exit_.value.code == 2 and message in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["train.py"]


def test_a_script_that_is_not_there_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        main(["compare", "missing.py"])
    assert exit_.value.code == 2 and "no 'missing.py' here" in capsys.readouterr().err


def finished(level, seed):
    times = {part: [0.1] * 10 for part in PARTS}
    losses = [1.0 + 0.1 * seed] * 10
    steps = {"scale": [1.0] * 10, "skipped": [False] * 10, "samples": [8] * 10}
    return Run(level, seed, device="cpu", loss=losses, seconds=[0.5] * 10, parts=times, **steps)


def measured(*_) -> tuple[list[Run], bool, OtherWork]:
    """What three seeds gave, on a machine that had other work."""
    load = OtherWork()
    load.add(10.0, 10.0 * load.cores, 5.0)
    return [finished(level, seed) for seed in range(3) for level in ("O0", "O2")], False, load


def test_a_terminal_without_the_letters_has_the_table_and_the_report(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("")
    monkeypatch.setattr(compare, "_measure", measured)
    monkeypatch.setattr(sys, "stdout", terminal := io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    main(["compare", "--levels", "O0,O2", "--seeds", "3", "--out", str(tmp_path), str(tmp_path / "train.py")])
    terminal.seek(0)
    printed = " ".join(terminal.read().split())
    assert "report.html" in printed and (tmp_path / "report.html").exists()
    cores = OtherWork().cores
    assert f"Note: other work took {cores - 0.5:.1f} of" in printed and "the losses are not touched by it" in printed


def test_a_report_that_cannot_be_written_leaves_the_table(tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text("")
    (tmp_path / "report.json").mkdir()
    monkeypatch.setattr(compare, "_measure", measured)
    with pytest.raises(SystemExit) as exit_:
        main(["compare", "--levels", "O0,O2", "--out", str(tmp_path), str(tmp_path / "train.py")])
    printed = capsys.readouterr().out
    assert exit_.value.code == 1 and "O2" in printed and "report: not written: [Errno" in printed


def test_importing_amp_patch_brings_no_tensorboard():
    code = "import sys, amp_patch; print('tensorboard' in sys.modules)"
    ran = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert (ran.stdout, ran.stderr) == ("False\n", "")


# --- the parts ---


def draws() -> list[float]:
    return [random.random(), torch.rand(()).item()]


def test_a_seed_moves_what_the_body_seeds_and_is_gone_afterwards():
    def body(seed: int, **how: bool) -> tuple[list[float], list[float], int, int]:
        with seeded(seed, **how):
            unseeded = draws()
            torch.manual_seed(5)
            random.seed(5)
            own = torch.Generator().manual_seed(5).initial_seed()
            return unseeded, draws(), torch.initial_seed(), own

    functions = torch.manual_seed, torch.random.manual_seed, torch.cuda.manual_seed_all, random.seed
    torch.manual_seed(1)
    random.seed(1)
    following = draws()
    torch.manual_seed(1)
    random.seed(1)
    zero, one, again, unmoved = body(0), body(1), body(1), body(1, shift=False)
    assert draws() == following
    assert functions == (torch.manual_seed, torch.random.manual_seed, torch.cuda.manual_seed_all, random.seed)
    assert one == again
    assert [zero[2], one[2], unmoved[2]] == [5, 5 + 1_000_003, 5]
    assert [zero[3], one[3], unmoved[3]] == [5, 5, 5]
    assert zero[0] != one[0] == unmoved[0] and zero[1] == unmoved[1] != one[1]
    assert all(a != b for a, b in zip(zero[1], one[1], strict=True))


def test_numpy_is_seeded_where_it_is_there():
    numpy = pytest.importorskip("numpy")
    numpy.random.seed(1)
    following = numpy.random.rand()
    numpy.random.seed(1)
    seen = []
    for seed in (0, 1, 1):
        with seeded(seed):
            unseeded = numpy.random.rand()
            numpy.random.seed(2**32 - 1)
            seen.append((unseeded, numpy.random.rand()))
    assert numpy.random.rand() == following
    assert seen[0][0] != seen[1][0] and seen[0][1] != seen[1][1] and seen[1] == seen[2]


def failed_with(error: BaseException | None, steps: int = 0) -> Failure | None:
    run = Run("O2", loss=[1.0] * steps)
    recorder = Recorder([])
    recorder.enabled, recorder.losses = True, 1
    return failure(recorder, run, error)


def test_why_a_run_failed_is_said_in_one_line():
    assert failed_with(None, 3) is failed_with(Enough(), 3) is failed_with(SystemExit(), 3) is None
    assert failed_with(SystemExit(0)).words.startswith("the script never called optimizer.step()")
    assert failed_with(SystemExit("bad\nluck"), 3) == ("the script exited saying bad luck", "")
    assert failed_with(SystemExit(3), 3) == ("the script exited with status 3", EXITED)
    assert failed_with(KeyboardInterrupt(), 3) == ("interrupted after 3 steps", INTERRUPTED)
    memory = failed_with(torch.OutOfMemoryError("CUDA"))
    assert memory == ("out of memory: torch.OutOfMemoryError: CUDA", OUT_OF_MEMORY)
    assert failed_with(RuntimeError("can't")) == ("RuntimeError: can't", "")
    assert failed_with(SyntaxError("wrong", ("f.py", 3, 1, "x ="))).words == "SyntaxError: wrong"
    assert len(failed_with(KeyError("x " * 1000)).words) <= 300
    noted = ValueError("first")
    noted.__notes__ = ["second"]
    assert failed_with(noted).words == "ValueError: first"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [True, False])
def test_progress(terminal, monkeypatch):
    monkeypatch.setattr(compare_progress, "_SECONDS", 0.0)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys, "stdout", out := Terminal() if terminal else io.StringIO())
    runs = Plan(("O0", "O2"), seeds=2, steps=40).runs()
    progress = Progress(runs, 40)
    progress.show(runs[0])
    runs[0].loss, runs[0].seconds = [0.5] * 30, [0.002] * 30
    progress.show(runs[0])
    progress.end(runs[0])
    progress.show(runs[1])
    runs[1].error = "ValueError: no"
    progress.end(runs[1])
    runs[2].error, runs[2].refused = "three lines to add", True
    progress.end(runs[2])
    shown = [line for line in out.getvalue().replace("\x1b[K", "").replace("\r", "\n").split("\n") if line]
    ended = ["O0 seed 0: 30 of 40 steps, loss 0.5, 2 ms a step", "O2 seed 0: failed: ValueError: no"]
    first = ["0 of 4 runs, O0 seed 0, step 0 of 40", "0 of 4 runs, O0 seed 0, step 30 of 40, loss 0.5, 2 ms a ste"]
    assert shown == ([*first, ended[0], "1 of 4 runs, O2 seed 0, step 0 of 40", ended[1]] if terminal else ended)


# --- amp.compare ---


def built() -> tuple:
    model = convnet()
    return model, ADAM(model.parameters()), nn.functional.cross_entropy, [images(step) for step in range(5)]


def trains(level_seen: list[str] | None = None) -> None:
    model, optimizer, *_ = built()
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    train(model, optimizer, 5)


def test_compare_in_a_notebook_leaves_everything_as_it_was():
    model = convnet(3)
    model, optimizer = amp.initialize(model, ADAM(model.parameters()), opt_level="O2", verbosity=0)
    mine = newest_training()
    alone = train(model, optimizer, 2)
    torch.manual_seed(4)
    following = torch.rand(3)
    torch.manual_seed(4)

    found = amp.compare(built, ["O0", "O1", "O2"], seeds=2)
    assert [(run.level, run.seed, run.steps, run.error) for run in found.runs] == [
        (level, seed, 5, None) for seed in (0, 1) for level in ("O0", "O1", "O2")
    ]
    assert found.comparable and found.title == "built"
    assert [run.dtype for run in found.runs[:3]] == [None, "float16", "float16"]
    # The same training, made by build_fn itself; and without amp_patch.
    itself = amp.compare(trains, ["O0", "O1", "O2"], seeds=2)
    assert [run.loss for run in itself.runs] == [run.loss for run in found.runs]
    assert torch.equal(torch.rand(3), following)
    plain, plain_optimizer, loss_fn, batches = built()
    losses = []
    for inputs, targets in batches:
        plain_optimizer.zero_grad()
        loss = loss_fn(plain(inputs), targets)
        loss.backward()
        plain_optimizer.step()
        losses.append(loss.item())
    assert losses == found.runs[0].loss != found.runs[2].loss and found.runs[3].loss != losses

    assert "AMP_PATCH_OPT_LEVEL" not in os.environ
    assert newest_training() is mine and type(model) is not ConvNet
    again = convnet(3)
    again, again_optimizer = amp.initialize(again, ADAM(again.parameters()), opt_level="O2", verbosity=0)
    assert alone + train(model, optimizer, range(2, 5)) == train(again, again_optimizer, 5)
    amp.restore()
    amp.compare(built, ["O1"], seeds=1)
    assert not install.installed() and newest_training() is None


def test_compare_in_a_notebook_takes_steps_types_and_an_evaluation(capsys):
    modes = []

    def evaluate(model: nn.Module) -> float:
        modes.append((model.training, torch.is_grad_enabled()))
        return model(images(9)[0]).sum().item()

    found = amp.compare(built, ["O2", "O5"], seeds=1, steps=7, dtype=torch.bfloat16, evaluate=evaluate)
    assert [(run.steps, run.dtype) for run in found.runs] == [(7, None), (7, "bfloat16"), (7, "bfloat16")]
    assert modes == [(False, False)] * 3 and found.metric == "evaluation"
    assert all(len(run.logged["evaluation"]) == 1 and run.peak_memory is None for run in found.runs)
    assert found.runs[1].logged == found.runs[2].logged != found.runs[0].logged  # O2 in bfloat16 is O5
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 3 and printed[1].startswith("O2 seed 0: 7 of 7 steps, loss ")
    figures = {"sum": 1, "other": 2.0}
    named = amp.compare(
        built, ["O0", "O2"], seeds=1, metric="sum", evaluate=lambda _: figures, inspect=True, verbosity=0
    )
    assert named.metric == "sum" and named.comparable and capsys.readouterr().out == ""
    assert [[look.step for look in run.looks] for run in named.runs] == [[1], [1]]
    assert [run.steps for run in amp.compare(trains, ["O2"], steps=3).runs] == [3] * 6


def test_errors_in_a_notebook_are_rows_and_an_interrupt_keeps_the_rest():
    def goes_wrong() -> None:
        if os.environ["AMP_PATCH_OPT_LEVEL"] == "O1":
            raise ValueError("at O1")
        if os.environ["AMP_PATCH_OPT_LEVEL"] == "O3":
            sys.exit(3)
        if os.environ["AMP_PATCH_OPT_LEVEL"] == "O4":
            return
        trains()
        if os.environ["AMP_PATCH_OPT_LEVEL"] == "O5":
            raise KeyboardInterrupt

    found = amp.compare(goes_wrong, ["O0", "O1", "O2", "O3", "O4", "O5"], seeds=2)
    assert [(run.level, run.seed, run.steps) for run in found.runs] == [
        ("O0", 0, 5), ("O1", 0, 0), ("O2", 0, 5), ("O3", 0, 0), ("O4", 0, 0), ("O5", 0, 5)
    ]  # fmt: skip
    errors = [run.error for run in found.runs]
    assert errors[0] is errors[2] is None and errors[1] == "ValueError: at O1"
    assert errors[3] == "the script exited with status 3" and "never called amp.initialize" in errors[4]
    assert errors[5] == "interrupted after 5 steps"
    assert found.comparable and "AMP_PATCH_OPT_LEVEL" not in os.environ


def test_a_build_fn_that_cannot_be_is_refused():
    with pytest.raises(TypeError, match="build_fn returned 2 values; wanted"):
        amp.compare(lambda: built()[:2])
    same = built()
    with pytest.raises(ValueError, match="the same model twice"):
        amp.compare(lambda: same)
    with pytest.raises(ValueError, match="'O7' is none of O0"):
        amp.compare(built, ["O0", "O7"])
    with pytest.raises(TypeError, match="levels is 'O0,O2'; wanted a list"):
        amp.compare(built, "O0,O2")
    with pytest.raises(ValueError, match="batches of build_fn gave nothing"):
        amp.compare(lambda: (*built()[:3], []), ["O0", "O2"])
    assert not install.installed() and newest_training() is None and type(same[0]) is ConvNet


def test_a_notebook_shows_the_report():
    found = amp.compare(built, ["O0", "O2"], seeds=1)
    assert repr(found).splitlines()[0] == "built, 5 steps" and repr(found).endswith(found.summary)
    assert found.levels[1].verdict.text in repr(found) and len(repr(found)) < 1000
    shown = found._repr_html_()
    assert shown.startswith("<iframe srcdoc=") and shown.count('"') == 4 and "&lt;" in shown
