"""Healthy models of plain torch, of kinds that public packages have: tiny, with random weights and random batches."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import model_cases
import torch
import torch.nn.functional as F
from model_cases import BATCHES, CLASSES, Case, Made
from torch import Tensor, nn

WIDTH, LENGTH = 32, 12


def made(model: nn.Module, batch: Callable[[], dict[str, Tensor]], loss: Callable) -> Made:
    return Made(model, [batch() for _ in range(BATCHES)], loss)


def classified(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output, batch["targets"])


def regressed(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(output, batch["targets"])


def size() -> int:
    return model_cases.SIZE


def sequences() -> dict[str, Tensor]:
    return {"x": torch.randn(size(), LENGTH, 8), "targets": torch.randint(CLASSES, (size(),))}


def images() -> dict[str, Tensor]:
    return {"x": torch.randn(size(), 3, 16, 16), "targets": torch.randint(CLASSES, (size(),))}


def perceptron(*widths: int) -> nn.Sequential:
    layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.GELU())]
    return nn.Sequential(*layers[:-1])


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(8, WIDTH, 2, batch_first=True), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.out(self.lstm(x)[0][:, -1])


class Unet(nn.Module):
    """Predicts the noise of a picture from its time, as diffusion models do."""

    def __init__(self):
        super().__init__()
        self.time = perceptron(16, 16)
        self.down, self.middle = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 16, 3, padding=1)
        self.norm, self.up = nn.GroupNorm(4, 16), nn.ConvTranspose2d(32, 3, 4, 2, 1)

    def forward(self, x, t):
        angles = t.float()[:, None] * torch.exp(-torch.arange(8, device=x.device) / 8 * 9.2)
        time = self.time(torch.cat([angles.sin(), angles.cos()], -1).to(self.down.weight.dtype))
        down = self.down(x)
        h = F.silu(self.norm(self.middle(F.silu(down)) + time[:, :, None, None]))
        return self.up(torch.cat([down, h], 1))


class Messages(nn.Module):
    """Sums of messages along edges, by a scatter."""

    def __init__(self):
        super().__init__()
        self.message, self.update, self.out = (
            perceptron(16, WIDTH),
            perceptron(WIDTH + 8, WIDTH),
            nn.Linear(WIDTH, CLASSES),
        )

    def forward(self, x, source, target):
        messages = self.message(torch.cat([x[source], x[target]], -1))
        total = messages.new_zeros(len(x), WIDTH).index_add_(0, target, messages)
        return self.out(self.update(torch.cat([total, x.to(total.dtype)], -1)).relu())


class GraphAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.score, self.out = nn.Linear(8, WIDTH), nn.Linear(2 * WIDTH, 1), nn.Linear(WIDTH, CLASSES)

    def forward(self, x, source, target):
        h = self.layer(x)
        scores = F.leaky_relu(self.score(torch.cat([h[source], h[target]], -1)))[:, 0].float()
        top = scores.new_full((len(x),), -1e4).scatter_reduce(0, target, scores, "amax")
        weights = (scores - top[target]).exp()
        total = weights.new_zeros(len(x)).index_add(0, target, weights)
        mixed = torch.zeros(len(x), WIDTH, device=x.device).index_add(
            0, target, (weights / (total[target] + 1e-6))[:, None] * h[source].float()
        )
        return self.out(mixed.to(h.dtype).relu())


def graph() -> dict[str, Tensor]:
    nodes = 8 * size()
    edges = torch.randint(nodes, (2, 4 * nodes))
    return {
        "x": torch.randn(nodes, 8),
        "source": edges[0],
        "target": edges[1],
        "targets": torch.randint(CLASSES, (nodes,)),
    }


class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = perceptron(8, WIDTH, 8), perceptron(4, WIDTH, 8)

    def forward(self, x):
        mean, log_variance = self.encode(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decode(z), mean, log_variance


def evidence(output: tuple[Tensor, ...], batch: dict[str, Tensor]) -> Tensor:
    made, mean, log_variance = output
    return F.mse_loss(made, batch["x"]) - 0.5 * (1 + log_variance - mean.square() - log_variance.exp()).mean()


class TwoTowers(nn.Module):
    """As CLIP: a learned temperature, and a loss of all pairs of the batch."""

    def __init__(self):
        super().__init__()
        self.one, self.other = perceptron(8, WIDTH, 16), perceptron(8, WIDTH, 16)
        self.scale = nn.Parameter(torch.tensor(2.6))

    def forward(self, x, y):
        one, other = F.normalize(self.one(x), dim=-1), F.normalize(self.other(y), dim=-1)
        return self.scale.exp() * one @ other.T


def contrastive(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    own = torch.arange(len(output), device=output.device)
    return (F.cross_entropy(output, own) + F.cross_entropy(output.T, own)) / 2


class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.out = nn.GRU(8, WIDTH, batch_first=True), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.out(self.layers(x)[0])


def ctc(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    ones = torch.ones(len(output), dtype=torch.long)
    logs = output.float().log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(logs, batch["targets"], output.shape[1] * ones, 4 * ones, zero_infinity=True)


class Transducer(nn.Module):
    """As RNN-T: a joint network over times and labels, and the sum over all paths in FP32."""

    def __init__(self):
        super().__init__()
        self.audio, self.text = nn.GRU(8, WIDTH, batch_first=True), nn.Embedding(CLASSES, WIDTH)
        self.joint = nn.Linear(WIDTH, CLASSES)

    def forward(self, x, labels):
        return self.joint((self.audio(x)[0][:, :, None] + self.text(labels)[:, None]).tanh())


def transduced(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    logs, labels = output.float().log_softmax(-1), batch["labels"]
    blank = logs[..., 0]
    emit = logs.gather(-1, labels[:, None, :, None].expand(*logs.shape[:3], 1))[..., 0]
    rows = [blank[:, 0, 0] * 0]
    for place in range(1, labels.shape[1]):
        rows.append(rows[-1] + emit[:, 0, place - 1])
    for time in range(1, logs.shape[1]):
        new = [rows[0] + blank[:, time - 1, 0]]
        for place in range(1, labels.shape[1]):
            new.append(torch.logaddexp(rows[place] + blank[:, time - 1, place], new[-1] + emit[:, time, place - 1]))
        rows = new
    return -(rows[-1] + blank[:, -1, -1]).mean()


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.out = nn.Linear(8, 4), nn.Linear(WIDTH, CLASSES)
        self.experts = nn.ModuleList(perceptron(8, WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        x = x.flatten(0, 1)
        shares, chosen = self.gate(x).softmax(-1).topk(2, -1)
        shares = shares / shares.sum(-1, keepdim=True)
        mixed = torch.zeros(len(x), WIDTH, device=x.device, dtype=shares.dtype)
        for at, expert in enumerate(self.experts):
            row, place = (chosen == at).nonzero(as_tuple=True)
            mixed = mixed.index_add(0, row, (shares[row, place][:, None] * expert(x[row])).to(mixed.dtype))
        return self.out(mixed.view(-1, LENGTH, WIDTH).mean(1))


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches, self.norm, self.end = nn.Conv2d(3, WIDTH, 4, 4), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.across, self.along = perceptron(16, 32, 16), perceptron(WIDTH, 2 * WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = h + self.across(self.norm(h).transpose(1, 2)).transpose(1, 2)
        return self.out((h + self.along(self.end(h))).mean(1))


class Scan(nn.Module):
    """As Mamba: steps and gates from the input, and a state in FP32."""

    def __init__(self):
        super().__init__()
        self.inner, self.step, self.gates = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 8)
        self.rates = nn.Parameter(torch.log(torch.arange(1.0, 5.0)).repeat(16, 1))
        self.out = nn.Linear(16, CLASSES)

    def forward(self, x):
        h = F.silu(self.inner(x))
        step, (b, c) = F.softplus(self.step(h)), self.gates(h).float().chunk(2, -1)
        decay = (-step.float()[..., None] * self.rates.float().exp()).exp()
        given, state, seen = step.float()[..., None] * b[:, :, None] * h.float()[..., None], 0, []
        for at in range(x.shape[1]):
            state = decay[:, at] * state + given[:, at]
            seen.append((state * c[:, at, None]).sum(-1))
        return self.out(torch.stack(seen, 1).mean(1).to(h.dtype))


class Metric(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
        self.out = nn.Linear(64, 16)

    def forward(self, x):
        return F.normalize(self.out(self.net(x).flatten(1)), dim=-1)


def triplets(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.triplet_margin_loss(output, output.roll(1, 0), output.roll(2, 0), margin=0.5)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.act, self.value = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 1)

    def forward(self, x):
        h = self.body(x)
        return self.act(h), self.value(h)[:, 0]


def proximal(output: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
    logits, value = output[0].float(), output[1].float()
    logs = logits.log_softmax(-1)
    ratio = (logs.gather(1, batch["targets"][:, None])[:, 0] - batch["old"]).exp()
    gain = torch.minimum(ratio * batch["gain"], ratio.clamp(0.8, 1.2) * batch["gain"])
    return -gain.mean() + 0.5 * F.mse_loss(value, batch["gain"]) + 0.01 * (logs.exp() * logs).sum(-1).mean()


class Critic(nn.Module):
    """The discriminator of a GAN, with a spectral norm."""

    def __init__(self):
        super().__init__()
        first, second = nn.Conv2d(3, 16, 4, 2, 1), nn.Conv2d(16, 32, 4, 2, 1)
        self.net = nn.Sequential(
            nn.utils.parametrizations.spectral_norm(first), nn.LeakyReLU(0.2),
            nn.utils.parametrizations.spectral_norm(second), nn.LeakyReLU(0.2),
            nn.Flatten(), nn.Linear(32 * 16, 1),
        )  # fmt: skip

    def forward(self, x):
        return self.net(x)[:, 0]


def judged(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, (batch["targets"] > 1).to(output.dtype))


class Flow(nn.Module):
    """Coupling layers, and the logarithm of their determinant."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(perceptron(4, WIDTH, 8) for _ in range(3))

    def forward(self, x):
        total = 0
        for part in self.parts:
            kept, moved = x.chunk(2, -1)
            scale, shift = part(kept).chunk(2, -1)
            x, total = torch.cat([moved * scale.tanh().exp() + shift, kept], -1), total + scale.tanh().sum(-1)
        return x, total


