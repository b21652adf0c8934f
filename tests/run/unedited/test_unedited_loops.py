"""Unedited loops without a torch optimizer, with one for each layer, and in child processes of the script."""

from __future__ import annotations

import re
import sys
import types

import pytest
import torch
from crossed import crossed
from scripts import edited, run_source, start_script
from torch import nn
from training import LEVELS

from amp_patch import amp
from amp_patch.run.unedited.refusal import ScriptRefused
from amp_patch.run.unedited.script import UneditedScript


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.delenv("AMP_PATCH_OPT_LEVEL", raising=False)
    names = [(nn.Module, "__call__"), (nn.Module, "register_parameter"), (torch.multiprocessing.Process, "start")]
    before = [getattr(owner, name) for owner, name in names]
    yield
    assert [getattr(owner, name) for owner, name in names] == before


# --- an optimizer a layer, and no call of a module --------------------------------------------------------------------

LAYERS = """
torch.manual_seed(0)
losses = []

class Layer(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.relu = nn.ReLU()
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.03, eps=1e-4)
        #amp.initialize(self, self.optimizer, opt_level=LEVEL)

    def forward(self, x):
        direction = x / (x.norm(2, 1, keepdim=True) + 1e-4)
        return self.relu(torch.mm(direction, self.weight.T) + self.bias.unsqueeze(0))

    def train(self, good, bad):
        for _ in range(4):
            goods, bads = (self.forward(x).pow(2).mean(1) for x in (good, bad))
            loss = torch.log(1 + torch.exp(torch.cat([2 - goods, bads - 2]))).mean()
            self.optimizer.zero_grad()
            loss.backward() #self.optimizer
            self.optimizer.step()
            losses.append(loss.detach())
        return self.forward(good).detach(), self.forward(bad).detach()

x = torch.randn(16, 8), torch.randn(16, 8)
layers = [Layer(8, 16), Layer(16, 16)]
for layer in layers:
    x = layer.train(*x)
"""
# The parameters are the module's own; the script calls its `forward`.
ROOT = """
torch.manual_seed(0)
losses = []

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4))

    def forward(self, x):
        return torch.mm(x, self.weight)

net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
#net, optimizer = amp.initialize(net, optimizer, opt_level=LEVEL)
for _ in range(3):
    loss = net.forward(torch.randn(16, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward() #optimizer
    optimizer.step()
    losses.append(loss.detach())
"""


@crossed(pytest.mark.parametrize("script", [LAYERS, ROOT], ids=["layers", "root"]), {"level": LEVELS}, meet=1)
def test_direct_calls_of_forward_train_as_with_three_lines(script, level):
    plain = run_source(script)["losses"]
    with UneditedScript(level) as trained:
        losses = run_source(script)["losses"]
    amp.restore()
    expected = run_source(edited(script), amp=amp, LEVEL=level)["losses"]
    assert losses == expected and trained.missing() is None and trained.backwards == len(losses)
    assert (losses == plain) is (level == "O0")


def test_a_class_has_its_original_forward_for_torch_jit_and_at_the_end(monkeypatch):
    seen = []
    monkeypatch.setattr(torch.jit, "script", lambda obj, *rest, **more: seen.append(vars(type(obj))["forward"]))
    with UneditedScript("O1"):
        names = run_source(ROOT + "while_trained = vars(Net)['forward']\ntorch.jit.script(Net())")
        assert vars(names["Net"])["forward"] is names["while_trained"]
    assert seen == [names["while_trained"].__wrapped__] == [vars(names["Net"])["forward"]]


def test_parameters_can_be_swapped_while_a_level_is_active():
    with UneditedScript("O0"):
        model = nn.Linear(2, 2)
        torch.optim.SGD(model.parameters(), lr=0.1)
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            assert model.to(torch.float64).weight.dtype is torch.float64
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)


# --- steps by hand ----------------------------------------------------------------------------------------------------

BY_HAND = """
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
for step in range(6):
    net.zero_grad()
    net(torch.randn(8, 4)).square().mean().backward()
    {update}
done = True
"""
UPDATES = {
    "data": "for p in net.parameters(): p.data.add_(p.grad, alpha=-0.1)",
    "no_grad": "with torch.no_grad(): [p.sub_(0.1 * p.grad) for p in net.parameters()]",
}
WAY_OUT = r"(?s)updates its weights by hand{}\. With an optimizer it needs no other line.*torch\.optim\.SGD\(model"


