"""`python -m amp_patch search`: its folders, its output, and interrupted searches."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
from scripts import start_script

from amp_patch.__main__ import main
from amp_patch.comparison.commands import compare_folder, search
from amp_patch.comparison.other_work import OtherWork
from amp_patch.diagnose.recording.run import PARTS, Run, dumps

MODULES = ["0", "1", "2", "3"]


class Trainings:
    """Stand-in for the trainings: a level passes if module "2" is kept. `made` lists the runs that were made."""

    made: ClassVar[list[tuple[tuple[str, ...], str, int]]] = []
    lost_eps = None
    cut_at = 0  # the number of the run that is interrupted before its start; 0: none

    def __init__(self, plan, args, interrupts, found):
        self.plan, self.args, self.found, self.load, self.asked = plan, args, found, OtherWork(), 0

    def train(self) -> int:
        there = {(run.level, run.seed) for run in self.found}
        for run in self.plan.runs():
            if (run.level, run.seed) not in there:
                if len(self.made) + 1 == self.cut_at:
                    Trainings.cut_at = 0
                    self.runs = compare_folder.runs_in(self.args.out, self.plan)
                    return 130
                self.made.append((self.plan.keep, run.level, run.seed))
                self._record(run)
        self.runs = compare_folder.runs_in(self.args.out, self.plan)
        return 0

    def _record(self, run: Run) -> None:
        worse = 0.0 if run.level == "O0" or "2" in self.plan.keep else 0.5
        step = {"event": "step", "seconds": 0.5, "scale": 1.0, "skipped": False, "samples": 8}
        step |= {"loss": 2 + run.seed / 100 + worse, "parts": dict.fromkeys(PARTS, 0.1)}
        dtype, lost_eps = (None, None) if run.level == "O0" else ("bfloat16", self.lost_eps)
        step |= {"loss": float("nan")} if lost_eps is not None else {}
        begin = {"event": "begin", "level": run.level, "dtype": dtype, "policy": "", "device": "cpu"}
        events = [{**begin, "lost_eps": lost_eps}]
        falling = [{**step, "loss": step["loss"] + 2 * max(0, 30 - i) / 30} for i in range(40)]
        events += [{"event": "modules", "names": MODULES}, *falling]
        path = compare_folder.record_of(self.args.out, run)
        path.write_text("".join(f"{dumps(event)}\n" for event in events))
        compare_folder.keep_outcome(path, run)


def surveyed(folder: Path, *modules: str) -> None:
    """Stand-in for the survey: a line in these modules at O4 and O5."""
    line = {"file": "net.py", "line": 3, "called": "", "op": "div", "levels": ["O4", "O5"], "what": "", "edit": ""}
    report = {"lines": [{**line, "modules": modules}] if modules else []}
    compare_folder.survey_path(folder).write_text(dumps(report))


@pytest.fixture(name="faked", autouse=True)
def faked_fixture(request, monkeypatch, tmp_path):
    if "slow" not in request.keywords:
        monkeypatch.setattr(search, "RunSequence", Trainings)
        monkeypatch.setattr(search, "survey_script", lambda _, args, *__: surveyed(args.out))
    Trainings.made, Trainings.cut_at, Trainings.lost_eps = [], 0, None
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")


def run(*given: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(["search", *given])
    return exit_.value.code or 0


def test_a_search_prints_each_trial_and_the_code_to_paste(capsys):
    assert run("--level", "O4", "train.py", "--", "--lr", "1") == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[:3] for line in shown if line.startswith("trial")] == [
        ["trial 1", "nothing kept", "fails"],
        ["trial 2", "kept 0, 1", "fails"],
        ["trial 3", "kept 0, 1, 2", "passes"],
        ["trial 4", "kept 2", "passes"],
    ]
    assert '    amp.initialize(model, optimizer, opt_level="O4", keep_fp32=["2"])' in shown
    assert "    AMP_PATCH_OPT_LEVEL=O4 AMP_PATCH_KEEP_FP32=2 python -m amp_patch run train.py --lr 1" in shown
    # O0 is trained once.
    assert [made[2] for made in Trainings.made if made[1] == "O0"] == [0, 1, 2]
    assert len(Trainings.made) == 3 * 5


@pytest.mark.parametrize(("modules", "trials"), [
    (["2"], ["nothing kept", "kept 2"]),
    (["0", "2"], ["nothing kept", "kept 0, 2", "kept 0", "kept 2"]),
    (["3"], ["nothing kept", "kept 3", "kept 0, 1", "kept 0, 1, 2", "kept 2"]),
    (["gone"], ["nothing kept", "kept 0, 1", "kept 0, 1, 2", "kept 2"]),
])  # fmt: skip
def test_a_search_tries_the_modules_of_the_survey_first(modules, trials, capsys, monkeypatch):
    monkeypatch.setattr(search, "survey_script", lambda _, args, *__: surveyed(args.out, *modules))
    assert run("--level", "O5", "train.py", "--seeds", "2") == 0
    shown = capsys.readouterr().out
    assert f"the survey of the first step names lines in {', '.join(modules)}: tried first" in shown
    assert [line.split(": ")[1] for line in shown.splitlines() if line.startswith("trial")] == trials
    assert 'keep_fp32=["2"]' in shown


def test_a_search_at_o6_is_not_surveyed(capsys, monkeypatch):
    monkeypatch.setattr(search, "survey_script", lambda _, args, *__: surveyed(args.out, "3"))
    assert run("--level", "O6", "train.py", "--seeds", "2") == 0
    assert "survey" not in capsys.readouterr().out


def test_a_search_ends_at_once_for_a_cause_that_no_module_removes(capsys):
    Trainings.lost_eps = 1e-8
    assert run("--level", "O3", "train.py") == 1
    shown = capsys.readouterr().out
    assert shown.count("trial ") == 1 and len(Trainings.made) == 3 * 2
    reason = "its optimizer's eps 1e-08 is 0 in FP16; take eps=1e-4 or more, or O2"
    assert "O3: keeping modules does not make it as good as O0: diverged with seeds 0, 1 and 2 at step 0" in shown
    assert f"{reason}.\n" in shown and "keep_fp32" not in shown


@pytest.mark.parametrize("cut_at", [2, pytest.param(5, marks=pytest.mark.slow), 9])
def test_an_interrupted_search_resumes_without_repeating_runs(cut_at, capsys):
    Trainings.cut_at = cut_at
    assert run("train.py", "--seeds", "2") == 130
    assert "To continue: python -m amp_patch search --resume amp_search" in capsys.readouterr().out
    assert run("--resume", "amp_search") == 0
    assert len(Trainings.made) == len(set(Trainings.made)) == 2 * 5, "no run is made twice"
    assert 'keep_fp32=["2"]' in capsys.readouterr().out
    # A new search reuses nothing.
    assert run("train.py", "--seeds", "2") == 0 and len(Trainings.made) == 2 * 2 * 5


def test_a_search_with_few_trials_keeps_more_modules_and_resumes(capsys):
    assert run("train.py", "--trials", "4") == 0
    shown = capsys.readouterr().out
    assert "The trials were used up; fewer modules may be enough: continue with --resume and more --trials." in shown
    assert 'keep_fp32=["0", "1", "2"]' in shown
    assert run("--resume", "amp_search", "--trials", "9") == 0 and len(Trainings.made) == 3 * 5
    assert 'keep_fp32=["2"]' in capsys.readouterr().out
    assert run("train.py", "--trials", "3") == 1
    assert "no modules were found" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "search: there is no script to run"),
        (["other.py"], "search: there is no 'other.py' here"),
        (["train.py", "--seeds", "1"], "search: seeds is 1; wanted 2 or more"),
        (["train.py", "--trials", "2"], "search: trials is 2; wanted 3 or more"),
        (["train.py", "--level", "O9"], "search: level 'O9' is none of"),
        (["train.py", "--steps", "0"], "search: steps is 0"),
        (["train.py", "--margin", "0"], "search: margin is 0"),
        (["train.py", "--level", "O0"], "search: level is O0; wanted one level that is not O0"),
        (["train.py", "--level", "O2,O4"], "search: level is O2,O4; wanted one level that is not O0"),
        (["--resume", "none"], "search: none has no comparison"),
    ],
)
def test_search_refuses_invalid_arguments_by_name(given, said, capsys):
    assert run(*given) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(said) and "compare:" not in shown and not Trainings.made


SCRIPT = """
import torch

class Fragile(torch.nn.Module):
    def forward(self, x):
        return torch.softmax(torch.cat([x[:, :4] + 1e5, x[:, 4:]], 1), -1) + x

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 8), Fragile())
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(30):
    x = torch.randn(16, 8)
    loss = torch.nn.functional.mse_loss(net(x), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_a_search_of_an_unedited_script_finds_its_module(tmp_path):
    done = start_script(tmp_path, SCRIPT, "-m", "amp_patch", "search", "--level", "O2", "--seeds", "2")
    assert done.returncode == 0, done.stderr
    assert 'opt_level="O2", keep_fp32=["1"])' in done.stdout, done.stdout
    assert "the survey of the first step names lines in 1: tried first" in done.stdout
