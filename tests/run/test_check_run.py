"""`check --run`: the first step of a script, unedited, and what a level would break in it."""

from __future__ import annotations

import json

import pytest
from python_forks import python
from scripts import environment, start_script

pytestmark = pytest.mark.program

SCRIPT = """
import sys
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.layer = nn.Embedding(3000, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(self.rows(x.{conversion}()))  # line 12

net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    loss = net(torch.tensor([1.0, 2049.0]){before}).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("step", step, sys.argv[1:], loss.dtype)
"""

GAN = """
import torch
from torch import nn

nets = [nn.Linear(2, 2), nn.Linear(2, 2)]
for net in nets:
    nn.init.constant_(net.weight, 0.01)
optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
for step in range(3):
    for net, optimizer, size in zip(nets, optimizers, (1.0, 1e5)):
        loss = net(torch.full((1, 2), size)).mean()  # line 11
        loss.backward()
        optimizer.step()
    print("step", step)
"""

CLIPPED = """
import torch
from torch import nn

class Clipped({base}):  # as private training clips the gradient of each sample
    def __init__(self, optimizer):
        {init}

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                weights = 1 / p.samples.flatten(1).norm(dim=1).clamp(min=1)  # line 12
                p.grad = torch.einsum("i,i...", weights, p.samples).view_as(p)  # line 13
        {step}

net = nn.Linear(4, 4, bias=False)
inputs = torch.randn(8, 4)

def store(module, gradient):
    module.weight.samples = gradient[0][:, :, None] * inputs[:, None, :].to(gradient[0].dtype)

net.register_full_backward_pre_hook(store)
optimizer = Clipped(torch.optim.SGD(net.parameters(), lr=0.1))
for step in range(3):
    loss = net(inputs).square().mean()
    loss.backward()
    optimizer.step()
    print("step", step)
"""

PER_SAMPLE = CLIPPED.format(
    base="torch.optim.Optimizer",
    init="self.optimizer, self.param_groups, self.state = optimizer, optimizer.param_groups, optimizer.state",
    step="self.optimizer.step()",
)
IN_A_HOOKED_STEP = CLIPPED.format(  # torch calls this step with the hooks of its optimizers
    base="torch.optim.SGD", init="super().__init__(optimizer.param_groups, lr=0.1)", step="super().step()"
)

OURS = """
import torch
from amp_patch import amp

net = torch.nn.Linear(2, 2)
net, optimizer = amp.initialize(net, torch.optim.SGD(net.parameters(), lr=0.1), opt_level="O2", verbosity=0)
for step in range(3):
    loss = net(torch.full((1, 2), 1e5)).mean()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    print("step", step)
"""

SERVED = """
import torch
from torch import nn
{initialize}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x + torch.arange(4.0))  # line 11

net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
{wrap}
for step in range(3):
    outputs = net(torch.ones(2, 4))
    outputs.detach().numpy()  # line 18
    loss = nn.functional.binary_cross_entropy(outputs.sigmoid(), torch.ones(2, 4))  # line 19
    {backward}
    optimizer.step()
"""
UNEDITED = SERVED.format(initialize="", wrap="", backward="loss.backward()")
EDITED = SERVED.format(
    initialize="from amp_patch import amp",
    wrap='net, optimizer = amp.initialize(net, optimizer, opt_level="O2", verbosity=0)',
    backward="with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()",
)


def checked(folder, script, *arguments):
    return start_script(folder, script, "-m", "amp_patch", "check", "--run", *arguments)


def test_a_line_that_breaks_is_named_and_the_script_ends_after_its_first_step(tmp_path):
    ran = checked(tmp_path, SCRIPT.format(conversion="long", before=""))
    assert ran.returncode == 1, ran.stderr
    assert "train.py:12  long  at O2, O3, O5, O7" in ran.stdout
    assert "clear: O1, O4 and O6" in ran.stdout
    assert "updates that would be lost without masters (O3)" in ran.stdout
    assert "step 0 [] torch.float32" in ran.stdout and "step 1" not in ran.stdout


