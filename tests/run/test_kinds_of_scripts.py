"""Kinds of script, as their authors would have written them, through `compare` without an edit."""

from __future__ import annotations

import importlib.util
import re
import statistics

import pytest
from scripts import start_script

from amp_patch.diagnose.recording.run import Run, loads

pytestmark = pytest.mark.slow

LEVELS = ["O0", "O1", "O5"]
DIGITS = """
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
digits = load_digits()
images, classes = torch.tensor(digits.images).float().unsqueeze(1) / 16, torch.tensor(digits.target)
"""
CONVNET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.Linear(144, 10)

    def forward(self, x):
        return self.head(F.max_pool2d(self.norm(self.conv(x)).relu(), 2).flatten(1))

net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
loader = DataLoader(TensorDataset(images, classes), batch_size=64, shuffle=True)
"""
GPT = """
import pydoc_data.topics
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)
text = "".join(pydoc_data.topics.topics.values()).encode("ascii", "replace")
codes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
WIDTH, HEADS, CONTEXT = 64, 4, 32

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.before(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return x + self.mlp(self.after(x))

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.place = nn.Embedding(128, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(2)), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 128, bias=False)
        self.head.weight = self.token.weight

    def forward(self, x):
        h = self.token(x) + self.place(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))

model = GPT()
groups = [[p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim == 1]]
optimizer = torch.optim.AdamW([{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}], lr=1e-3)
for step in range(6):
    for micro in range(2):
        at = torch.randint(len(codes) - CONTEXT - 1, (8,))
        x = torch.stack([codes[i : i + CONTEXT] for i in at])
        y = torch.stack([codes[i + 1 : i + 1 + CONTEXT] for i in at])
        loss = F.cross_entropy(model(x).view(-1, 128), y.view(-1))
        (loss / 2).backward()
        print((loss / 2).item().hex(), end=" ")
    print()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""
GAN = (
    DIGITS
    + """
G = nn.Sequential(nn.Linear(16, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.Sigmoid())
D = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
optG = torch.optim.Adam(G.parameters(), lr=2e-4, betas=(0.5, 0.999))
optD = torch.optim.Adam(D.parameters(), lr=2e-4, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()
real, fake = torch.ones(32, 1), torch.zeros(32, 1)
for step in range(6):
    x = images[torch.randint(len(images), (32,))].flatten(1)
    made = G(torch.randn(32, 16))
    D.zero_grad()
    errD = criterion(D(x), real)
    errD.backward()
    errD2 = criterion(D(made.detach()), fake)
    errD2.backward()
    optD.step()
    print(errD.item().hex(), errD2.item().hex())
    G.zero_grad()
    errG = criterion(D(made), real)
    errG.backward()
    optG.step()
    print(errG.item().hex(), end=" + ")
"""
)
NATIVE = (
    DIGITS
    + CONVNET
    + """
scaler = torch.amp.GradScaler("cpu")
for step, (x, y) in enumerate(loader):
    if step == 6:
        break
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(net(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    print(loss.item().hex())
"""
)
APEX = """
import argparse
import torch
from torch import nn
try:
    from apex import amp
    from apex.optimizers import FusedAdam
except ImportError:
    raise ImportError("Please install apex from https://www.github.com/nvidia/apex to run this example.")

parser = argparse.ArgumentParser()
parser.add_argument("--opt-level", default="O1")
args = parser.parse_args()
torch.manual_seed(2)
model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8))
optimizer = FusedAdam(model.parameters(), lr=1e-3)
model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
for step in range(6):
    x, y = torch.randn(16, 32), torch.randint(8, (16,))
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    optimizer.step()
    print(loss.item().hex())
"""
ACCELERATE = (
    DIGITS
    + CONVNET
    + """
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
for step, (x, y) in enumerate(loader):
    if step == 6:
        break
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), y)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    print(loss.item().hex())
"""
)
# As SupContrast: Apex is imported if it is there, for another part than its amp.
UNUSED_APEX = f"try:\n    import apex\n    from apex import amp, optimizers\nexcept ImportError:\n    pass\n{GAN}"
KINDS = {
    "gpt": GPT,
    "gan": GAN,
    "native": NATIVE,
    "apex": APEX,
    "accelerate": ACCELERATE,
    "unused apex": UNUSED_APEX,
}
# Replacements that turn a script with mixed precision into one in FP32.
IN_FP32 = {
    "native": [
        ('torch.amp.GradScaler("cpu")', 'torch.amp.GradScaler("cpu", enabled=False)'),
        ("dtype=torch.bfloat16)", "enabled=False)"),
    ],
    "apex": [
        (r"try:\n.*?\n\n", "from amp_patch.optimizers import FusedAdam\n\n"),
        (r"model, optimizer = amp[^\n]*\n", ""),
        (r"with amp.scale_loss.*?backward\(\)", "loss.backward()"),
        (r"amp.master_params\(optimizer\)", "model.parameters()"),
    ],
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_unedited_kind_of_script_is_compared(kind, tmp_path):
    if kind == "accelerate" and importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed; `make test-all` installs it")
    script = plain = KINDS[kind]
    for pattern, put in IN_FP32.get(kind, []):
        plain = re.sub(re.escape(pattern) if kind == "native" else pattern, put, plain, flags=re.DOTALL)
    alone = start_script(tmp_path, plain)
    assert alone.returncode == 0, alone.stderr
    done = start_script(tmp_path, script, "-m", "amp_patch", "compare", "--levels", ",".join(LEVELS), "--seeds", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    runs = [Run.from_dict(run) for run in loads((tmp_path / "amp_compare/report.json").read_text())["runs"]]
    assert [run.level for run in runs] == LEVELS + ["native"] * (kind == "native")
    o0, *others = runs
    # The loss of a step is the sum of its losses, each a mean over micro-batches. A GAN's step ends with optimizer 0.
    lines = [line.split(" + ") for line in alone.stdout.splitlines() if not line.endswith("+ ")]
    losses = [[statistics.mean(map(float.fromhex, each.split())) for each in line] for line in lines]
    assert o0.loss == [sum(step) for step in losses] and o0.error is None
    for run in others:
        assert (run.error, run.steps) == (None, o0.steps) and run.loss != o0.loss == pytest.approx(run.loss, rel=0.1)
