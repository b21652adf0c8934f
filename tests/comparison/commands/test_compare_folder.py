"""Interrupted comparisons: resumed and reported from their folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from compared_runs import parsed

from amp_patch.__main__ import main
from amp_patch.comparison.commands import compare, compare_folder
from amp_patch.comparison.commands.compare_arguments import defaults, plan_of
from amp_patch.comparison.other_work import OtherWork
from amp_patch.comparison.plan import Plan
from amp_patch.diagnose.recording.run import INTERRUPTED, KILLED, PARTS, Run, dumps, loads

pytestmark = pytest.mark.program


def record(folder: Path, run: Run, *, ended: bool = True, steps: int = 4) -> None:
    """Write the record of a run as its process does. If it `ended`, add the outcome as `compare` does."""
    step = {"event": "step", "seconds": 0.5, "scale": 1.0, "skipped": False, "samples": 8, "loss": 1.0 + run.seed}
    events = [{"event": "begin", "level": "O1", "dtype": None, "policy": "", "device": "cpu", "lost_eps": None}]
    events += [{**step, "parts": dict.fromkeys(PARTS, 0.1)}] * steps
    path = compare_folder.record_of(folder, run)
    path.write_text("".join(f"{dumps(event)}\n" for event in events) + '{"event": "ste')
    if ended:
        compare_folder.keep_outcome(path, run)


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the folder of a comparison of O0 and O4 with two seeds. Seed 0 has ended; O0 with seed 1 was interrupted."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    args = parsed("train.py", "--levels", "O4", "--seeds", "2", "--out", "out", "--", "--lr", "1")
    compare_folder.prepare(args.out)
    for stale in ("O4-seed1.jsonl", "O4-seed1.log", "kept.txt"):
        (args.out / "runs" / stale).write_text("of an earlier comparison")
    compare_folder.begin(args)
    record(args.out, Run("O0"))
    record(args.out, Run("O4"))
    record(args.out, Run("O0", 1), ended=False, steps=2)
    return args.out


def test_a_folder_restores_the_arguments_and_runs_of_a_comparison(begun):
    assert [path.name for path in (begun / "runs").glob("*.txt")] == ["kept.txt"]
    args = compare_folder.asked_in(begun, defaults())
    assert (args.script, args.levels, args.seeds, args.arguments, args.out) == (
        "train.py",
        "O4",
        2,
        ["--lr", "1"],
        begun,
    )
    runs = compare_folder.runs_in(begun, plan_of(args))
    assert [(run.level, run.seed, run.steps, run.error) for run in runs] == [
        ("O0", 0, 4, None),
        ("O4", 0, 4, None),
        ("O0", 1, 2, "interrupted after 2 steps"),
    ]
    assert [compare_folder.is_finished(run) for run in runs] == [True, True, False]
    assert not compare_folder.is_finished(Run("O0", error="killed", error_kind=KILLED))
    assert compare_folder.is_finished(Run("O0", error="ValueError: no"))


def test_report_rebuilds_the_report_from_the_folder(begun, capsys):
    main(["report", str(begun)])
    printed = capsys.readouterr().out
    assert "Note: 3 of 4 runs" not in printed and "Note: 2 of 4 runs have ended; the others were cut." in printed
    assert f"To make the runs that are missing: python -m amp_patch compare --resume {begun}" in printed
    assert printed.endswith(f"report: {begun / 'report.html'}\n")
    told = loads((begun / "report.json").read_text())
    assert told["title"] == "train.py --lr 1" and [len(run["loss"]) for run in told["runs"]] == [4, 4, 2]
    shutil.rmtree(begun / "runs")
    with pytest.raises(SystemExit) as exit_:
        main(["report", str(begun)])
    assert exit_.value.code == 1 and "there is no run" in capsys.readouterr().out
    with pytest.raises(SystemExit) as exit_:
        main(["report", str(begun / "runs")])
    assert exit_.value.code == 2 and "runs has no comparison that `compare` has begun" in capsys.readouterr().err


def test_resume_makes_only_the_missing_runs(begun, monkeypatch, capsys):
    asked = []

    def measured(plan: Plan, args, interrupts, found, before):
        asked.append((plan, args, found))
        return [*found[:2], *(Run("O0", 1), Run("O4", 1))], 4, 0, OtherWork()

    monkeypatch.setattr(compare, "_measure", measured)
    main(["compare", "--resume", str(begun)])
    ((plan, args, found),) = asked
    assert (plan.levels, plan.seeds, args.arguments, args.script) == (("O0", "O4"), 2, ["--lr", "1"], "train.py")
    assert [(run.level, run.seed, run.error_kind) for run in found] == [
        ("O0", 0, ""),
        ("O4", 0, ""),
        ("O0", 1, INTERRUPTED),
    ]
    assert loads((begun / "compare.json").read_text())["machine"]["threads"]
    main(["compare", "--resume", str(begun), "train.py", "--seeds", "2", "--", "--lr", "1"])
    assert len(asked) == 2, "the same arguments may be given again"


def test_resume_adds_seeds_to_a_comparison(begun, monkeypatch):
    asked = []
    monkeypatch.setattr(
        compare,
        "_measure",
        lambda plan, args, interrupts, found, before: (asked.append((plan, found)), found, 8, 0, OtherWork())[1:],
    )
    main(["compare", "--resume", str(begun), "--seeds", "4"])
    ((plan, found),) = asked
    assert plan.seeds == 4 and [(run.level, run.seed) for run in found] == [("O0", 0), ("O4", 0), ("O0", 1)]
    assert compare_folder.asked_in(begun, defaults()).seeds == 4, "the next one goes on from there"
    # A quick comparison becomes a full comparison of its levels.
    told = loads((begun / "compare.json").read_text())
    quick = {"quick": True, "levels": None, "seeds": None}
    (begun / "compare.json").write_text(dumps({**told, "asked": {**told["asked"], **quick}}))
    main(["compare", "--resume", str(begun), "--seeds", "3"])
    assert (asked[-1][0].levels, asked[-1][0].seeds) == (("O0", "O4", "O5"), 3)
    assert not compare_folder.asked_in(begun, defaults()).quick


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--seeds", "1"], "was begun with --seeds 2, and now there is --seeds 1"),
        (["--seeds", "3", "--metric", "accuracy"], "was begun with --metric loss, and now there is --metric accuracy"),
        (["--metric", "accuracy"], "was begun with --metric loss, and now there is --metric accuracy"),
        (["--out", "other"], "goes on there, and --out other contradicts it"),
        (["other.py"], "was begun with train.py, and now there is other.py"),
        (
            ["--", "--lr", "2"],
            "was begun with the script's arguments --lr 1, and now there is the script's arguments --lr 2",
        ),
    ],
)
def test_resume_refuses_changed_arguments_by_name(given, said, begun, capsys):
    before = (begun / "compare.json").read_text()
    with pytest.raises(SystemExit) as exit_:
        main(["compare", "--resume", str(begun), *given])
    assert exit_.value.code == 2 and said in capsys.readouterr().err
    assert (begun / "compare.json").read_text() == before


def test_resume_refuses_another_script_torch_or_machine_by_name(begun, capsys):
    def refusal() -> str:
        with pytest.raises(SystemExit) as exit_:
            main(["compare", "--resume", str(begun)])
        assert exit_.value.code == 2
        return capsys.readouterr().err

    Path("train.py").write_text("import torch")
    assert "out cannot be continued: the script was train.py (sha256 " in refusal()
    Path("train.py").write_text("")
    told = loads((begun / "compare.json").read_text())
    for name in ("torch", "the processor", "the number of threads", "the working directory"):
        changed = {**told, "with": {**told["with"], name: "another"}}
        (begun / "compare.json").write_text(dumps(changed))
        assert f"out cannot be continued: {name} was another, and is " in refusal()


def test_compare_without_a_script_or_a_folder_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for given, said in (([], "there is no script to run"), (["--resume", "none"], "none has no comparison")):
        with pytest.raises(SystemExit) as exit_:
            main(["compare", *given])
        assert exit_.value.code == 2 and said in capsys.readouterr().err