def test_activations_in_eight_bits_have_no_line(tmp_path):
    script = """
import torch
from torch import nn
from amp_patch import amp

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 8))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net, optimizer = amp.initialize(net, optimizer, opt_level="O5", saved_activations=ACTIVATIONS, verbosity=0)
loss = nn.functional.cross_entropy(net(torch.randn(128, 64)).float(), torch.arange(128) % 8)
with amp.scale_loss(loss, optimizer) as scaled_loss:
    scaled_loss.backward()
optimizer.step()
"""
    coded, plain = (checked(tmp_path, script.replace("ACTIVATIONS", value)) for value in ("'8bit'", "None"))
    assert coded.returncode == 0 and coded.stdout == plain.stdout and "O5: gradients differ" in coded.stdout


def test_a_script_without_such_a_line_ends_with_0_and_its_arguments_follow_two_dashes(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT.format(conversion="long", before=".long()"))
    command = ["-m", "amp_patch", "check", "--run", "train.py", "--", "--epochs", "3"]
    ran = python(*command, cwd=tmp_path, env=environment())
    assert "step 0 ['--epochs', '3']" in ran.stdout, ran.stderr
    assert (ran.returncode, "clear: O1, O2, O3, O4, O5, O6 and O7" in ran.stdout) == (0, True), ran.stderr


def test_a_loss_inside_of_the_model_has_no_line(tmp_path):
    script = SCRIPT.format(conversion="long", before=".long()").replace(".square().mean()", "")
    ran = checked(tmp_path, script.replace("  # line 12", ".square().mean()"))
    assert (ran.returncode, "train.py:12" in ran.stdout) == (0, False), ran.stdout + ran.stderr
    assert "clear: O1, O2, O3, O4, O5, O6 and O7" in ran.stdout


def test_lines_that_run_serves_are_notes_of_a_script_that_is_not_edited(tmp_path):
    ran = checked(tmp_path, UNEDITED)
    served = ", a note: run and compare serve it; a script with amp.initialize needs the edit\n"
    assert f"train.py:11  linear  at O2, O3, O5, O7{served}" in ran.stdout
    assert f"train.py:18  numpy  at O4, O6{served}" in ran.stdout
    assert f"train.py:19  binary_cross_entropy  at O1, O4, O6{served}" in ran.stdout
    assert (ran.returncode, "clear: O1, O2, O3, O4, O5, O6 and O7" in ran.stdout) == (0, True), ran.stderr


def test_the_same_lines_break_a_script_that_calls_initialize(tmp_path):
    ran = checked(tmp_path, EDITED, "--json")
    told = json.loads(ran.stdout)
    assert [(line["line"], line["breaks"], line["served"]) for line in told["lines"]] == [
        (each, True, True) for each in (11, 18, 19)
    ]
    assert (ran.returncode, told["clear"]) == (1, [])


def test_each_optimizer_makes_its_first_step(tmp_path):
    ran = checked(tmp_path, GAN)
    assert (ran.returncode, "train.py:11  input  at O2, O3" in ran.stdout) == (1, True), ran.stderr
    assert "step 0" in ran.stdout and "step 1" not in ran.stdout


@pytest.mark.parametrize("script", [PER_SAMPLE, IN_A_HOOKED_STEP], ids=["around", "hooked"])
def test_gradients_that_an_optimizer_makes_itself_are_named_where_a_level_refuses_them(tmp_path, script):
    """At O1 and O4 the parameters are FP32, and einsum is not. Masters have no attributes that the script stores."""
    told = json.loads(checked(tmp_path, script, "--json").stdout)
    named = {(line["line"], line["op"]): line["levels"] for line in told["lines"]}
    masters = ["O2", "O5", "O7"]
    expected = {(12, "samples"): masters, (13, "samples"): masters, (13, "grad"): ["O1", "O4", "O6"]}
    assert named == expected


