"""What the public programs of benchmarks/program_list.py do that torch alone can, each as a small script."""

from __future__ import annotations

import torch
from crossed import crossed
from scripts import edited, run_source

from amp_patch import amp
from amp_patch.run.unedited.script import UneditedScript

# Each has what one kind of public program does, in a forward or around it.
FRAME = """
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
}


def run_at(script: str, level: str) -> list[torch.Tensor]:
    with UneditedScript(level):
        losses: list[torch.Tensor] = run_source(script)["losses"]
    return losses


@crossed({"kind": list(FORWARDS), "level": ["O1", "O2", "O5"]}, meet=1)
def test_what_a_public_programs_forward_does_trains_at_each_level(kind: str, level: str) -> None:
    net, loss = FORWARDS[kind]
    script = FRAME.format(net=net, loss=loss)
    plain, found = run_source(script)["losses"], run_at(script, level)
    torch.testing.assert_close(found, plain, rtol=0.05, atol=0.02, check_dtype=False)
    assert (found == plain) is (kind == "a Gaussian process" and level == "O1")  # which has no product to cast


# Each has what one kind of public program does around its models. The comments are the lines that our own script has.
BEGIN = """
torch.manual_seed(0)
losses = []
"""
LOOPS = {
    # word_language_model: the hidden state is carried from batch to batch
    "a carried state": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.rnn, self.head = nn.Embedding(16, 8), nn.LSTM(8, 8), nn.Linear(8, 16)

    def start(self):
        weight = next(self.parameters())
        return weight.new_zeros(1, 4, 8), weight.new_zeros(1, 4, 8)

    def forward(self, tokens, state):
        out, state = self.rnn(self.table(tokens), state)
        return F.log_softmax(self.head(out).view(-1, 16), dim=1), state

net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-4)
#net, optimizer = amp.initialize(net, optimizer, opt_level=LEVEL)
state = net.start()
for step in range(4):
    state = tuple(each.detach() for each in state)
    out, state = net(torch.randint(16, (5, 4)), state)
    loss = F.nll_loss(out, torch.randint(16, (20,)))
    net.zero_grad()
    loss.backward() #optimizer
    optimizer.step()
    losses.append(loss.detach())
""",
    # dqn: a copy that is no model of the training, and takes the weights by their data
    "a target network": """
net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, eps=1e-4)
#net, optimizer = amp.initialize(net, optimizer, opt_level=LEVEL)
target = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
target.load_state_dict(net.state_dict())
for step in range(5):
    seen, actions, later = torch.randn(8, 4), torch.randint(2, (8, 1)), torch.randn(8, 4)
    value = net(seen).gather(1, actions).squeeze()
    with torch.no_grad():
        wanted = 1 + 0.9 * target(later).max(dim=1)[0]
    loss = F.mse_loss(wanted, value) / 256
    optimizer.zero_grad()
    loss.backward() #optimizer
    optimizer.step()
    for slow, fast in zip(target.parameters(), net.parameters()):
        slow.data.copy_(0.5 * fast.data + 0.5 * slow.data)
    losses.append(loss.detach())
""",
    # wgan_gp: the penalty is a loss of gradients
    "a penalty on gradients": """
net = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, eps=1e-4)
#net, optimizer = amp.initialize(net, optimizer, opt_level=LEVEL)
for step in range(4):
    between = torch.randn(8, 4, requires_grad=True)
    score = net(between)
    (grads,) = torch.autograd.grad(score, between, torch.ones_like(score), create_graph=True, retain_graph=True)
    loss = score.mean() + 10 * ((grads.norm(2, dim=1) - 1) ** 2).mean()
    optimizer.zero_grad()
    loss.backward() #optimizer
    optimizer.step()
    losses.append(loss.detach())
""",
}


@crossed({"kind": list(LOOPS), "level": ["O1", "O2", "O5"]}, meet=1)
def test_a_public_programs_loop_trains_as_with_three_lines(kind, level):
    script = BEGIN + LOOPS[kind]
    plain = run_source(script)["losses"]
    with UneditedScript(level) as trained:
        losses = run_source(script)["losses"]
    amp.restore()
    expected = run_source(edited(script), amp=amp, LEVEL=level)["losses"]
    torch.testing.assert_close(losses, plain, rtol=0.05, atol=0.02, check_dtype=False)
    assert losses == expected and losses != plain and trained.missing() is None
