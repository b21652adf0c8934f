"""Tensors outside the models of an unedited script: in optimizers, and as numpy arrays."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from crossed import crossed
from scripts import edited, run_source
from torch import nn
from training import LEVELS

from amp_patch import amp
from amp_patch.run.unedited.loose_tensors import steps_loose_tensors
from amp_patch.run.unedited.refusal import ScriptRefused
from amp_patch.run.unedited.script import UneditedScript

NET = """
torch.manual_seed(0)
losses = []
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
"""
# SAC: the temperature has a separate loss and optimizer.
TEMPERATURE = (
    NET
    + """
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, eps=1e-4)
log_alpha = torch.zeros(1, requires_grad=True)
its = torch.optim.Adam([log_alpha], lr=1e-1, eps=1e-4)
#net, (optimizer, its) = amp.initialize(net, [optimizer, its], opt_level=LEVEL)
for step in range(3):
    out = net(torch.randn(8, 4))
    loss = (log_alpha.exp().detach() * out.float() - 1).pow(2).mean() / 64
    optimizer.zero_grad()
    loss.backward() #optimizer
    optimizer.step()
    losses.append(loss.detach())
    loss = (log_alpha * (out.detach().float() - 1).mean()).mean()
    its.zero_grad()
    loss.backward() #its
    its.step()
    losses += [loss.detach(), log_alpha.detach().clone()]
"""
)
# A PDE's coefficient: it is in the model's loss, and has a separate optimizer.
COEFFICIENT = (
    NET
    + """
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
coefficient = nn.Parameter(torch.tensor(0.5))
its = torch.optim.SGD([coefficient], lr=0.1)
#net, (optimizer, its) = amp.initialize(net, [optimizer, its], opt_level=LEVEL)
for step in range(3):
    x = torch.randn(8, 4)
    loss = (net(x).float() - coefficient * x).pow(2).mean() / 64
    optimizer.zero_grad(), its.zero_grad()
    loss.backward() #[optimizer, its]
    optimizer.step(), its.step()
    losses += [loss.detach(), coefficient.detach().clone()]
"""
)
# An agent that is a module, and has no forward: its networks are called.
AGENT = TEMPERATURE.replace(
    "log_alpha = torch.zeros(1, requires_grad=True)",
    "agent = nn.Module()\nagent.net, agent.log_alpha = net, nn.Parameter(torch.zeros(1))\nlog_alpha = agent.log_alpha",
)


@crossed(
    pytest.mark.parametrize("script", [TEMPERATURE, COEFFICIENT, AGENT], ids=["temperature", "coefficient", "agent"]),
    {"level": LEVELS},
    meet=1,
)
def test_an_optimizer_of_a_free_tensor_trains_as_in_an_edited_script(script, level):
    with UneditedScript(level) as trained:
        losses = run_source(script)["losses"]
    assert trained.missing() is None
    amp.restore()
    assert all(torch.equal(a, b) for a, b in zip(losses, edited_losses(script, level), strict=True))
    assert losses[-1].dtype is torch.float32
    assert len(trained.notes) == (level != "O0"), "one sentence names the optimizer"
    assert all("belong to no module and stay as they are (train.py, line" in note for note in trained.notes)


def edited_losses(script, level):
    return run_source(edited(script), amp=amp, LEVEL=level)["losses"]


def test_an_optimizer_of_only_free_tensors_is_refused_with_the_way_out():
    script = NET + "its = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1)\n"
    script += "its.param_groups[0]['params'][0].sum().backward()"
    with pytest.raises(ScriptRefused, match="put tensors that belong to no module into one"), UneditedScript("O4"):
        run_source(script)


# `other` is never called: its weight is used as a tensor.
NOT_CALLED = (
    NET
    + """
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net(torch.randn(8, 4)).mean().backward()
optimizer.step()
other = nn.Linear(4, 1)
its = torch.optim.SGD([torch.zeros(1, requires_grad=True), *other.parameters()], lr=0.1)
nn.functional.linear(torch.randn(8, 4), other.weight).mean().backward()
"""
)


@pytest.mark.parametrize("level", ["O0", "O4"])
def test_an_optimizer_of_a_module_that_was_not_called_is_refused(level):
    said = "holds tensors of no module that was called since"
    with pytest.raises(ScriptRefused, match=said) as caught, UneditedScript(level):
        run_source(NOT_CALLED)
    assert "put tensors" not in str(caught.value)


ARRAYS = (
    NET
    + """
