"""Tables of frequencies beside weights: a warning in the first forwards, and `keep_fp32="buffers"`."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from conftest import DEVICES
from torch import Tensor, nn
from training import SGD, backward

from amp_patch import amp
from amp_patch.casts.mixed_operands import TRACED

CAST = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16, "O7": torch.bfloat16}
FREQUENCIES = 1e4 ** (-torch.arange(0, 8, 2) / 8)
TWICE = torch.cat([FREQUENCIES, FREQUENCIES])


class Rotary(nn.Module):
    """The last six queries of a sequence, rotated by their positions, with the frequencies beside the weights."""

    def __init__(self, table: Tensor = FREQUENCIES) -> None:
        super().__init__()
        self.register_buffer("frequencies", table.clone())
        self.q, self.v = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)[-6:, None]
        self.angles, x = positions * self.frequencies, x[:, -6:]
        cos, sin = self.angles.cos(), self.angles.sin()
        a, b = self.q(x).chunk(2, -1)
        rotated = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
        return torch.nn.functional.scaled_dot_product_attention(rotated, rotated, self.v(x))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(8, 8))
        self.layer = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x @ self.table + self.table[0])


class Net(nn.Module):
    def __init__(self, table: Tensor = FREQUENCIES) -> None:
        super().__init__()
        self.embed, self.rotary, self.head = nn.Embedding(9, 8), Rotary(table), nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x[:, -6:] + self.rotary(x))


def ids(device: str = "cpu") -> Tensor:
    return torch.arange(4096, device=device)[None] % 9


def made(model: nn.Module, level: str, **options):
    return amp.initialize(model, SGD(model.parameters()), opt_level=level, **options)


def step(model: nn.Module, optimizer, device: str = "cpu") -> Tensor:
    output = model(ids(device))
    optimizer.zero_grad()
    with amp.scale_loss(output.float().square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    return output.detach()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", CAST)
def test_frequencies_beside_weights_are_named_in_the_first_forward(level, device):
    model, optimizer = made(Net().to(device), level)
    with pytest.warns(UserWarning, match=r"buffers \['rotary.frequencies'\] of Net, which look like freq") as caught:
        for _ in range(3):
            step(model, optimizer, device)
    said = str(caught[0].message)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert "keep_fp32='buffers'" in said and "keep_fp32=['rotary']" in said
    worst = {torch.float16: "1 radians", torch.bfloat16: "8 radians"}[CAST[level]]  # half a step of 4095
    assert f"positions up to 4095, angles are off by up to {worst}" in said


class Timed(nn.Module):
    """The sinusoids of the times of a diffusion, behind nothing but the type of the table."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("frequencies", table.clone())
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return self.out(x)


LONG = 5e5 ** (-torch.arange(0, 128, 2) / 128)
SEQUENCE = (torch.zeros(1, 4096, 4),)
TIMES = (torch.zeros(2, 4), torch.tensor([999, 11]))


@pytest.mark.parametrize(
    ("table", "inputs", "level"),
    [
        (LONG, SEQUENCE, "O2"),
        (LONG, (torch.zeros(1, 600, 4),), "O5"),
        (torch.exp(-math.log(1e4) * torch.arange(16) / 16), TIMES, "O5"),
        (torch.cat([LONG, LONG])[None, None], SEQUENCE, "O2"),
        (torch.outer(torch.arange(4096.0), LONG), SEQUENCE, "O2"),
        (torch.outer(torch.arange(4096.0), TWICE)[None, :, None], SEQUENCE, "O5"),
    ],
)
def test_the_usual_forms_of_tables_are_recognized(table, inputs, level):
    model = amp.initialize(Timed(table), opt_level=level)
    with pytest.warns(UserWarning, match=r"buffers \['frequencies'\] of Timed"):
        model(*inputs)


