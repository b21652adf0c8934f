"""`compare --baseline`: arguments, exit status and output."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

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
    # Runs of a script's own mixed precision are added to the levels that are asked for.
    page.write(compare(O0, seeds("O2", 1.0, 2.0), seeds("native", 1.0, 2.0)), report.parent)
    args = parsed("--baseline", str(report), "train.py")
    assert compare_baseline.read(args) is not None and args.levels == "O0,O2"


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
    assert f"no worse than in {report}: O2" in capsys.readouterr().out


def told(before, now, args, capsys) -> tuple[int, str]:
    return compare_baseline.tell(before, now, args), capsys.readouterr().out


def test_what_was_not_compared_is_named(report, capsys):
    args = parsed("--baseline", str(report), "train.py")
    base, o2, o4 = seeds("O0", 1.0, 2.0, 3.0), seeds("O2", 1.0, 2.0, 3.0), seeds("O4", 1.0, 2.0, 3.0)
    status, said = told(compare(base, o2), compare(base, o2, o4), args, capsys)
    assert status == 0 and f"no worse than in {report}: O2\n" in said and f"not compared: O4: not in {report}" in said
    # One seed, whose losses are not the same: nothing is known of the gap.
    moved = seeds("O2", 1.3)
    status, said = told(compare(base[:1], o2[:1]), compare(base[:1], moved), args, capsys)
    assert status == 1 and "not compared: O2: one seed says nothing of its gap" in said and "no worse" not in said
    assert told(compare(base[:1], o2[:1]), compare(base, *[seeds("O2", 1.3, 2.0, 3.0)]), args, capsys)[0] == 1
    # The same losses, to the bit, are compared.
    assert told(compare(base[:1], o2[:1]), compare(base[:1], o2[:1]), args, capsys)[0] == 0
    status, said = told(compare(base, o2), compare(base, o4), args, capsys)
    assert status == 3 and f"worse than in {report}: O2: the level was not trained" in said


def test_seeds_that_decide_nothing_are_told(report, capsys):
    args = parsed("--baseline", str(report), "train.py")
    base, o2 = seeds("O0", 1.0, 2.0, 3.0), seeds("O2", 1.0, 2.0, 3.0)
    status, said = told(compare(base, o2), compare(base, seeds("O2", 1.2, 1.8, 3.0)), args, capsys)
    assert status == 0 and "not decided: O2 after 3 seeds: its gap has grown by 0 %" in said
    assert "take a larger margin, more steps or more seeds" in said and "no worse" not in said


def test_another_script_or_machine_is_named(report, capsys):
    args = parsed("--baseline", str(report), "train.py")
    base, o2 = seeds("O0", 1.0, 2.0, 3.0), seeds("O2", 1.0, 2.0, 3.0)
    before = compare(base, o2, machine={"cpu": "old", "torch": "2.9"})
    now = replace(compare(base, o2, machine={"cpu": "new", "torch": "2.9"}), title="train.py --lr 1")
    status, said = told(before, now, args, capsys)
    assert status == 0
    assert f"Note: {report} is of train.py, this is train.py --lr 1\n" in said
    assert f"Note: {report} has the cpu old, this has new\n" in said and "torch" not in said


def mutations(report: Any) -> Iterator[Any]:
    """Yield copies of a report in which one value has another type."""

    def places(value, *path):
        yield path
        pairs = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
        for key, each in pairs:
            yield from places(each, *path, key)

    for path in places({name: report[name] for name in ("runs", "title", "metric", "machine", "margin", "min_gain")}):
        if len(path) < 1:
            continue
        for value in (None, "x", -1, [], {}, [None], True):
            changed = copy.deepcopy(report)
            owner = changed
            for key in path[:-1]:
                owner = owner[key]
            owner[path[-1]] = value
            yield changed


def test_a_report_with_another_type_in_a_field_is_refused_or_read(report, capsys):
    whole = json.loads(report.read_text())
    args = parsed("--baseline", str(report), "train.py")
    now, refused = compare(O0, seeds("O2", 1.0, 2.0, masters=8000)), 0
    for changed in mutations(whole):
        report.write_text(json.dumps(changed))
        try:
            before = compare_baseline.read(parsed("--baseline", str(report), "train.py"))
        except ValueError as error:
            refused += "--baseline" in str(error)
            continue
        compare_baseline.tell(before, now, args)
    assert refused > 300


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
    assert "no worse than in first/report.json: O5" in capsys.readouterr().out
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