@crossed({"update": list(UPDATES), "level": ["O0", "O2"]}, meet=1)
def test_manual_steps_are_refused_at_the_second_with_an_optimizer_to_use(update, level):
    with (
        pytest.raises(ScriptRefused, match=WAY_OUT.format(r" \(train\.py, line 6\)")) as refused,
        UneditedScript(level),
    ):
        run_source(BY_HAND.format(update=UPDATES[update]))
    assert "amp.initialize" not in str(refused.value)


POLYNOMIAL = """
a, b = torch.zeros((), requires_grad=True), torch.zeros((), requires_grad=True)
x = torch.linspace(-1, 1, 20)
for step in range(5):
    (a + b * x - x).square().mean().backward()
    with torch.no_grad():
        for p in (a, b):
            p -= 0.1 * p.grad
            p.grad = None
"""


def test_manually_updated_tensors_are_reported_at_the_end():
    with UneditedScript("O1") as trained:
        run_source(POLYNOMIAL)
    with UneditedScript("O1") as evaluated:
        run_source(POLYNOMIAL.replace("p -= ", "0 * "))
    told = str(evaluated.missing())
    assert "made no optimizer of torch.optim in this process. With" in told and "torch.optim.SGD(model" in told
    assert re.search(WAY_OUT.format(""), str(trained.missing())) and "belong to no module" in str(trained.missing())


# Backward passes before the optimizer exists, which do not update weights: Fisher information, ascent on an image.
BEFORE = """
torch.manual_seed(0)
net = nn.Linear(4, 1)
image = torch.zeros(8, 4, requires_grad=True)
for _ in range(3):
    net(image).sum().backward()
    image.data += image.grad
net.zero_grad()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    net(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
"""


def test_backward_passes_before_the_optimizer_are_not_manual_steps():
    with UneditedScript("O2") as trained:
        run_source(BEFORE)
    assert trained.backwards == 3 and trained.missing() is None


# --- processes --------------------------------------------------------------------------------------------------------

HOGWILD = """
import sys
import torch
from torch import nn
import torch.multiprocessing as mp

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))

def train(rank, model):
    torch.manual_seed(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(40):
        x = torch.randn(32, 8)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()

if __name__ == "__main__":
    torch.manual_seed(1)
    mp.set_start_method(START)
    model = Net()
    model.share_memory()
    processes = [mp.Process(target=train, args=(rank, model)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    x = torch.randn(320, 8)
    with torch.no_grad():
        print((model(x) - x.sum(1, keepdim=True)).square().mean().item(), [each.exitcode for each in processes])
"""


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.parametrize("level", LEVELS)
def test_processes_that_share_weights_train_or_are_refused_at_o3(level, start, tmp_path):
    script = HOGWILD.replace("START", repr(start))
    done = start_script(tmp_path, script, "-m", "amp_patch", "run", AMP_PATCH_OPT_LEVEL=level)
    assert done.returncode == 0, done.stderr
    loss = float(done.stdout.split()[0])
    if level == "O3":
        assert "processes share the weights of Net" in done.stderr and "[1, 1]" in done.stdout
        assert "one of O0, O1, O2, O4, O5" in done.stderr
        return
    assert loss < 1 and "[0, 0]" in done.stdout, done.stdout + done.stderr  # 7.7 before
    told = re.findall(rf"amp_patch: process \d+: {level}\b.* trained Net by SGD: 40 steps", done.stderr)
    assert len(told) == 2 and f"{level}: this process trained nothing; each of the 2" in done.stderr, done.stderr


def test_loader_workers_do_not_count_as_training_processes(monkeypatch):
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    with UneditedScript("O1") as trained:
        data = torch.utils.data.TensorDataset(torch.zeros(4, 2))
        list(torch.utils.data.DataLoader(data, num_workers=1))
        assert trained.processes.started == 0
        process = torch.multiprocessing.get_context("fork").Process(target=int)
        process.start()
        process.join()
    assert trained.processes.started == 1