@pytest.mark.parametrize(
    ("table", "inputs"),
    [
        (torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0), TIMES),  # the schedule of a diffusion
        (torch.cat([torch.ones(1), torch.cumprod(1 - torch.linspace(1e-4, 0.02, 999), 0)]), TIMES),
        (0.99 ** torch.arange(100), SEQUENCE),  # discounts
        (2.0 ** -torch.arange(1, 9), SEQUENCE),  # slopes of ALiBi
        (torch.tensor([0.485, 0.456, 0.406]), SEQUENCE),
        (torch.hann_window(16), SEQUENCE),
        (torch.rand(16, 16), SEQUENCE),
        (torch.outer(torch.arange(64.0), FREQUENCIES).cos(), SEQUENCE),
        (torch.eye(4), SEQUENCE),
        (torch.zeros(0), SEQUENCE),
        (torch.tensor(1.0), SEQUENCE),
        (LONG, (torch.zeros(2, 3, 224, 4),)),  # positions of patches
        (LONG, (torch.zeros(1, 100, 4),)),
        (torch.outer(torch.arange(4096.0), LONG), (torch.zeros(1, 100, 4),)),
    ],
)
def test_other_tables_and_small_positions_are_not_named(table, inputs):
    amp.initialize(Timed(table), opt_level="O5")(*inputs)
    frequencies = torch.exp(-math.log(1e4) * torch.arange(128) / 128)  # which FP16 holds well enough for these times
    amp.initialize(Timed(frequencies), opt_level="O2")(*TIMES)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("keep", ["buffers", ["rotary"], ["buffers", "head"]])
@pytest.mark.parametrize("level", CAST)
def test_angles_are_exact_with_keep_fp32(level, keep, device):
    torch.manual_seed(0)
    exact = Net().to(device)
    model, optimizer = made(copy.deepcopy(exact), level, keep_fp32=keep)
    expected, output = exact(ids(device)), step(model, optimizer, device)
    assert model.rotary.frequencies.dtype is torch.float32
    assert torch.equal(model.rotary.angles, exact.rotary.angles)
    eps = 2**-3 if level == "O7" else torch.finfo(CAST[level]).eps  # the formats of O7 have 3 bits
    torch.testing.assert_close(output, expected, rtol=0, atol=8 * eps * expected.abs().max().item())
    kept = torch.float32 if keep == ["rotary"] else CAST[level]
    assert model.rotary.q.weight.dtype is kept and model.embed.weight.dtype is CAST[level]
    assert model.head.weight.dtype is (torch.float32 if "head" in keep else CAST[level])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.InstanceNorm1d])
@pytest.mark.parametrize("level", CAST)
def test_norms_that_are_cast_run_with_their_statistics_in_fp32(level, norm, device):
    torch.manual_seed(0)
    exact = nn.Sequential(nn.Linear(6, 6), norm(4, affine=True, track_running_stats=True), nn.Linear(6, 2)).to(device)
    keep = {} if level == "O3" else {"keep_batchnorm_fp32": False}
    model, optimizer = made(copy.deepcopy(exact), level, keep_fp32="buffers", **keep)
    x = torch.randn(8, 4, 6, device=device)
    for _ in range(2):
        backward(model(x).square().sum() / 64, optimizer)
        exact(x)
    low = {p.dtype for p in model.parameters()}
    assert low == {CAST[level]} and model[1].running_var.dtype is torch.float32
    eps = 2**-3 if level == "O7" else torch.finfo(CAST[level]).eps
    torch.testing.assert_close(model[1].running_var, exact[1].running_var, rtol=2 * eps, atol=0)
    assert all(p.grad.isfinite().all() for p in model.parameters())
    torch.testing.assert_close(model.eval()(x), exact.eval()(x), rtol=0, atol=8 * eps)


def test_a_bf16_model_gets_fp32_buffers_and_its_types_back():
    model = Net().bfloat16()
    model, optimizer = made(model, "O5", keep_fp32="buffers")
    assert model.rotary.frequencies.dtype is torch.float32
    step(model, optimizer)
    amp.restore()
    assert {value.dtype for value in model.state_dict().values()} == {torch.bfloat16}


@pytest.mark.program
@pytest.mark.skipif(not TRACED, reason="Dynamo of this torch is not tried with the mode")
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_compiled_calls_that_mix_types_are_cast(level, fresh_compiler):
    model, _ = made(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), Scaled()), level, keep_fp32="buffers")
    x = torch.randn(4, 8)
    assert torch.equal(torch.compile(model.eval(), backend="eager", fullgraph=True)(x), model(x))
