"""Casts in unedited scripts: calls that torch.autocast casts and that levels must cast too."""

from __future__ import annotations

import pytest
import torch
from scripts import edited, run_source
from training import LEVELS

from amp_patch import amp
from amp_patch.casts import install
from amp_patch.run.unedited.script import UneditedScript

IMPORTS = """
from torch import einsum, nn
from torch.nn.functional import linear, softmax

torch.manual_seed(0)
losses, types = [], []

class Net(nn.Module):
    soft = staticmethod(F.softmax)

    def __init__(self):
        super().__init__()
        self.weight, self.act = nn.Parameter(torch.randn(4, 4) / 4), F.softplus

    def forward(self, x, last=torch.exp):
        x = linear(einsum("ij,jk->ik", x, self.weight), self.weight)
        types.append([x.dtype, softmax(x, -1).dtype, self.act(x).dtype])
        return softmax(x, -1) + self.soft(x, -1) + self.act(x) + last(x)

net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(3):
    loss = F.mse_loss(net(torch.randn(8, 4)), torch.ones(8, 4))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
"""
BY_ATTRIBUTE = IMPORTS.replace("linear(einsum(", "F.linear(torch.einsum(").replace("softmax(x", "F.softmax(x")
BY_ATTRIBUTE = BY_ATTRIBUTE.replace("self.soft(", "F.softmax(").replace("self.act(", "F.softplus(")
BY_ATTRIBUTE = BY_ATTRIBUTE.replace("last(x)", "torch.exp(x)").replace("F.F.", "F.")


def run(script: str, level: str) -> dict[str, object]:
    with UneditedScript(level):
        return run_source(script)


@pytest.mark.parametrize("level", LEVELS)
def test_functions_imported_by_name_are_cast_as_in_the_namespace_of_torch(level: str) -> None:
    found, wanted = run(IMPORTS, level), run(BY_ATTRIBUTE, level)
    assert found["types"] == wanted["types"] and torch.equal(
        torch.stack(found["losses"]), torch.stack(wanted["losses"])
    )
    if level in ("O1", "O4"):
        low = torch.float16 if level == "O1" else torch.bfloat16
        assert found["types"] == [[low, torch.float32, torch.float32]] * 3


def test_casts_are_installed_before_imports_and_removed_after_an_idle_script() -> None:
    functional = torch.nn.functional
    before = functional.linear
    with UneditedScript("O1"):
        assert functional.linear is not before
        assert functional.linear(torch.ones(1, 2), torch.ones(1, 2)).dtype is torch.float32, "no level acts yet"
    assert functional.linear is before and not install.installed()
    for level in ("O0", "O2"):
        with UneditedScript(level):
            assert functional.linear is before


BANNED = """
torch.manual_seed(0)
losses = []
net = nn.Sequential(nn.Linear(4, 8), nn.Sigmoid())
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    out = net(torch.rand(16, 4))
    loss = F.binary_cross_entropy(out, torch.ones(16, 8)) + nn.BCELoss()(out, torch.zeros(16, 8))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
"""