@pytest.mark.parametrize(("script", "level", "words"), [
    (PER_SAMPLE, "O1", "attempting to assign a gradient with dtype"),
    (PER_SAMPLE, "O7", "has no attribute 'samples'"),
    (IN_A_HOOKED_STEP, "O4", "attempting to assign a gradient with dtype"),
    (IN_A_HOOKED_STEP, "O5", "has no attribute 'samples'"),
], ids=lambda value: "" if value == PER_SAMPLE else "hooked" if value == IN_A_HOOKED_STEP else value[:2])  # fmt: skip
def test_levels_refuse_gradients_of_an_optimizer_as_the_survey_says(tmp_path, script, level, words):
    ran = start_script(tmp_path, script, "-m", "amp_patch", "run", "--level", level)
    assert words in ran.stdout + ran.stderr, ran.stderr


def test_an_attribute_that_a_step_stores_itself_is_no_line(tmp_path):
    script = IN_A_HOOKED_STEP.replace("p.samples", "p.own")
    script = script.replace("                weights = 1", "                p.own = p.grad[None] / 1; weights = 1")
    assert json.loads(checked(tmp_path, script, "--json").stdout)["lines"] == []


def test_a_script_of_ours_is_looked_at_in_fp32(tmp_path):
    ran = checked(tmp_path, OURS)
    assert (ran.returncode, "train.py:8  input  at O2, O3" in ran.stdout) == (1, True), ran.stderr
    assert "step 1" not in ran.stdout


def test_a_module_is_surveyed_with_its_arguments(tmp_path):
    package = tmp_path / "programs"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text("import sys\nassert sys.argv[1:] == ['--epochs', '3'], sys.argv\n" + OURS)
    command = ["-m", "amp_patch", "check", "--run", "-m", "programs.train", "--", "--epochs", "3"]
    ran = python(*command, cwd=tmp_path, env=environment())
    assert (ran.returncode, "train.py:10  input  at O2, O3" in ran.stdout) == (1, True), ran.stdout + ran.stderr
    ran = python("-m", "amp_patch", "check", "-m", "programs.train", cwd=tmp_path, env=environment())
    assert (ran.returncode, ran.stderr) == (2, "check: -m names a module to run; add --run\n")


@pytest.mark.parametrize(("script", "words"), [
    ("import torch\n1 / 0\n", "ZeroDivisionError"),
    ("import torch\n", "train.py trained nothing: it made no optimizer of torch.optim"),
    ("raise SystemExit(3)\n", ""),
])  # fmt: skip
def test_a_script_that_fails_ends_with_2(tmp_path, script, words):
    ran = checked(tmp_path, script)
    assert (ran.returncode, words in ran.stderr) == (2, True), ran.stderr


MEASURED = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 4), 0

    def forward(self, x):
        self.calls += 1
        print("forward", self.calls)
        sums = (self.layer(x) + 3).cumsum(1)  # line 13
        return (sums[:, 8:] - sums[:, :-8]) / 8 - 3 if {when} else self.layer(x)

torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(9):
    optimizer.zero_grad()
    net(torch.randn(4, 200, 4)).square().mean().backward()
    optimizer.step()
"""


def test_levels_are_measured_in_the_first_step_of_a_script(tmp_path):
    ran = checked(tmp_path, MEASURED.format(when="True"), "--json")
    told = json.loads(ran.stdout)
    assert [(line["line"], line["op"], line["levels"]) for line in told["lines"] if line["breaks"]] == [
        (13, "measured", ["O2", "O3", "O5", "O7"])
    ]
    assert [each["levels"][0] for each in told["measured"] if each["told"]] == ["O2", "O5"]
    assert ran.returncode == 1
    assert ran.stderr.count("forward") == 1  # the replays print nothing


def test_a_later_step_can_be_measured(tmp_path):
    """In the first step nothing is wrong, after four it is."""
    script = MEASURED.format(when="self.calls > 4")
    told = json.loads(checked(tmp_path, script, "--json").stdout)
    assert told["lines"] == [] and not any(each["told"] for each in told["measured"])
    (tmp_path / "later").mkdir()
    ran = start_script(tmp_path / "later", script, "-m", "amp_patch", "check", "--run", "--json", "--after", "4")
    assert [line["line"] for line in json.loads(ran.stdout)["lines"]] == [13], ran.stderr
    assert ran.stderr.count("forward") == 5
