"""Casts in unedited scripts: calls that torch.autocast casts and that levels must cast too."""

from __future__ import annotations

import pytest
import torch
from training import LEVELS
from unedited import edited, run_source

from amp_patch import amp
from amp_patch.casts import install
from amp_patch.lab.unedited.script import UneditedScript

IMPORTS = """
import torch
from torch import einsum, nn
from torch.nn import functional as F
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
import torch
from torch import nn
from torch.nn import functional as F

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
        assert note.startswith("binary_cross_entropy runs in FP32 (train.py, line 12)") and told == [
            f"amp_patch: {note}"
        ]
    else:
        assert script.notes == told == []


def test_binary_cross_entropy_is_refused_if_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMP_PATCH_ALLOW_BANNED", "0")
    with pytest.raises(NotImplementedError, match="binary_cross_entropy: got"):
        run(BANNED, "O1")


METHODS = """
import torch
from torch import nn
from torch.nn import functional as F

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


def test_errors_that_are_not_about_types_are_not_changed() -> None:
    broken = METHODS.replace("torch.randn(3, 4)", "torch.randn(3, 5)")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        run(broken, "O5")


MADE = """
import math
import torch
from torch import nn
from torch.nn import functional as F

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
        assert "train.py, line 15" in script.notes[0] and told == [f"amp_patch: {note}" for note in script.notes]
        assert len(script.notes) == 1 and capsys.readouterr().err == "", "by hand nothing is mixed"
    else:
        assert script.notes == told == []


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
import torch
from torch import nn

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
    assert "module 'norm' of Denoiser (train.py, line 15) mixes types" in words and "keep_fp32" in words


FP32_REGION = """
import torch
from torch import nn

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


SURE = """
import torch
from torch import nn

net = nn.Sequential(nn.Linear(1, 1), nn.Sigmoid())
nn.init.ones_(net[0].weight)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
losses = []
for step in range(12):
    loss = nn.functional.binary_cross_entropy(net(torch.full((1, 1), 11.0)), torch.zeros(1, 1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_saturated_sigmoid_still_trains_at_levels_with_casts(level: str) -> None:
    losses = run(SURE, level)["losses"]
    assert 10 < losses[0] < 12.5 and losses[-1] < 0.1


def test_a_sigmoid_that_is_rounded_to_1_at_o5_gives_a_warning() -> None:
    with pytest.warns(UserWarning, match="exactly 0 or 1, to which low precision has rounded a sigmoid"):
        run(SURE, "O5")


# Each has what one kind of public program does, in a forward or around it.
FRAME = """
import math
import torch
from torch import nn
from torch.nn import functional as F
from types import SimpleNamespace

torch.manual_seed(0)
losses = []

class Net(nn.Module):
{net}
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=51.2)
for step in range(3):
    {loss}
    optimizer.zero_grad()
    (loss / 1024).backward()  # else the first scale overflows
    optimizer.step()
    losses.append(loss.detach())
"""
FORWARDS = {
    # nanoGPT, makemore, minGPT: a mask of -inf, a head that is the embedding
    "masked attention, tied head": (
        """
    def __init__(self):
        super().__init__()
        self.table, self.qkv, self.head = nn.Embedding(16, 8), nn.Linear(8, 24), nn.Linear(8, 16, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("mask", torch.tril(torch.ones(5, 5)))

    def forward(self, tokens):
        q, k, v = self.qkv(self.table(tokens)).split(8, dim=2)
        scores = (q @ k.transpose(1, 2) / math.sqrt(8)).masked_fill(self.mask == 0, float("-inf"))
        return self.head(F.softmax(scores, dim=-1) @ v)
""",
        "t = torch.randint(16, (4, 6)); loss = F.cross_entropy(net(t[:, :-1]).reshape(-1, 16), t[:, 1:].reshape(-1))",
    ),
    # gat: a mask of -9e15, which FP16 cannot hold
    "a mask of a large number": (
        """
    def __init__(self):
        super().__init__()
        self.layer, self.score = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x, edges):
        h = self.layer(x)
        scores = F.leaky_relu(self.score(h) + self.score(h).T)
        return F.log_softmax(torch.where(edges > 0, scores, -9e15 * torch.ones_like(scores)).softmax(1) @ h, 1)
""",
        "loss = F.nll_loss(net(torch.randn(6, 4), torch.eye(6)), torch.arange(6))",
    ),
    # gcn, pygcn: a sparse FP32 matrix times what a layer has made
    "a sparse product": (
        """
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3) / 2)

    def forward(self, x, edges):
        return F.log_softmax(torch.spmm(edges, torch.mm(x, self.weight)), 1)
""",
        "loss = F.nll_loss(net(torch.randn(6, 4), torch.eye(6).to_sparse()), torch.arange(6) % 3)",
    ),
    # PyTorch Geometric: an object as the batch, messages that are added at indices
    "an object as the batch": (
        """
    def __init__(self):
        super().__init__()
        self.layer, self.out = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, data):
        h = self.layer(data.x)
        h = torch.zeros_like(h).index_add_(0, data.edges[1], h[data.edges[0]]).relu()
        h = h.new_zeros(2, 8).scatter_add_(0, data.batch[:, None].expand(-1, 8), h)
        return self.out(h)