@pytest.mark.parametrize("level", LEVELS)
def test_binary_cross_entropy_runs_in_fp32_with_one_note(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    in_fp32 = BANNED.replace("out = net(torch.rand(16, 4))", "out = net(torch.rand(16, 4)).float()")
    script = UneditedScript(level)
    with script:
        found = run_source(BANNED)["losses"]
    told = capsys.readouterr().err.splitlines()
    assert torch.equal(torch.stack(found), torch.stack(run(in_fp32, level)["losses"]))
    if level in ("O1", "O4"):
        (note,) = script.notes
        assert note.startswith("binary_cross_entropy runs in FP32 (train.py, line 8)") and told == [
            f"amp_patch: {note}"
        ]
    else:
        assert script.notes == told == []


def test_binary_cross_entropy_is_refused_if_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMP_PATCH_ALLOW_BANNED", "0")
    with pytest.raises(NotImplementedError, match="binary_cross_entropy: got"):
        run(BANNED, "O1")


METHODS = """
class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec, self.seen = nn.Linear(8, 4), nn.Linear(4, 8), 0

    def encode(self, x):
        return self.enc(x)

    def decode(self, z):
        return torch.sigmoid(self.dec(F.relu(z)))

    def loss(self, out, x):
        types.append((out.dtype, self.enc.weight.dtype))
        return F.mse_loss(out, x) + 0 * self.dec(self.enc(self(x))).sum().detach() if self.seen else F.mse_loss(out, x)

    def forward(self, x):
        return self.decode(self.encode(x))

torch.manual_seed(0)
losses, types = [], []
net = VAE()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, eps=1e-4)
#net, optimizer = amp.initialize(net, optimizer, opt_level=LEVEL, methods=("decode", "encode"), allow_banned=True)
for step in range(4):
    x = torch.rand(16, 8)
    loss = net.loss(net(x), x) + net.decode(torch.randn(3, 4)).mean()
    optimizer.zero_grad()
    loss.backward() #optimizer
    optimizer.step()
    losses.append(loss.detach())
    with torch.no_grad():
        losses.append(net.decode(torch.randn(2, 4)).sum())
        losses.append(net.encode(torch.randn(2, 8)).sum())
"""


@pytest.mark.parametrize("level", LEVELS)
def test_methods_called_outside_forward_are_cast_as_forward(level: str) -> None:
    found = run(METHODS, level)
    with_lines = run_source(edited(METHODS), amp=amp, LEVEL=level)
    assert torch.equal(torch.stack(found["losses"]), torch.stack(with_lines["losses"]))
    if level not in ("O1", "O4"):  # `loss` works without casts and gets none
        assert {out for out, _ in found["types"]} == {torch.float32}


PARTS = METHODS.replace("net.decode(torch.randn(3, 4))", "net.dec(torch.randn(3, 4))")
PARTS = PARTS.replace("net.decode(torch.randn(2, 4))", "net.dec(torch.randn(2, 4))")
PARTS = PARTS.replace("net.encode(torch.randn(2, 8))", "net.enc(torch.randn(2, 8))")
PARTS = PARTS.replace(
    'initialize(net, optimizer, opt_level=LEVEL, methods=("decode", "encode"), allow_banned=True)',
    "initialize([net, net.dec, net.enc], optimizer, opt_level=LEVEL, allow_banned=True); net = net[0]",
)


@pytest.mark.parametrize("level", LEVELS)
def test_modules_called_outside_forward_of_their_model_are_cast(level: str) -> None:
    found = run(PARTS, level)
    with_lines = run_source(edited(PARTS), amp=amp, LEVEL=level)
    assert torch.equal(torch.stack(found["losses"]), torch.stack(with_lines["losses"]))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("script", [METHODS, PARTS], ids=["methods", "modules"])
def test_a_part_called_first_under_inference_mode_trains_on(script: str, level: str) -> None:
    found, wanted = run(script.replace("torch.no_grad()", "torch.inference_mode()"), level), run(script, level)
    assert torch.equal(torch.stack(found["losses"]), torch.stack(wanted["losses"]))


MADE = """
class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time, self.body, self.out = nn.Linear(8, 16), nn.Linear(4, 16), nn.Linear(16, 4)
        self.norm, self.mixer = nn.LayerNorm(8), nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x, t):
        angles = t[:, None].float() * torch.exp(-math.log(1e4) * torch.arange(4) / 4)
        made = self.norm(torch.cat([angles.sin(), angles.cos()], 1))
        h = self.body(x) + self.time(made)
        mixed, _ = self.mixer(h[None], (h + torch.linspace(0, 1, 16))[None], h[None], need_weights=False)
        types.append(h.dtype)
        return self.out(F.silu(h + mixed[0]))

torch.manual_seed(0)
losses, types = [], []
net = Denoiser()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    x, t = torch.randn(8, 4), torch.randint(100, (8,))
    loss = F.mse_loss(net(x, t), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
"""
BY_HAND = MADE.replace("self.norm(torch.cat([angles.sin(), angles.cos()], 1))", "F.layer_norm(CAT, (8,), *NORM)")
BY_HAND = BY_HAND.replace("CAT", "torch.cat([angles.sin(), angles.cos()], 1)")
BY_HAND = BY_HAND.replace("*NORM", "self.norm.weight.float(), self.norm.bias.float()")
BY_HAND = BY_HAND.replace("self.time(made)", "self.time(made.to(self.time.weight.dtype))")
BY_HAND = BY_HAND.replace("torch.linspace(0, 1, 16))[None]", "torch.linspace(0, 1, 16)).to(h.dtype)[None]")


@pytest.mark.parametrize("level", LEVELS)
def test_tensors_that_forward_makes_are_cast_at_low_weights(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = UneditedScript(level)
    with script:
        found = run_source(MADE)
    told = capsys.readouterr().err.splitlines()
    wanted = run(BY_HAND, level)
    assert torch.equal(torch.stack(found["losses"]), torch.stack(wanted["losses"]))
    if level in ("O2", "O3", "O5"):
        assert "train.py, line 10" in script.notes[0] and told == [f"amp_patch: {note}" for note in script.notes]
        assert len(script.notes) == 1 and capsys.readouterr().err == "", "by hand nothing is mixed"
    else:
        assert script.notes == told == []


EXPLAINED = """
    loss = loss + net.explain(x, t).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
with torch.no_grad():
    losses += [net.explain(x, t).sum(), net.explain(x, t).float().std()]
"""


def with_method(script: str, explain: str) -> str:
    """`script`, whose model gets the method `explain`: the forward of the script `explain`."""
    body = explain[explain.index("    def forward") : explain.index("torch.manual_seed")]
    with_it = script.replace("    def forward", body.replace("def forward", "def explain") + "    def forward", 1)
    return with_it.replace("    optimizer.zero_grad()\n    loss.backward()\n    optimizer.step()\n", "") + EXPLAINED


@pytest.mark.parametrize("named", ["", "explain"])
@pytest.mark.parametrize("level", LEVELS)
def test_tensors_that_another_method_makes_are_cast_at_low_weights(level: str, named: str, monkeypatch) -> None:
    """TabNet's `forward_masks`, which a script calls after the training."""
    if named:
        monkeypatch.setenv("AMP_PATCH_METHODS", named)
    script = UneditedScript(level)
    with script:
        found = run_source(with_method(BY_HAND, MADE))
    wanted = run(with_method(BY_HAND, BY_HAND), level)
    assert torch.equal(torch.stack(found["losses"]), torch.stack(wanted["losses"]))
    mixing = level in ("O2", "O3", "O5")
    assert [note[:24] for note in script.notes] == ["explain() mixes FP32 wit"] * mixing
    assert not mixing or "train.py, line 10" in script.notes[0]


@pytest.mark.parametrize("methods", [(), ("explain",)])
def test_another_method_of_an_edited_script_gets_an_error_with_a_way_out(methods: tuple[str, ...]) -> None:
    lines = f"net, optimizer = amp.initialize(net, optimizer, opt_level='O5', methods={methods})\nfor step in range(3):"
    with pytest.raises(RuntimeError, match="keep_fp32" if methods else r"methods=\('explain',\)"):
        run_source(with_method(BY_HAND, MADE).replace("for step in range(3):", lines), amp=amp)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_forward_that_is_made_again_draws_the_numbers_of_the_first_time(level: str) -> None:
    draws = "import random\nimport numpy" + MADE.replace(
        "h = self.body(x)", "h = self.body(x) + torch.randn(8, 16).to(x)"
    )
    draws += "last = [torch.rand(()).item(), random.random(), numpy.random.rand()]\n"
    draws = draws.replace("torch.manual_seed(0)", "[f(0) for f in (torch.manual_seed, random.seed, numpy.random.seed)]")
    draws = draws.replace("angles =", "random.random(), numpy.random.rand(); angles =")
    assert run(draws, level)["last"] == run_source(draws)["last"]


STATE = """
class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.KIND(8, 16, bidirectional=True), nn.Linear(32, 4)

    def forward(self, x):
        state = torch.zeros(2, x.size(1), 16)
        out, _ = self.rnn(x, (state, state) if isinstance(self.rnn, nn.LSTM) else state)
        return self.out(out[-1])

torch.manual_seed(0)
losses, types = [], []
net = Tagger()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    loss = nn.functional.cross_entropy(net(torch.randn(6, 4, 8)), torch.randint(4, (4,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
"""


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_the_initial_state_of_a_recurrent_network_is_cast(kind: str, level: str) -> None:
    """For BF16 torch asks oneDNN, whose error names no types."""
    script = STATE.replace("KIND", kind)
    wanted = run(script.replace("x.size(1), 16)", "x.size(1), 16, dtype=x.dtype)"), level)
    assert torch.equal(torch.stack(run(script, level)["losses"]), torch.stack(wanted["losses"]))


def test_an_edited_script_gets_an_error_with_module_line_and_way_out() -> None:
    lines = "net, optimizer = amp.initialize(net, optimizer, opt_level='O5')\nfor step in range(3):"
    with pytest.raises(RuntimeError) as caught:
        run_source(MADE.replace("for step in range(3):", lines), amp=amp)
    words = str(caught.value)
    assert "module 'norm' of Denoiser (train.py, line 10) mixes types" in words and "keep_fp32" in words


FP32_REGION = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16) as region:
            pass
        region.fast_dtype = torch.float32  # as of torch.autocast("cuda", torch.float32), which a CPU has not
        with region:
            types.append((x @ x, self.layer(x).dtype)[1])
        return self.layer(x)

types = []
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net(torch.ones(4, 4)).float().sum().backward()
optimizer.step()
"""


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_torch_autocast_to_fp32_keeps_its_calls_fp32(level: str) -> None:
    assert run(FP32_REGION, level)["types"] == [torch.float32]
