"""Averages that are children of the module that an unedited script calls, as in timm's train.py: FP32 at each level."""

from __future__ import annotations

import pytest
import torch
from scripts import run_source

from amp_patch import amp
from amp_patch.run.unedited.script import UneditedScript

LEVELS = ("O0", "O1", "O2", "O3", "O5", "O7")
# `exact` is the same average, of plain tensors.
SCRIPT = """
class Ema(nn.Module):
    def __init__(self, model, decay):
        super().__init__()
        self.module = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for average, value in zip(self.module.state_dict().values(), model.state_dict().values()):
            if average.is_floating_point():
                average.lerp_(value.to(average.device), weight=1 - self.decay)

class Task(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model, self.ema, self.loss = model, Ema(model, 0.9998), nn.MSELoss()

    def forward(self, x, y):
        return self.loss(self.model(x), y)

torch.manual_seed(0)
task = Task(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)))
optimizer = torch.optim.SGD(task.model.parameters(), 0.05)
exact = {name: value.clone() for name, value in task.ema.module.state_dict().items()}
for _ in range(8):
    loss = task(torch.randn(16, 8), torch.randn(16, 4))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    task.ema.update(task.model)
    for name, value in task.model.state_dict().items():
        if value.is_floating_point():
            exact[name].lerp_(value.float(), weight=1 - task.ema.decay)
found = task.ema.module.state_dict()
"""


@pytest.mark.parametrize("held", ["task.model.parameters()", "task.parameters()"])  # frozen ones too
@pytest.mark.parametrize("level", LEVELS)
def test_a_child_that_averages_weights_is_exact_at_every_level(level, held, monkeypatch):
    monkeypatch.delenv("AMP_PATCH_OPT_LEVEL", raising=False)
    with UneditedScript(level) as script:
        names = run_source(SCRIPT.replace("SGD(task.model.parameters()", f"SGD({held}"))
    assert script.missing() is None
    assert all(torch.equal(names["found"][name], value) for name, value in names["exact"].items())
    told = [note for note in script.notes if note.startswith("'ema.module' stays FP32")]
    assert len(told) == (level in ("O2", "O3", "O5", "O7"))
    amp.restore()
