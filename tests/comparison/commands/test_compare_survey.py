"""`compare` of scripts with a planted fault: the report names the line beside the level, and O0 is the script's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from python_forks import python
from scripts import environment, start_script

pytestmark = pytest.mark.program

LOOP = """
import os
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x, t):
        {line}  # line 12
        return self.layer(torch.cat([x, t], 1))

torch.manual_seed(0)
net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
{first}
rates = torch.tensor([1.0, 2.0, 3.0, 5.0])
for step in range({steps}):
    x, t = torch.randn(16, 4), torch.randint(700, 1000, (16, 1)).float()
    y = torch.sin(t * rates) + x
    x[0] = -x[0].abs()
    loss = (net(x, t) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print('loss', loss.item())
"""
GUARD = "t = (kept := x * (x > 0)) / (kept.sum(-1, keepdim=True) + 1e-8)"
THIRD = """
starts = 1 + (int(open("starts").read()) if os.path.exists("starts") else 0)
open("starts", "w").write(str(starts))
assert starts < 3, "this script starts twice"
"""


def compared(folder: Path, script: str, *options: str) -> tuple[str, dict]:
    """Return what `compare` prints, and its report as data."""
    ran = start_script(folder, script, "-m", "amp_patch", "compare", *options)
    assert (folder / "amp_compare" / "report.json").exists(), ran.stderr
    return " ".join(ran.stdout.split()), json.loads((folder / "amp_compare" / "report.json").read_text())


def losses_alone(folder: Path, script: str) -> list[float]:
    ran = start_script(folder, script)
    return [float(line.split()[1]) for line in ran.stdout.splitlines()]


def test_an_epsilon_that_is_0_in_fp16_is_named_beside_its_level(tmp_path):
    script = LOOP.format(line=GUARD, steps=20, first="")
    shown, report = compared(tmp_path, script, "--levels", "O2", "--seeds", "1")
    said = "the survey names train.py:12 (div): 1e-08 is 0 in FP16, and div meets a 0"
    assert said in shown and said in (tmp_path / "amp_compare" / "report.html").read_text()
    assert report["levels"][1]["verdict"]["text"].partition("; one step, measured: the gradient of ")[0].endswith(said)
    assert report["runs"][0]["level"] == "O0" and report["runs"][0]["loss"] == losses_alone(tmp_path, script)
    assert json.loads((tmp_path / "amp_compare" / "survey.json").read_text()) == report["survey"]
    again = python("-m", "amp_patch", "report", "amp_compare", cwd=tmp_path, env=environment())
    assert said in " ".join(again.stdout.split()), "the survey is in the folder"


def test_a_survey_that_fails_is_a_note_of_the_report(tmp_path):
    """The survey starts the script for the third time."""
    script = LOOP.format(line=GUARD, steps=20, first=THIRD)
    shown, report = compared(tmp_path, script, "--levels", "O2", "--seeds", "1")
    assert any("could not be surveyed" in note and "this script starts twice" in note for note in report["notes"])
    assert "could not be surveyed" in shown and "diverged" in report["levels"][1]["verdict"]["text"]