import numpy as np

optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
x = torch.randn(8, 4)
out = net(x)
out.float().mean().backward()
optimizer.step()
with torch.no_grad():
    out = net[0](x)
    arrays = [out.numpy(), np.asarray(out), np.array(out.cpu()), np.stack([*out]), out.detach().numpy(force=True)]
    exact = out.float()
    as_double = np.asarray(out, dtype=np.float64)
    other = x.double().numpy(), x.long().numpy()
"""
)


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")
@pytest.mark.parametrize("level", LEVELS)
def test_numpy_arrays_of_outputs_are_fp32(level):
    before = torch.Tensor.numpy
    with UneditedScript(level):
        found = run_source(ARRAYS)
    for array in found["arrays"]:
        assert array.dtype == np.float32 and np.array_equal(array, found["exact"].numpy())
    assert found["as_double"].dtype == np.float64
    assert [array.dtype for array in found["other"]] == [np.float64, np.int64]
    assert torch.Tensor.numpy is before


@pytest.mark.parametrize(
    ("level", "ours"), [("O0", ""), ("O1", "from amp_patch import amp\namp.initialize(net, opt_level='O1')\n")]
)
def test_numpy_arrays_keep_their_type_at_o0_and_in_edited_scripts(level, ours):
    with UneditedScript(level):
        found = run_source(NET + ours + "array = torch.ones(2, dtype=torch.float16).numpy()")
    assert found["array"].dtype == np.float16


# ---------------------------------------------------------------------------------------------------------------------
# Optimizers of tensors that no module with a forward owns


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")
def test_a_scripted_module_owns_its_parameters_and_no_loose_tensor():
    scripted = torch.jit.script(nn.Linear(2, 2))
    temperature = torch.zeros((), requires_grad=True)
    assert steps_loose_tensors(torch.optim.SGD([temperature], lr=1.0))
    assert not steps_loose_tensors(torch.optim.SGD(scripted.parameters(), lr=1.0))


# openai's improved-diffusion with --use_fp16.
OWN_MASTERS = """
model = nn.Linear(4, 2).to(torch.LOW)
MASTERS
optimizer = torch.optim.AdamW(masters, lr=1e-3)
for step in range(2):
    model(torch.ones(2, 4, dtype=torch.LOW)).float().sum().backward()
    for master, param in zip(masters, model.parameters()):
        master.grad = param.grad.float()
    optimizer.step()
"""
TENSORS = "masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]"
MODULE = "held = copy.deepcopy(model).float(); masters = list(held.parameters())"
BESIDE = f"""
other = nn.Linear(2, 2)
beside = torch.optim.SGD(other.parameters(), lr=0.1)
other(torch.ones(2)).sum().backward()
beside.step()
{TENSORS}
"""


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
@pytest.mark.parametrize("masters", [TENSORS, MODULE, BESIDE])
@pytest.mark.parametrize("low", ["float16", "bfloat16"])
def test_a_script_with_masters_of_its_own_is_told_to_turn_them_off(low, masters, level):
    with pytest.raises(ScriptRefused) as caught, UneditedScript(level):
        run_source(OWN_MASTERS.replace("LOW", low).replace("MASTERS", masters))
    amp.restore()
    said = str(caught.value)
    assert "mixed precision of its own: the AdamW here holds masters of FP16 or BF16 weights (train.py, line" in said
    assert "the script's own option" in said and "initialize" not in said
