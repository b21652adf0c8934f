"""Unedited scripts at each level: they train as with the three lines of amp_patch."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
import torch
from crossed import crossed
from scripts import edited, run_source
from torch import nn
from training import LEVELS

from amp_patch import amp
from amp_patch.comparison.commands.compare_worker import recorded
from amp_patch.diagnose.recording.run import Run, loads
from amp_patch.run.unedited.refusal import ScriptRefused
from amp_patch.run.unedited.script import UneditedScript

# Each prints nothing, and leaves its losses in `losses`. The comments are the lines that our own script has there.
# Adam's eps is one that FP16 can hold, for O3.
NET = """
torch.manual_seed(0)
losses = []
net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, eps=1e-4)
#net, optimizer = amp.initialize(net, optimizer, opt_level=LEVEL)
"""
CLIPS = """
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
for step in range(5):
    loss = F.cross_entropy(net(torch.randn(8, 1, 8, 8)), torch.randint(5, (8,)))
    optimizer.zero_grad()
    loss.backward() #optimizer
    losses.append(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1))
    optimizer.step()
    schedule.step()
    losses.append(loss.detach())
"""
ACCUMULATES = """
for step in range(6):
    loss = F.cross_entropy(net(torch.randn(8, 1, 8, 8)), torch.randint(5, (8,))) / 2
    loss.backward() #optimizer
    losses.append(loss.detach())
    if step % 2:
        optimizer.step()
        net.zero_grad()
"""
GAN = """
torch.manual_seed(2)
losses = []
gen = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
disc = nn.Sequential(nn.Linear(2, 16), nn.Linear(16, 1))
first, second = (torch.optim.Adam(m.parameters(), lr=1e-3, eps=1e-4) for m in (disc, gen))
#disc, first = amp.initialize(disc, first, opt_level=LEVEL)
#gen, second = amp.initialize(gen, second, opt_level=LEVEL)
for step in range(4):
    disc.zero_grad()
    loss = F.softplus(-disc(torch.randn(8, 2) + 2)).mean()
    loss.backward() #first
    losses.append(loss.detach())
    fake = gen(torch.randn(8, 4))
    loss = F.softplus(disc(fake.detach())).mean()
    loss.backward() #first
    first.step()
    gen.zero_grad()
    loss = F.softplus(-disc(fake)).mean()
    loss.backward() #[first, second]
    second.step()
    losses.append(loss.detach())
"""
# The module that holds all is never called: its parts are.
PARTS = """
class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.temperature = nn.Linear(4, 16), nn.Linear(16, 3), nn.Parameter(torch.ones(1))

    def act(self, x):
        return self.head(self.body(x).relu()) / self.temperature

