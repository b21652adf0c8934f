"""`python -m amp_patch compare` and `amp.compare`: levels and seeds, errors as rows, Ctrl-C, the state left behind."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest
import torch
from compared_runs import importable_fixture  # noqa: F401  the fixture `importable`
from python_forks import python
from recordings import read_lines

from amp_patch.__main__ import main
from amp_patch.comparison.commands import compare
from amp_patch.comparison.commands.compare_folder import add_events
from amp_patch.comparison.other_work import OtherWork
from amp_patch.diagnose.recording.run import EXITED, INTERRUPTED, KILLED, OUT_OF_MEMORY, PARTS, Run, dumps, loads

# Draws from every kind of generator, and prints the drawn numbers and the losses, to the bit.
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


def runs_of(folder: Path) -> list[Run]:
    return [Run.from_dict(run) for run in loads((folder / "report.json").read_text())["runs"]]


def recorded(folder: Path, name: str) -> list[float]:
    run = Run("?")
    for event in read_lines((folder / "runs" / f"{name}.jsonl").read_text().splitlines()):
        run.add(event)
    return run.loss


@pytest.mark.program
@pytest.mark.parametrize("seeds", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_compare_trains_a_script_at_two_levels_and_writes_figures_and_logs(seeds, tmp_path, monkeypatch, capsys):
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
    plain = python("train.py", "6", env=environment)
    assert plain.stdout.split("\n") == logs[0] and len(logs[0]) == 8
    assert recorded(out, "O0-seed0") == runs[0].loss == [float.fromhex(line) for line in logs[0][:6]]

    # Every seed is another training, and all levels of a seed start alike. The script's own generators stay.
    for o0, o2 in zip(runs[::2], runs[1::2], strict=True):
        assert o0.loss[0] == pytest.approx(o2.loss[0], rel=1e-2) and o0.loss != o2.loss
    if seeds > 1:
        assert abs(runs[0].loss[0] / runs[2].loss[0] - 1) > 0.05
    assert {log[6] for log in logs} == {plain.stdout.split("\n")[6]}
    assert all(run.logged["held_out"] == [(6, float(logs[0][6].split()[2]))] for run in runs)

    printed = capsys.readouterr().out
    words = {f"{run.level} seed {run.seed}" for run in runs}
    assert f"{2 * seeds} runs: 2 levels, {seeds} seed" in printed
    assert words <= {line.split(":")[0] for line in printed.splitlines()}
    used = "AMP_PATCH_OPT_LEVEL=O2 python -m amp_patch run train.py 6"
    assert used not in printed, "one seed recommends nothing"
    assert ("6 steps decide nothing: train for at least 30." in " ".join(printed.split())) and "train.py 6" in printed
    assert f"report: {Path('amp_compare/report.html')}" in printed
    assert "train.py 6" in (out / "report.html").read_text()


# Behaves differently for each level and seed. Every run fails but O0 and O4 of seed 0.
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
def test_a_failed_run_becomes_a_row_and_the_other_runs_continue(tmp_path, capsys):
    (tmp_path / "train.py").write_text(MISBEHAVES)
    out = tmp_path / "out"
    given = ["--levels", "O0,O1,O2,O3,O4,O5", "--seeds", "2", "--steps", "7", "--out", str(out)]
    main(["compare", *given, str(tmp_path / "train.py")])
    runs = {f"{run.level}{run.seed}": run for run in runs_of(out)}
    errors = {case: run.error for case, run in runs.items()}
    assert errors["O00"] is None and runs["O00"].steps == 7
    assert errors["O40"] is None and runs["O40"].steps == 4
    assert errors["O10"].startswith("the script never called amp.initialize (or with enabled=False only")
    assert errors["O11"] == errors["O10"] and runs["O11"].log == str(out / "runs/O1-seed1.log")
    assert errors["O20"] == "ValueError: two lines" and runs["O20"].error_where == "train.py, line 11"
    log = out / "runs/O2-seed0.log"
    assert runs["O20"].error_in_full == f"ValueError: two lines (train.py, line 11; see {log})"
    assert errors["O30"] == "the script exited with status 3" and runs["O30"].error_where == "train.py, line 13"
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
def test_a_process_that_exits_early_fails_its_run_and_a_forked_child_does_not(tmp_path):
    (tmp_path / "train.py").write_text(LEAVES)
    given = ["--levels", "O0,O1", "--seeds", "1", "--out", str(tmp_path), str(tmp_path / "train.py")]
    with pytest.raises(SystemExit) as exit_:
        main(["compare", *given])
    left, forked = runs_of(tmp_path)
    assert exit_.value.code == 1 and left.error.startswith(f"the recording breaks off after {left.steps} steps: ")
    assert forked.error is None and forked.steps == 7


def test_a_truncated_line_of_a_recording_is_ignored():
    run = Run("O2")
    line = dumps({"event": "note", "text": "seen"}).encode()
    assert add_events(run, line[:9] + line + b"\n" + line + b"\n" + line[:9]) == line[:9]
    assert run.notes == ["seen"]


@pytest.mark.slow
@pytest.mark.parametrize("call", ["torch.zeros(1, device='cuda')", "torch.cuda.set_device(0)"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="it goes well where CUDA is")
def test_a_script_that_needs_cuda_fails_with_a_hint_at_device_cpu(call, tmp_path, capsys):
    (tmp_path / "train.py").write_text(f"import torch; {call}")
    with pytest.raises(SystemExit):
        main(["compare", "--levels", "O0,O2", "--seeds", "1", "--out", str(tmp_path), str(tmp_path / "train.py")])
    assert capsys.readouterr().err.count("; --device cpu takes the CPU instead (train.py, line 1; see") == 1


@pytest.mark.slow
def test_compare_exits_with_an_error_if_nothing_is_comparable(tmp_path, capsys):
    (tmp_path / "train.py").write_text(MISBEHAVES)
    given = ["--levels", "O0,O2", "--seeds", "1", "--steps", "3", "--out", str(tmp_path), str(tmp_path / "train.py")]
    with pytest.raises(SystemExit) as exit_:
        main(["compare", *given])
    assert exit_.value.code == 1 and [run.steps for run in runs_of(tmp_path)] == [3, 0]
    # A metric that the script does not log.
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
def test_compare_passes_the_seed_option_to_an_apex_module_without_a_gpu(tmp_path, monkeypatch):
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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--quick", "--levels", "O2"], "--quick has levels and seeds of its own, and --levels contradicts it"),
        (["--quick", "--seeds", "3"], "and --seeds contradicts it"),
        (["--quick", "--batch-search", "1GiB"], "and --batch-search contradicts it"),
        (["--levels", "O0,02"], "level '02' is none of O0, O1, O2, O3, O4, O5, O6, O7 (the letter O, not zero)"),
        (["--levels", "O0,O1,O0"], "O0 is in levels twice"),
        (["--levels", "O5+split,O5+split"], "O5+split is in levels twice"),
        (["--levels", "O1+split"], "compare: level 'O1+split' cannot be: O1 has FP32 weights"),
        (["--levels", "O3+8bit"], "compare: level 'O3+8bit' cannot be: initialize: optimizer_state='8bit'"),
        (["--levels", "O2+split"], "'O2+split' cannot be: initialize: master_weights='split' contradicts float16"),
        (["--levels", "O5+split+stochastic"], "has both split and stochastic, which set master_weights; give one"),
        (["--levels", "O5,O5+none"], "level 'O5+none' has 'none' behind its +; wanted fp8, fp8_tensorwise, "),
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
def test_invalid_arguments_are_refused_before_any_run(given, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("open('ran', 'w')")
    with pytest.raises(SystemExit) as exit_:
        main(["compare", *(["train.py"] if "-m" not in given else []), *given, "--", "--levels", "theirs"])
    assert exit_.value.code == 2 and message in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["train.py"]


def test_compare_names_a_missing_script(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        main(["compare", "missing.py"])
    assert exit_.value.code == 2 and "no 'missing.py' here" in capsys.readouterr().err


def finished(level, seed, seconds=0.5):
    times = {part: [0.1] * 10 for part in PARTS}
    losses = [1.0 + 0.1 * seed] * 10
    steps = {"scale": [1.0] * 10, "skipped": [False] * 10, "samples": [8] * 10}
    return Run(level, seed, device="cpu", loss=losses, seconds=[seconds] * 10, parts=times, **steps)


def measured(*_) -> tuple[list[Run], int, int, OtherWork]:
    """Return runs of three seeds on a machine that had other work."""
    load = OtherWork()
    load.add(10.0, 10.0 * load.cores, 5.0)
    return [finished(level, seed) for seed in range(3) for level in ("O0", "O2")], 6, 0, load


def test_an_ascii_terminal_gets_the_table_and_the_report(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("")
    monkeypatch.setattr(compare, "_measure", measured)
    monkeypatch.setattr(sys, "stdout", terminal := io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    main(["compare", "--levels", "O0,O2", "--seeds", "3", "--out", str(tmp_path), str(tmp_path / "train.py")])
    terminal.seek(0)
    printed = " ".join(terminal.read().split())
    assert "report.html" in printed and (tmp_path / "report.html").exists()
    used = f"To use it without an edit: AMP_PATCH_OPT_LEVEL=O2 python -m amp_patch run {tmp_path / 'train.py'}"
    assert used not in printed, "O0 is recommended"
    cores = OtherWork().cores
    assert f"Note: other work took {cores - 0.5:.1f} of" in printed and "Losses and memory are right." in printed


def test_compare_prints_the_table_if_the_report_cannot_be_written(tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text("")
    (tmp_path / "report.json").mkdir()
    monkeypatch.setattr(compare, "_measure", measured)
    with pytest.raises(SystemExit) as exit_:
        main(["compare", "--levels", "O0,O2", "--out", str(tmp_path), str(tmp_path / "train.py")])
    printed = capsys.readouterr().out
    assert exit_.value.code == 1 and "O2" in printed and "report: not written: [Errno" in printed
