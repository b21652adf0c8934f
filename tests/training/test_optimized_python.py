"""`python -O` leaves asserts out: a training in such a process is that of any other, to the bit."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys

import pytest
import torch
from paths import ROOT
from training import assert_unchanged

pytestmark = pytest.mark.program

STORY = '''
import sys
import torch
from torch import nn

from amp_patch import amp

assert print("asserts run", file=sys.stderr) is None


def tell(options, maker):
    """Overflows, two losses, a penalty on the weights by the masters' own backward, with and without clipping."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = maker(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, verbosity=0, **options)
    scaled = options["opt_level"] in ("O1", "O2")
    told = []
    for step in range(6):
        inputs = torch.randn(4, 6)
        optimizer.zero_grad()
        loss = model(inputs).float().square().mean() * (torch.inf if scaled and step == 3 else 1)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        if step % 2:
            sum(master.square().sum() for master in amp.master_params(optimizer)).backward()
        if step in (1, 2, 3):
            told.append(nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.5).nan_to_num(nan=-1.0))
        optimizer.step()
        told.append(loss.detach())
    told += model.state_dict().values()
    told += [master.detach().clone() for master in amp.master_params(optimizer)]
    told += [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    amp.restore()
    return told


MAKERS = (
    lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    lambda params: torch.optim.RMSprop(params, lr=1e-2),
)
TRAININGS = (
    {"opt_level": "O1"},
    {"opt_level": "O2"},
    {"opt_level": "O2", "loss_scale": 128.0},
    {"opt_level": "O5"},
    {"opt_level": "O5", "master_weights": "split"},
    {"opt_level": "O5", "master_weights": "stochastic"},
)
torch.set_num_threads(1)
torch.save([tell(options, maker) for options in TRAININGS for maker in MAKERS], sys.argv[1])
'''


@pytest.mark.skipif(not __debug__, reason="this process has no asserts either")
def test_removed_asserts_change_no_training(tmp_path, monkeypatch, capsys):
    script, here, there = (tmp_path / name for name in ("story.py", "here.pt", "there.pt"))
    script.write_text(STORY)
    monkeypatch.setattr(sys, "argv", [str(script), str(here)])
    runpy.run_path(str(script), run_name="__main__")
    assert "asserts run" in capsys.readouterr().err
    wanted = torch.load(here)
    assert len(wanted) == 18 and all(tensor.isfinite().all() for told in wanted for tensor in told[9:])

    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-O", str(script), str(there)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0 and "asserts run" not in run.stderr, run.stderr
    assert_unchanged(wanted, torch.load(there))
