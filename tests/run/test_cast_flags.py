"""--level of `run`; --methods and --allow-banned of `run` and `compare`: arguments of `initialize` by flag."""

from __future__ import annotations

import os
import re

import pytest
from scripts import environment, run_each, start_script

from amp_patch.__main__ import main
from amp_patch.comparison.outcome import failure
from amp_patch.diagnose.recording.recorder import Recorder
from amp_patch.diagnose.recording.run import Run, loads
from amp_patch.environment import LEVEL

pytestmark = pytest.mark.program

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


def test_the_failure_of_a_run_contains_the_whole_refusal():
    import torch

    from amp_patch import amp

    net = torch.nn.Linear(2, 2)
    amp.initialize(net, torch.optim.SGD(net.parameters(), lr=0.1), opt_level="O4")
    with pytest.raises(NotImplementedError) as caught:
        torch.nn.functional.binary_cross_entropy(net(torch.ones(1, 2)).sigmoid(), torch.ones(1, 2))
    with Recorder([]) as recorder:
        words = failure(recorder, Run("O4"), caught.value).words
    assert words == f"NotImplementedError: {caught.value}" and words.endswith("to initialize() to run it in FP32")
