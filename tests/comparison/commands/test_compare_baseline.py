"""`compare --baseline`: arguments, exit status and output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from compared_runs import compare, parsed, seeds

from amp_patch.__main__ import main
from amp_patch.comparison import page
from amp_patch.comparison.commands import compare_baseline

O0 = seeds("O0", 1.0, 2.0)


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """A report.json of O0 and O2 with two seeds and 40 steps."""
    page.write(compare(O0, seeds("O2", 1.0, 2.0, masters=8000), asked_steps=40), tmp_path)
    return tmp_path / "report.json"


def test_levels_seeds_and_steps_are_those_of_the_baseline(report):
    args = parsed("--baseline", str(report), "train.py")
    assert compare_baseline.read(args) is not None
    assert (args.levels, args.seeds, args.steps) == ("O0,O2", 2, 40)
    args = parsed("--baseline", str(report), "--levels", "O2,O4", "--seeds", "3", "train.py")
    compare_baseline.read(args)
    assert (args.levels, args.seeds) == ("O2,O4", 3)
    args = parsed("train.py")
    assert compare_baseline.read(args) is None and args.levels is None


@pytest.mark.parametrize(("given", "message"), [
    (["--baseline", "REPORT", "--quick"], "--quick contradicts it"),
    (["--baseline", "absent.json"], "has no comparison"),
    (["--baseline", "EMPTY"], "wanted the report.json"),
])  # fmt: skip
def test_bad_arguments_end_with_status_2_before_a_run(given, message, report, capsys, monkeypatch):
    monkeypatch.chdir(report.parent)
    (report.parent / "empty.json").write_text("{}")
    Path("train.py").write_text("raise SystemExit(9)\n")
    files = {"REPORT": str(report), "EMPTY": "empty.json"}
    with pytest.raises(SystemExit) as ended:
        main(["compare", *(files.get(each, each) for each in given), "train.py"])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_regression_is_printed_and_gives_status_3(report, capsys):
    before = compare(O0, seeds("O2", 1.0, 2.0, masters=8000))
    args = parsed("--baseline", str(report), "train.py")
    assert compare_baseline.tell(before, compare(O0, seeds("O2", 1.0, 2.0)), args) == 3
    assert f"worse than in {report}: O2: masters: 0 bytes, and 8,000 before" in capsys.readouterr().out
    assert compare_baseline.tell(before, before, args) == 0
    assert f"no level is worse than in {report}" in capsys.readouterr().out


SCRIPT = """
import torch
from amp_patch import amp

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(4):
    optimizer.zero_grad()
    with amp.scale_loss(model(torch.ones(2, 8)).float().pow(2).mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
"""


@pytest.mark.program
def test_a_comparison_that_is_worse_than_its_baseline_ends_with_status_3(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    main(["compare", "--levels", "O5", "--seeds", "1", "--out", "first", "train.py"])
    main(["compare", "--resume", "first", "--baseline", "first/report.json"])
    assert "no level is worse than in first/report.json" in capsys.readouterr().out
    older = json.loads(Path("first/report.json").read_text())
    for run in older["runs"]:
        run["weights"] += 128  # as if a layer had been kept in FP32
    Path("older.json").write_text(json.dumps(older))
    with pytest.raises(SystemExit) as ended:
        main(["compare", "--baseline", "older.json", "--seeds", "3", "--out", "second", "train.py"])
    assert ended.value.code == 3
    printed = capsys.readouterr().out
    assert "O5: weights: " in printed
    assert "every level is decided with seed 0: other seeds are not tried" in printed
    assert not Path("second/runs/O5-seed1.jsonl").exists()
