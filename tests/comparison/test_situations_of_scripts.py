"""Whole programs that train nothing, stop in an error that they catch, or whose loss measures no quality."""

from __future__ import annotations

import pytest
from compared_runs import importable_fixture  # noqa: F401  the fixture `importable`
from python_forks import python

START = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
"""
LOADER = "loader = DataLoader(TensorDataset(torch.randn(20, 8)), batch_size=32, drop_last=True)\n"
OURS = "from amp_patch import amp\nnet, optimizer = amp.initialize(net, optimizer, verbosity=0)\n"
NOTHING = {
    "no batch": (START + LOADER + "for (x,) in loader: net(x).sum().backward(); optimizer.step()", "no batch came"),
    "no batch, with lines of ours": (
        START + OURS + LOADER + "for (x,) in loader: net(x)",
        "no batch came: its DataLoader has 20 samples and no batch (batch_size=32, drop_last=True)",
    ),
    "no backward": (START + "net(torch.randn(4, 8)).sum(); optimizer.step()", "never called backward()"),
    "inference": ("import torch\nnet = torch.nn.Linear(8, 1)\nnet(torch.ones(1, 8))", "made no optimizer"),
    "no step": (START + "net(torch.randn(4, 8)).sum().backward()", "never called step()"),
}


@pytest.mark.program
@pytest.mark.parametrize("name", NOTHING)
def test_a_script_that_trains_nothing_ends_with_its_own_sentence(name, tmp_path):
    script, words = NOTHING[name]
    (tmp_path / "train.py").write_text(script)
    ran = python("-m", "amp_patch", "compare", "--quick", "train.py", cwd=tmp_path)
    assert ran.returncode in (1, 2) and words in ran.stderr, ran.stdout + ran.stderr
    assert "amp.scale_loss" not in ran.stderr and "Traceback" not in ran.stderr


STOPS = """
try:
    for step in range(40):
        x = torch.randn(32, 8)
        outputs = net(x)
        if step == 25 and torch.is_tensor(x) and os.environ["AMP_PATCH_OPT_LEVEL"] == "O4":
            raise RuntimeError("expected m1 and m2 to have the same type")
        optimizer.zero_grad()
        (outputs - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
except RuntimeError as error:
    print("ended at", step, error)
print("saved")
"""
REFILLS = """
low, done, tried = os.environ["AMP_PATCH_OPT_LEVEL"] == "O4", 0, 0
while done < 30:
    tried += 1
    x = torch.randn(32, 8)
    try:
        outputs = net(x)
        if low and tried % 3 == 0:
            raise RuntimeError("m1 and m2 must have the same dtype")
        optimizer.zero_grad()
        (outputs - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        done += 1
    except RuntimeError as error:
        print("skipped:", error)
"""
UNSCORED = """
from amp_patch import amp
for step in range(30):
    x = torch.randn(32, 8)
    optimizer.zero_grad()
    (net(x) - x.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
try:
    if os.environ["AMP_PATCH_OPT_LEVEL"] == "O4":
        raise RuntimeError("expected scalar type Float")
    amp.log(r2=0.9)
except RuntimeError as error:
    print("no score:", error)
"""
BY_TIME = """
torch.manual_seed(time.time_ns() % 2**31)
for parameter in net.parameters():
    nn.init.normal_(parameter)
for step in range(30):
    x = torch.randn(32, 8)
    optimizer.zero_grad()
    (net(x) - x.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
"""
GAN = """
from amp_patch import amp
other = nn.Linear(8, 1)
both = torch.optim.Adam(other.parameters(), lr=1e-2)
for step in range(30):
    for model, owner in ((net, optimizer), (other, both)):
        owner.zero_grad()
        model(torch.randn(32, 8)).square().mean().backward()
        owner.step()
amp.log(distance=net(torch.ones(4, 8)).mean().item())
"""


@pytest.mark.program
@pytest.mark.parametrize(("script", "words"), [
    ("import os" + START + STOPS, "O4 BF16 made 25 of 40 steps with seed 0: ended at 25 expected m1 and m2"),
    ("import os" + START + REFILLS, "forwards more than O0's led to no step with seed 0: skipped: m1 and m2 must"),
    ("import os" + START + UNSCORED, "O4 BF16 gave no r2 with seed 0: no score: expected scalar type Float"),
    ("import time" + START + BY_TIME, "with the same seed it began with other weights, or another batch, than"),
    (START + GAN, "a sum of the losses of several optimizers"),
])  # fmt: skip
def test_a_script_is_judged_by_what_it_did(script, words, tmp_path):
    (tmp_path / "train.py").write_text(script)
    metric = ["--metric=r2", "--maximize"] if "r2" in script else []
    ran = python("-m", "amp_patch", "compare", "--levels", "O4", "--seeds", "1", *metric, "train.py", cwd=tmp_path)
    assert ran.returncode == 0 and words in " ".join(ran.stdout.split()), ran.stdout + ran.stderr
    ran = python("-m", "amp_patch", "report", "amp_compare", cwd=tmp_path)
    assert words in " ".join(ran.stdout.split()), "the record keeps what the log showed"