""",
        "data = SimpleNamespace(x=torch.randn(6, 4), edges=torch.randint(6, (2, 9)), batch=torch.arange(6) % 2); "
        "loss = F.cross_entropy(net(data), torch.tensor([0, 2]))",
    ),
    # Pytorch-UNet, super_resolution, dcgan
    "images of several sizes": (
        """
    def __init__(self):
        super().__init__()
        self.down, self.norm = nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8)
        self.up, self.out = nn.ConvTranspose2d(8, 8, 2, 2), nn.Conv2d(11, 12, 3, padding=1)

    def forward(self, x):
        h = self.up(F.max_pool2d(F.leaky_relu(self.norm(self.down(x)), 0.2), 2))
        h = F.interpolate(F.pad(h, [0, 1, 0, 1]), size=x.shape[2:], mode="bilinear", align_corners=True)
        return F.pixel_shuffle(self.out(torch.cat([x, h], 1)), 2)
""",
        "net = net.to(memory_format=torch.channels_last); x = torch.randn(2, 3, 8, 8); "
        "loss = F.mse_loss(net(x), F.interpolate(x, scale_factor=2))",
    ),
    # TCN
    "weight norm": (
        """
    def __init__(self):
        super().__init__()
        self.first = torch.nn.utils.parametrizations.weight_norm(nn.Conv1d(2, 8, 2, padding=2, dilation=2))
        self.out = nn.Linear(8, 1)

    def forward(self, x):
        return self.out(self.first(x)[:, :, :-2].contiguous().relu()[:, :, -1])
""",
        "x = torch.rand(4, 2, 9); loss = F.mse_loss(net(x), x[:, :1, -1])",
    ),
    # deepvit: attention that is mixed between heads
    "einsum of a parameter": (
        """
    def __init__(self):
        super().__init__()
        self.qkv, self.mix, self.norm = nn.Linear(8, 24), nn.Parameter(torch.randn(2, 2)), nn.LayerNorm(2)

    def forward(self, x):
        q, k, v = (t.reshape(2, 5, 2, 4).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        scores = torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1)
        scores = self.norm(torch.einsum("bhij,hg->bgij", scores, self.mix).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return torch.einsum("bhij,bhjd->bhid", scores, v).transpose(1, 2).reshape(2, 5, 8)
""",
        "loss = F.mse_loss(net(torch.randn(2, 5, 8)), torch.zeros(2, 5, 8))",
    ),
    # denoising-diffusion-pytorch: a schedule in buffers, and a model that returns its loss
    "a model that returns its loss": (
        """
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 4)
        kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 50, dtype=torch.float64), 0)
        self.register_buffer("kept", kept.float())

    def forward(self, x):
        t, noise = torch.randint(50, (len(x),)), torch.randn(x.shape).to(x)  # randn_like draws others for each type
        kept = self.kept.gather(0, t)[:, None]
        noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise
        return F.mse_loss(self.body(torch.cat([noisy, t[:, None] / 50], 1)), noise)
""",
        "loss = net(torch.randn(8, 4))",
    ),
    # torchdiffeq: a solver that calls the model at FP32 times
    "a solver around the model": (
        """
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, t, y):
        return self.body(torch.cat([y**3, t.expand(len(y), 1)], 1))

def solve(y, times):
    path = [y]
    for before, after in zip(times[:-1], times[1:]):
        half = path[-1] + (after - before) / 2 * net(before, path[-1])
        path.append(path[-1] + (after - before) * net((before + after) / 2, half))
    return torch.stack(path)
""",
        "y = torch.rand(4, 2); loss = (solve(y, torch.linspace(0, 1, 4)) - y).abs().mean()",
    ),
    # GPyTorch: linear algebra outside of the forward
    "a Gaussian process": (
        """
    def __init__(self):
        super().__init__()
        self.scale, self.noise, self.mean = (nn.Parameter(torch.full((1,), v)) for v in (0.3, 0.5, 0.0))

    def forward(self, x):
        return self.mean.expand(len(x)), x / F.softplus(self.scale), F.softplus(self.noise)
""",
        "x = torch.rand(8, 1); mean, z, noise = net(x); kernel = torch.exp(-(z - z.T).square()); loss = -torch."
        "distributions.MultivariateNormal(mean, kernel + noise * torch.eye(8)).log_prob(x[:, 0].sin()) / 8",
    ),
    # pytorch-metric-learning
    "triplets": (
        """
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 8)

    def forward(self, x):
        return F.normalize(self.layer(x))
""",
        "a, b, c = net(torch.randn(18, 4)).split(6); loss = F.triplet_margin_loss(a, b, c) + torch.cdist(a, b).mean()",
    ),
    # siamese_network: one branch, twice, by a method
    "two branches": (
        """
    def __init__(self):
        super().__init__()
        self.branch, self.head = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2)), nn.Linear(72, 1)

    def once(self, x):
        return self.branch(x).flatten(1)

    def forward(self, a, b):
        return torch.sigmoid(self.head(torch.cat((self.once(a), self.once(b)), 1)))
""",
        "loss = nn.BCELoss()(net(*torch.randn(2, 4, 1, 8, 8)).squeeze(), torch.tensor([0.0, 1.0, 1.0, 0.0]))",
    ),
}


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("kind", FORWARDS)
def test_what_a_public_programs_forward_does_trains_at_each_level(kind: str, level: str) -> None:
    net, loss = FORWARDS[kind]
    script = FRAME.format(net=net, loss=loss)
    plain, found = run_source(script)["losses"], run(script, level)["losses"]
    torch.testing.assert_close(found, plain, rtol=0.05, atol=0.02, check_dtype=False)
    assert (found == plain) is (kind == "a Gaussian process" and level == "O1")  # which has no product to cast
