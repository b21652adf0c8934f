"""The summary line at the end of `run`."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from torch import nn

from amp_patch import amp
from amp_patch.environment import named_level
from amp_patch.run import run_summary
from amp_patch.run.run_summary import told

LINE = r"amp_patch: (?P<level>O\d[+\w]*(?: \w+)?) trained (?P<what>.+): (?P<steps>\d+) steps?, (?P<skipped>\d+) skipped"
MEMORY = r"; peak of the process (?P<process>[\d.,]+) (?P<unit>\w+)\n"


class Net(nn.Sequential):
    pass


def train(level: str, steps: int = 4, overflow_at: int | None = None) -> None:
    torch.manual_seed(0)
    model = Net(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.ReLU())))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    named = named_level(level)
    given = {"opt_level": named.level, **named.options, "verbosity": 0, "max_loss_scale": 2.0**10}
    model, optimizer = amp.initialize(model, optimizer, **given)
    for step in range(steps):
        loss = model(torch.randn(256, 64)).float().square().mean() * (1e38 if step == overflow_at else 1)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()


def line_of(capsys) -> re.Match[str]:
    err = capsys.readouterr().err
    found = re.fullmatch(LINE + MEMORY, err)
    assert found, err
    return found


@pytest.mark.parametrize(
    ("level", "name"),
    [
        *(("O0", "O0"), ("O1", "O1 FP16"), ("O2", "O2 FP16"), ("O5", "O5 BF16")),
        *(("O5+split", "O5+split BF16"), ("O5+stochastic", "O5+stochastic BF16")),
    ],
)
def test_the_summary_names_level_models_optimizers_steps_and_skips(level, name, capsys):
    with told():
        train(level, overflow_at=1)
    found = line_of(capsys)
    skipped = "1" if level in ("O1", "O2") else "0"
    assert (found["level"], found["what"], found["steps"], found["skipped"]) == (name, "Net by SGD", "4", skipped)
    peak = float(found["process"].replace(",", "")) * {"MiB": 2**20, "GiB": 2**30}[found["unit"]]
    assert 50 * 2**20 < peak < 2**40, "torch alone takes more than the first"


ENDS = {
    "to the end": (lambda: None, True),
    "exit": (sys.exit, True),
    "exit 0": (lambda: sys.exit(0), True),
    "exit 1": (lambda: sys.exit(1), False),
    "error": (lambda: [][1], False),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_failed_script_has_no_summary(end, capsys):
    ends, tells = ENDS[end]
    try:
        with told():
            train("O2", steps=1)
            ends()
    except (SystemExit, IndexError):
        pass
    assert ("trained Net" in capsys.readouterr().err) is tells


def test_a_script_without_steps_and_other_ranks_have_no_summary(capsys, monkeypatch):
    with told():
        train("O2", steps=0)
    monkeypatch.setattr(run_summary, "is_first_rank", lambda: False)
    with told():
        train("O2", steps=1)
    assert capsys.readouterr().err == ""