def likelihood(output: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return (0.5 * output[0].float().square().sum(-1) - output[1].float()).mean()


class Field(nn.Module):
    """Colours of a picture from sines of places, as NeRF."""

    def __init__(self):
        super().__init__()
        self.net = perceptron(20, WIDTH, WIDTH, 3)

    def forward(self, x):
        angles = x.float()[..., None] * 2.0 ** torch.arange(5, device=x.device)
        return self.net(torch.cat([angles.sin(), angles.cos()], -1).flatten(1).to(self.net[0].weight.dtype)).sigmoid()


class Codes(nn.Module):
    """As VQ-VAE: the nearest code, and gradients straight through."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = perceptron(8, WIDTH, 8), perceptron(8, WIDTH, 8)
        self.codes = nn.Parameter(torch.randn(16, 8))

    def forward(self, x):
        h = self.encode(x)
        code = self.codes[torch.cdist(h.detach().float(), self.codes.detach().float()).argmin(-1)].to(h.dtype)
        return self.decode(h + (code - h).detach()), F.mse_loss(h, code.detach()) + F.mse_loss(code, h.detach())


def coded(output: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(output[0], batch["x"]) + 0.25 * output[1]


def _with(**more: Callable[[], Tensor]) -> Callable[[], dict[str, Tensor]]:
    return lambda: {name: make() for name, make in more.items()}


def rows() -> Tensor:
    return torch.randn(size(), 8)


def labels() -> Tensor:
    return torch.randint(1, CLASSES, (size(), 4))


def inputs() -> Tensor:
    return torch.randn(size(), LENGTH, 8)


def classes() -> Tensor:
    return torch.randint(CLASSES, (size(),))


def noised() -> dict[str, Tensor]:
    noise = torch.randn(size(), 3, 16, 16)
    return {"x": torch.randn(size(), 3, 16, 16) + noise, "t": torch.randint(1000, (size(),)), "targets": noise}


def played() -> dict[str, Tensor]:
    old = -1.4 + 0.05 * torch.randn(size())
    return {"x": rows(), "targets": torch.randint(4, (size(),)), "gain": torch.randn(size()), "old": old}


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.1, batch_first=True)
    return nn.Sequential(nn.Linear(8, WIDTH), layer, nn.Flatten(), nn.Linear(WIDTH * LENGTH, CLASSES))


def places() -> dict[str, Tensor]:
    return {"x": torch.rand(size(), 2), "targets": torch.rand(size(), 3)}


PLAIN = {
    "diffusion U-Net": lambda: made(Unet(), noised, regressed),
    "LSTM": lambda: made(Lstm(), sequences, classified),
    "messages by a scatter": lambda: made(Messages(), graph, classified),
    "graph attention by hand": lambda: made(GraphAttention(), graph, classified),
    "VAE": lambda: made(Vae(), _with(x=rows), evidence),
    "discriminator": lambda: made(Critic(), images, judged),
    "two towers": lambda: made(TwoTowers(), _with(x=rows, y=rows), contrastive),
    "CTC": lambda: made(Speech(), _with(x=inputs, targets=labels), ctc),
    "transducer": lambda: made(Transducer(), _with(x=inputs, labels=labels), transduced),
    "experts by hand": lambda: made(Experts(), sequences, classified),
    "MLP-Mixer": lambda: made(Mixer(), images, classified),
    "selective scan": lambda: made(Scan(), sequences, classified),
    "metric learning": lambda: made(Metric(), images, triplets),
    "policy": lambda: made(Policy(), played, proximal),
    "flow": lambda: made(Flow(), _with(x=rows), likelihood),
    "field": lambda: made(Field(), places, regressed),
    "codes": lambda: made(Codes(), _with(x=rows), coded),
    "encoder": lambda: made(encoder(), _with(input=inputs, targets=classes), classified),
}


def cases() -> list[Case]:
    return [Case("torch", label, make) for label, make in PLAIN.items()]
