"""`compare` and `run` of scripts without a line of amp_patch, started as a user would."""

from __future__ import annotations

import pytest
from scripts import start_script

from amp_patch.diagnose.recording.run import Run, loads
from amp_patch.run.run import at_asked_level

pytestmark = pytest.mark.program

DIGITS = """
import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(0)
digits = load_digits()
images, classes = torch.tensor(digits.images).float().unsqueeze(1) / 16, torch.tensor(digits.target)
net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for step in range(6):
    at = torch.randint(len(images), (32,))
    loss = nn.functional.cross_entropy(net(images[at]), classes[at])
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    print(loss.item().hex())
"""
LBFGS = DIGITS.replace("Adam(net.parameters(), lr=1e-2)", "LBFGS(net.parameters())").replace(
    "optimizer.step()", "optimizer.step(lambda: loss)"
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> str:
    """Return the output of the script under python."""
    return start_script(tmp_path_factory.mktemp("plain"), DIGITS).stdout


def test_compare_trains_an_unedited_script(plain, tmp_path):
    done = start_script(tmp_path, DIGITS, "-m", "amp_patch", "compare", "--levels", "O0,O2", "--seeds", "1")
    assert (done.returncode, done.stderr) == (0, "")
    runs = [Run.from_dict(run) for run in loads((tmp_path / "amp_compare/report.json").read_text())["runs"]]
    assert [(run.level, run.error, run.steps) for run in runs] == [("O0", None, 6), ("O2", None, 6)]
    assert not (tmp_path / "amp_compare/survey.json").exists()
    o0, o2 = runs
    assert [loss.hex() for loss in o0.loss] == plain.split() and o0.scale == [1.0] * 6
    assert o0.loss != o2.loss == pytest.approx(o0.loss, rel=0.05) and o2.scale[0] == 2.0**16 and o2.masters > 0


def test_compare_refuses_a_script_with_lbfgs_once(tmp_path):
    done = start_script(tmp_path, LBFGS, "-m", "amp_patch", "compare")
    assert done.returncode == 2 and "report:" not in done.stdout
    both = done.stdout + done.stderr
    assert both.count("LBFGS evaluates") == both.count("amp.initialize(model, optimizer)") == 1
    assert [path.name for path in (tmp_path / "amp_compare/runs").iterdir() if path.suffix == ".log"] == [
        "O0-seed0.log"
    ]


def test_run_at_o0_equals_the_script_to_the_bit(plain, tmp_path):
    done = start_script(tmp_path, DIGITS, "-m", "amp_patch", "run", AMP_PATCH_OPT_LEVEL="O0")
    line = "amp_patch: O0 trained Sequential by Adam: 6 steps, 0 skipped\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, plain, line)


# `compare` advises this line. The comment has the name of a choice, and makes none.
LOGS = (
    DIGITS.replace("import torch\n", "import torch\nfrom amp_patch import amp  # initialize\n", 1)
    + "amp.log(last=loss.item())"
)


@pytest.mark.parametrize("level", ["O0", "O5"])
def test_a_script_whose_one_line_of_ours_is_a_log_is_trained_at_the_level(level, plain, tmp_path):
    done = start_script(tmp_path, LOGS, "-m", "amp_patch", "run", "--level", level)
    assert done.returncode == 0 and (done.stdout == plain) is (level == "O0")
    assert done.stderr.startswith(f"amp_patch: {level}{' BF16' * (level != 'O0')} trained Sequential by Adam: 6 steps")


def test_compare_trains_a_script_whose_one_line_of_ours_is_a_log(tmp_path):
    command = ["-m", "amp_patch", "compare", "--levels", "O0,O5", "--seeds", "1", "--metric", "last"]
    done = start_script(tmp_path, LOGS, *command)
    assert (done.returncode, done.stderr) == (0, "")
    runs = [Run.from_dict(run) for run in loads((tmp_path / "amp_compare/report.json").read_text())["runs"]]
    assert [(run.level, run.steps, len(run.logged["last"])) for run in runs] == [("O0", 6, 1), ("O5", 6, 1)]


@pytest.mark.parametrize(
    "choice", ["if len([]): amp.initialize(net, optimizer)", "amp.initialize(net, optimizer, enabled=False)"]
)
def test_run_says_that_a_script_with_initialize_did_not_call_it(choice, plain, tmp_path):
    script = LOGS.replace("for step", f"{choice}\nfor step", 1)
    done = start_script(tmp_path, script, "-m", "amp_patch", "run", "--level", "O5")
    assert (done.returncode, done.stdout) == (0, plain)
    said = "the script names casts of amp_patch or Apex, and has begun no training by initialize"
    assert done.stderr == f"amp_patch: --level O5 has changed nothing: {said}\n"


@pytest.mark.parametrize("level", ["", "O2"])
def test_run_says_if_a_level_changed_nothing(level, monkeypatch, capsys):
    monkeypatch.setenv("AMP_PATCH_OPT_LEVEL", level)
    with at_asked_level():
        print("1")
    found = capsys.readouterr()
    assert found.out == "1\n" and ("AMP_PATCH_OPT_LEVEL=O2 has changed nothing: it made no" in found.err) is bool(level)


def test_run_refuses_an_unknown_level_of_the_variable(monkeypatch, capsys):
    monkeypatch.setenv("AMP_PATCH_OPT_LEVEL", "02")
    with pytest.raises(SystemExit) as caught, at_asked_level():
        pytest.fail("the script ran")
    assert caught.value.code == 2 and "AMP_PATCH_OPT_LEVEL: level '02' is none of O0, O1" in capsys.readouterr().err
