"""Unedited scripts that end without a training."""

from __future__ import annotations

import pytest
from scripts import run_source

from amp_patch.run.unedited.script import UneditedScript

NET = """
import torch
net = torch.nn.Linear(1, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
"""
NO_BATCH = """
for (x,) in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(5, 1)), 8, drop_last=True):
    net(x).sum().backward()
"""
# Scripts that end without a training: no line of ours helps, and none is named.
UNTRAINED = {
    "no call": (NET, "no batch came: it called no module whose parameters an optimizer holds"),
    "no batch": (NET + NO_BATCH, "no batch came: its DataLoader has 5 samples and no batch (batch_size=8, drop_last"),
    "no backward": (NET + "net(torch.randn(8, 1))", "it never called backward()"),
    "inference": (
        NET + "with torch.no_grad(): net(torch.randn(8, 1))",
        "it called its model without gradients",
    ),
    "no optimizer": ("import torch\ntorch.nn.Linear(2, 2)(torch.ones(2, 2))", "it made no optimizer of torch.optim"),
}


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("name", UNTRAINED)
def test_a_script_that_trains_nothing_is_told_why_without_lines_to_paste(name, level):
    script, words = UNTRAINED[name]
    with UneditedScript(level) as trained:
        run_source(script)
    said = str(trained.missing())
    assert words in said and "amp.scale_loss" not in said and "\n" not in said
