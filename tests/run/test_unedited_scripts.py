"""`compare` and `run` of scripts without a line of amp_patch, started as a user would."""

from __future__ import annotations

import os
import re

import pytest
from scripts import environment, run_each, start_script

from amp_patch.__main__ import main
from amp_patch.diagnose.recording.run import Run, loads
from amp_patch.environment import LEVEL
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


def test_run_at_o0_equals_the_script_to_the_bit(plain, tmp_path):
    done = start_script(tmp_path, DIGITS, "-m", "amp_patch", "run", AMP_PATCH_OPT_LEVEL="O0")
    line = r"amp_patch: O0 trained Sequential by Adam: 6 steps, 0 skipped; peak of the process [\d.,]+ \w+\n"
    assert (done.returncode, done.stdout) == (0, plain) and re.fullmatch(line, done.stderr), done.stderr


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


# ---------------------------------------------------------------------------------------------------------------------
# --level of run; --methods and --allow-banned of run and compare: arguments of initialize by flag

CODER = """
import torch
from torch import nn
from torch.nn import functional as F
from amp_patch import amp

class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.Linear(4, 2), nn.Linear(2, 4)

    def decode(self, z):
        return torch.sigmoid(self.dec(z))

    def forward(self, x):
        return self.decode(self.enc(x))

torch.manual_seed(0)
net = Coder()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net, optimizer = amp.initialize(net, optimizer, opt_level="O1", verbosity=0)
for step in range(2):
    out, made = net(torch.rand(8, 4)), net.decode(torch.rand(8, 2))
    loss = F.binary_cross_entropy(out, torch.ones(8, 4)) + made.float().mean()
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
"""


LEVELS = """
import os, subprocess, sys
import torch

print(sys.argv[1:], subprocess.check_output(
    [sys.executable, "-c", "import os; print(os.environ.get('AMP_PATCH_OPT_LEVEL'))"], text=True).strip())
net = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net(torch.ones(2, 4)).sum().backward()
optimizer.step()
print(net.weight.dtype)
"""


def test_run_trains_at_the_level_of_its_flag_and_ignores_the_variable(tmp_path):
    (tmp_path / "train.py").write_text(LEVELS)
    (tmp_path / "idle.py").write_text("print(1)")
    flag = ["--level", "O5+split"]
    cases = [
        ([*flag, "train.py", "--level", "9"], {LEVEL: "O2"}),
        (["train.py"], {LEVEL: "O2"}),
        ([*flag, "idle.py"], {LEVEL: "O2"}),
    ]
    both, variable, idle = run_each(tmp_path, cases, environment())
    assert both[0] == "['--level', '9'] O5+split\ntorch.bfloat16\n" and "O5+split BF16 trained Linear" in both[1]
    assert variable[0] == "[] O2\ntorch.float16\n"
    assert idle[0] == "1\n" and "amp_patch: --level O5+split has changed nothing" in idle[1] and LEVEL not in idle[1]
    assert [ended[2] for ended in (both, variable, idle)] == [0] * 3


@pytest.mark.parametrize(
    ("level", "words"),
    [
        ("02", r"level '02' is none of O0, O1, .* \(the letter O, not zero\)"),
        ("", "level '' is none of O0"),
        ("O5+spilt", r"'spilt' behind its \+; wanted .*'O5\+split'"),
        ("O1+split", r"level 'O1\+split' cannot be: .*take O5\+split"),
    ],
)
def test_run_refuses_an_unknown_level_by_the_name_of_its_flag(level, words, capsys, monkeypatch):
    monkeypatch.setenv(LEVEL, "O2")
    with pytest.raises(SystemExit) as caught:
        main(["run", "--level", level, "train.py"])
    errors = capsys.readouterr().err
    assert caught.value.code == 2 and os.environ[LEVEL] == "O2"
    assert re.search(rf"python -m amp_patch run: error: argument --level: .*{words}", errors) and LEVEL not in errors


def test_run_applies_methods_and_allow_banned_to_an_unedited_script(tmp_path):
    (tmp_path / "train.py").write_text(CODER)
    cases = [(["train.py"], {LEVEL: "O5"}), (["--methods=decode", "--allow-banned", "train.py"], {LEVEL: "O5"})]
    cases.append((["--allow-banned", "train.py"], {LEVEL: "O4"}))
    (_, errors, code), *given = run_each(tmp_path, cases, environment())
    assert code == 1 and "methods=" in errors
    for _, errors, code in given:
        assert code == 0 and "runs in FP32" not in errors, errors


@pytest.mark.slow
def test_compare_applies_methods_and_allow_banned_to_every_level(tmp_path):
    command = ["-m", "amp_patch", "compare", "--levels", "O4,O5", "--seeds", "1"]
    start_script(tmp_path, CODER, *command)
    o0, o4, o5 = [Run.from_dict(run) for run in loads((tmp_path / "amp_compare/report.json").read_text())["runs"]]
    assert o0.error is None and "pass allow_banned=True to initialize() to run it in FP32" in o4.error
    assert "name it: initialize(..., methods=('decode',))" in o5.error
    done = start_script(tmp_path, CODER, *command, "--methods", "decode", "--allow-banned")
    assert done.returncode == 0, done.stdout + done.stderr
    runs = [Run.from_dict(run) for run in loads((tmp_path / "amp_compare/report.json").read_text())["runs"]]
    assert [(run.level, run.error, run.steps) for run in runs] == [(level, None, 2) for level in ("O0", "O4", "O5")]
