"""`kill -9` in the middle of a training, and on from its last checkpoint: to the bit, also with state in eight bits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from paths import ROOT
from training import same

SCRIPT = """
import os, signal, sys
from pathlib import Path

import torch

from amp_patch import amp
from amp_patch.environment import named_level

if "8bit" in sys.argv[1]:  # of weights that are large enough for codes
    from coded_states import MAKERS, coded, go_on as iterate, net
else:
    from split_masters import MAKERS, iterate_split as iterate, net
level, make, killed_after = sys.argv[1], MAKERS[sys.argv[2]], int(sys.argv[3])
torch.manual_seed(os.getpid())  # no process has another's random state
model, named = net(), named_level(level)
model, optimizer = amp.initialize(model, make(model.parameters()), opt_level=named.level, verbosity=0, **named.options)
begin, file = 0, Path("checkpoint.pt")
if file.exists():
    begin, states = torch.load(file)
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    amp.load_state_dict(states[2])
for step in range(begin, 12):
    iterate(model, optimizer, range(step, step + 1))
    if step % 3 == 2:
        torch.save([step + 1, [model.state_dict(), optimizer.state_dict(), amp.state_dict()]], "new.pt")
        os.replace("new.pt", file)
    if step + 1 == killed_after:
        os.kill(os.getpid(), signal.SIGKILL)
assert "8bit" not in level or coded(optimizer)
torch.save([begin, model.state_dict(), optimizer.state_dict(), [p.detach() for p in model.parameters()]], "end.pt")
"""


def run(folder: Path, level: str, make: str, killed_after: int) -> int:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "helpers"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", SCRIPT, level, make, str(killed_after)]
    return subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": path}).returncode


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no kill -9")
@pytest.mark.parametrize(
    ("level", "make"),
    [
        ("O5+split", "NAdam"),
        *((level, make) for level in ("O5+stochastic", "O5+stochastic+8bit") for make in ("AdamW", "NAdam")),
    ],
)
def test_a_killed_training_goes_on_to_the_bit(tmp_path, level, make):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
    assert run(whole, level, make, 0) == 0
    assert run(cut, level, make, 8) == -signal.SIGKILL and not (cut / "end.pt").exists()
    assert run(cut, level, make, 0) == 0
    (never, *wanted), (begun, *got) = (torch.load(folder / "end.pt") for folder in (whole, cut))
    assert (never, begun) == (0, 6)
    assert same(got[2], wanted[2]) and same(got[0].values(), wanted[0].values())
    assert str(got[1]) == str(wanted[1])