torch.manual_seed(3)
losses = []
agent = Agent()
optimizer = torch.optim.SGD(agent.parameters(), lr=0.1, momentum=0.9)
#(agent.body, agent.head), optimizer = amp.initialize([agent.body, agent.head], optimizer, opt_level=LEVEL)
for step in range(5):
    loss = agent.act(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward() #optimizer
    optimizer.step()
    losses.append(loss.detach())
"""
CLOSURE = """
for step in range(3):
    x, y = torch.randn(8, 1, 8, 8), torch.randint(5, (8,))
    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward() #optimizer
        return loss.detach()
    losses.append(optimizer.step(closure)) #losses.append(closure()); optimizer.step()
"""
# Two optimizers of one model: the second is made later, and the first goes on. At step 1 the loss overflows.
PHASES = """
for step in range(6):
    if step == 3:
        other = torch.optim.SGD(net.parameters(), lr=0.01)
        #scale = amp.state_dict(optimizer)
        #net, (optimizer, other) = amp.initialize(net, [optimizer, other], opt_level=LEVEL)
        #amp.load_state_dict(scale, optimizer)
    loss = F.cross_entropy(net(torch.randn(8, 1, 8, 8)), torch.randint(5, (8,))) * (1e6 if step == 1 else 1.0)
    optimizer.zero_grad()
    loss.backward() #[optimizer, other] if step > 2 else optimizer
    if step != 1:
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
    if step > 3:
        other.step()
    losses.append(loss.detach())
"""
DATA_PARALLEL = "net = nn.DataParallel(net)\n"
SCRIPTS = {
    "clips": NET + CLIPS,
    "data parallel": NET + DATA_PARALLEL + CLIPS,
    "accumulates": NET + ACCUMULATES,
    "gan": GAN,
    "parts": PARTS,
    "closure": NET + CLOSURE,
    "phases": NET + PHASES,
}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.delenv("AMP_PATCH_OPT_LEVEL", raising=False)
    places = [(nn.Module, "__call__"), (torch.autograd, "backward"), (torch.optim.Optimizer, "__init__")]
    before = [vars(owner)[name] for owner, name in places]
    yield
    assert [vars(owner)[name] for owner, name in places] == before


@crossed({"name": list(SCRIPTS), "level": LEVELS}, meet=1)
def test_an_unedited_script_trains_as_with_three_lines(name, level):
    plain = run_source(SCRIPTS[name])["losses"]
    with UneditedScript(level) as trained:
        losses = run_source(SCRIPTS[name])["losses"]
    amp.restore()
    expected = run_source(edited(SCRIPTS[name]), amp=amp, LEVEL=level)["losses"]
    assert losses == expected and trained.missing() is None
    assert (losses == plain) is (level == "O0")
    if level != "O3":  # without FP32 weights, the losses differ more
        torch.testing.assert_close(losses, plain, rtol=0.05, atol=0.02, check_dtype=False)


ATTACK = """
x = torch.randn(8, 1, 8, 8, requires_grad=True)
x.grad = torch.ones_like(x)
F.cross_entropy(net(x), torch.zeros(8, dtype=torch.long)).backward()
optimizer.step()
"""


@pytest.mark.parametrize("level", LEVELS)
def test_a_tensor_that_is_no_parameter_gets_unscaled_gradients(level):
    expected = run_source(NET + ATTACK)["x"].grad
    with UneditedScript(level):
        grad = run_source(NET + ATTACK)["x"].grad
    torch.testing.assert_close(grad, expected, rtol=0 if level == "O0" else 0.02, atol=0 if level == "O0" else 1e-4)


OVERFLOWS = """
weights = [[p.detach().clone() for p in net.parameters()]]
for factor in (1.0, 1e6, 1.0):
    loss = F.cross_entropy(net(torch.randn(8, 1, 8, 8)), torch.randint(5, (8,))) * factor
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    weights.append([p.detach().clone() for p in net.parameters()])
moved = [any(map(torch.ne, map(torch.sum, a), map(torch.sum, b))) for a, b in zip(weights, weights[1:])]
"""


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_unedited_script_skips_a_step_that_overflows(level):
    with UneditedScript(level):
        assert run_source(NET + OVERFLOWS)["moved"] == [True, False, True]


CHECKPOINTS = """
from torch.utils.checkpoint import checkpoint

class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net

    def forward(self, x):
        return checkpoint(net[4:], checkpoint(net[:4], x, use_reentrant=True), use_reentrant=True)

model = Halves()
for step in range(3):
    x = torch.randn(8, 1, 8, 8, requires_grad=True)
    loss = F.cross_entropy(model(x), torch.randint(5, (8,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
"""
COMPILES = (
    """
net = torch.compile(net, backend="eager")
"""
    + CLIPS
)


@pytest.mark.parametrize("name", ["checkpoints", pytest.param("compiles", marks=pytest.mark.slow)])
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_checkpointed_and_compiled_graphs_train_at_a_level(name, level, fresh_compiler):
    script = NET + {"checkpoints": CHECKPOINTS, "compiles": COMPILES}[name]
    plain = run_source(script)["losses"]
    with UneditedScript(level) as trained:
        losses = run_source(script)["losses"]
    assert trained.backwards >= 3 and (losses == plain) is (level == "O0")
    torch.testing.assert_close(losses, plain, rtol=0.05, atol=0.02)


RAW = """
w = torch.ones(2, requires_grad=True)
optimizer = torch.optim.SGD([w], lr=1)
w.sum().backward()
"""
BY_HAND = """
params = list(net.parameters())
for p, grad in zip(params, torch.autograd.grad(net(torch.randn(8, 1, 8, 8)).sum(), params)):
    p.grad = grad
optimizer.step()
"""
CHECKPOINTED = """
from torch.utils.checkpoint import checkpoint
x = torch.randn(8, 1, 8, 8, requires_grad=True)
checkpoint(net, x, use_reentrant=True).sum().backward()
optimizer.step()
"""
IN_FLIGHT = """
first, second = nn.Linear(2, 2), nn.Linear(2, 2)
optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=1)
first(torch.ones(1, 2)).sum().backward()
second(torch.ones(1, 2)).sum().backward()
"""
SEVERAL = "a, b = net(torch.randn(8, 1, 8, 8)).sum(1)[:2]\ntorch.autograd.backward([a, b])"
AUTOCAST = """
torch.set_autocast_enabled("cpu", True)
try:
    net(torch.randn(8, 1, 8, 8))
finally:
    torch.set_autocast_enabled("cpu", False)
"""
LBFGS = NET.replace("Adam(net.parameters(), lr=1e-2, eps=1e-4)", "LBFGS(net.parameters())") + CLOSURE

# Unsupported scripts: the script, part of the message, and text of the line that it names (None: none, at the end).
REFUSED = {
    "lbfgs": (LBFGS, "LBFGS evaluates its closure", "optimizer.step("),
    "losses": (NET + SEVERAL, "given several losses", "autograd.backward"),
    "no module": (RAW, "the SGD here holds tensors of no module", ".backward"),
    "all is checkpointed": (NET + CHECKPOINTED, "the Adam here holds tensors of no module", "optimizer.step"),
    "by hand": (NET + BY_HAND, "the gradients of Adam were made without backward()", "optimizer.step"),
    "in flight": (IN_FLIGHT, "Linear is called for the first time between backward() and step()", "second(torch"),
    "autocast": (NET + AUTOCAST, "it turns torch's autocast on", "    net("),
    "no optimizer": (
        "import torch\ntorch.nn.Linear(2, 2)(torch.ones(2, 2)).sum().backward()",
        "made no optimizer",
        None,
    ),
}


@crossed({"name": list(REFUSED), "level": ["O0", "O2"]}, meet=1)
def test_an_unsupported_script_is_refused_in_one_message(name, level):
    script, words, there = REFUSED[name]
    trained = UneditedScript(level)
    if there is None:
        with trained:
            run_source(script)
        error = trained.missing()
    else:
        # The script must not be able to catch the refusal.
        guarded = "try:\n" + textwrap.indent(script, "    ") + "\nexcept Exception:\n    pass"
        with pytest.raises(ScriptRefused) as caught, trained:
            run_source(guarded)
        error = caught.value
    said = str(error)
    ours = ["amp.initialize(model, optimizer)", "amp.scale_loss(loss, optimizer)"]
    lines = ["torch.optim.SGD(model.parameters(), lr=lr)"] if name == "no optimizer" else ours
    assert words in said and all(line in said for line in lines)
    if there is not None:
        numbers = [number for number, line in enumerate(guarded.splitlines(), 1) if there in line]
        assert f"(train.py, line {numbers[0]})" in said


# At step 2 the loss overflows. At a level the lines with a comment are as in FP32.
NATIVE = """
scaler = torch.amp.GradScaler("cpu") #pass
for step in range(5):
    factor = 1e6 if step == 2 else 1.0
    with torch.autocast("cpu", torch.float16): #if True:
        loss = F.cross_entropy(net(torch.randn(8, 1, 8, 8)), torch.randint(5, (8,))) * factor
    optimizer.zero_grad()
    scaler.scale(loss).backward() #loss.backward()
    scaler.unscale_(optimizer) #pass
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(optimizer) #optimizer.step()
    scaler.update() #pass
    losses.append(loss.item())
"""


def in_fp32(script: str) -> str:
    """The script with what its comments have in place of their lines."""
    return re.sub(r"^( *)[^#\n]*#(?!net)", r"\1", script, flags=re.MULTILINE)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_level_replaces_native_mixed_precision(level):
    with UneditedScript(level) as trained:
        losses = run_source(NET + NATIVE)["losses"]
    amp.restore()
    assert trained.native.seen
    with UneditedScript(level) as trained:
        assert losses == run_source(NET + in_fp32(NATIVE))["losses"] and not trained.native.seen
    amp.restore()
    assert (losses == run_source(NET + in_fp32(NATIVE))["losses"]) is (level == "O0")


def test_a_native_run_is_recorded_without_changes(tmp_path, monkeypatch):
    plain = run_source(NET + NATIVE)["losses"]
    monkeypatch.setenv("AMP_PATCH_OPT_LEVEL", "O0")
    monkeypatch.setenv("AMP_PATCH_SEED", "0")
    with recorded(str(tmp_path / "run.jsonl"), steps=None, shift=True, native=True):
        assert run_source(NET + NATIVE)["losses"] == plain
    found = run_of(tmp_path / "run.jsonl")
    assert found.loss == plain and found.native and found.error is None
    assert found.skipped == [False, False, True, False, False] and found.scale == [2.0**16] * 3 + [2.0**15] * 2


READS = """
for step in range(3):
    optimizer.zero_grad()
    loss = net(torch.randn(8, 1, 8, 8)).square().mean()
    torch.autograd.grad(loss, net[0].weight, retain_graph=True)
    loss.backward()
    for p in net.parameters():
        if p.grad is not None or {raises}:
            p.grad.clamp_(-{limit}, {limit})
    optimizer.step()
    losses.append(loss.item())
"""


@crossed({"level": LEVELS, "raises": [False, True], "limit": [0, 0.01]}, meet=1)
def test_a_script_clips_the_gradients_of_its_step(level, raises, limit):
    script = NET.replace("optim.Adam(net.parameters(), lr=1e-2, eps=1e-4)", "optim.SGD(net.parameters(), lr=0.5)")
    script += READS.format(raises=raises, limit=limit)
    before = run_source(script.replace("range(3)", "range(0)"))["net"]
    with UneditedScript(level):
        found = run_source(script)["net"]
    most = 3 * 0.5 * limit  # in three steps of half of that
    moved = [(p.float() - q).abs().max().item() for p, q in zip(found.parameters(), before.parameters(), strict=True)]
    rounded = [(q.to(p.dtype) - q).abs().max() for p, q in zip(found.parameters(), before.parameters(), strict=True)]
    assert all(by <= most * 1.01 + 2 * off for by, off in zip(moved, rounded, strict=True))
    assert limit == 0 or max(moved) > most / 2


def test_an_edited_script_is_left_alone():
    script = "from amp_patch import amp\n" + edited(NET + CLIPS)
    expected = run_source(script, LEVEL="O1")["losses"]
    amp.restore()
    with UneditedScript("O2") as trained:
        assert run_source(script, LEVEL="O1")["losses"] == expected
    assert trained.missing() is None and trained.backwards == 0


@pytest.mark.parametrize("ours", [False, True])
def test_an_unedited_script_is_warned_about_inputs_that_become_infinite_and_goes_on(ours):
    script = """
net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
#net, optimizer = amp.initialize(net, optimizer, opt_level=LEVEL)
for step in range(4):
    x = torch.full((3, 2), 1e6 if step < 2 else 1.0)
    optimizer.zero_grad()
    loss = net(x).sum()
    loss.backward() #optimizer
    optimizer.step()
"""
    if ours:
        with pytest.raises(ValueError, match="argument 'input' holds 1e\\+06"):
            run_source(edited(script), amp=amp, LEVEL="O2")
        return
    with UneditedScript("O2"), pytest.warns(UserWarning, match="argument 'input' holds 1e\\+06") as caught:
        net = run_source(script)["net"]
    assert len(caught) == 1 and amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**14
    assert all(p.isfinite().all() for p in net.parameters())


def test_an_unknown_level_is_refused_by_unedited_script():
    with pytest.raises(ValueError, match=r"level '02' is none of O0, O1"):
        UneditedScript("02")


def run_of(path: Path) -> Run:
    found = Run("")
    for line in path.read_text().splitlines():
        found.add(loads(line))
    return found


@pytest.mark.parametrize("name", ["gan", "closure", "accumulates", "phases"])
def test_an_unedited_script_records_the_losses_of_an_edited_one(name, tmp_path, monkeypatch):
    monkeypatch.setenv("AMP_PATCH_OPT_LEVEL", "O2")
    monkeypatch.setenv("AMP_PATCH_SEED", "0")
    runs = []
    for ours in (False, True):
        path = tmp_path / f"{ours}.jsonl"
        with recorded(str(path), steps=None, shift=True):
            run_source(edited(SCRIPTS[name]) if ours else SCRIPTS[name], amp=amp, LEVEL="O2")
        amp.restore()
        runs.append(run_of(path))
    assert runs[0].loss == runs[1].loss and runs[0].steps > 2 and runs[0].error is None
    assert (runs[0].level, runs[0].scale, runs[0].skipped) == ("O2", runs[1].scale, runs[1].skipped)
