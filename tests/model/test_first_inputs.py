"""Inputs of cast models: the first forwards refuse or warn about those that the cast ruins, and masks stay finite."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import DEVICES
from low_models import Echo
from syncs import count
from torch import Tensor, nn
from training import SGD

from amp_patch import amp

CAST = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16, "O7": torch.bfloat16}
SMALLEST = torch.finfo(torch.float32).min


class Attention(nn.Module):
    """Attention under an additive mask of floats, or a mask of booleans that are True where nothing is attended to."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(-1, -2)
        if mask.dtype is torch.bool:
            mask = torch.zeros_like(scores).masked_fill(mask, torch.finfo(scores.dtype).min)
        return (scores + mask).softmax(-1) @ self.v(x)


class Timed(nn.Module):
    """A layer that also receives a time, as diffusion models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, t: Tensor, *more: Tensor, **named: Tensor) -> Tensor:
        self.seen = t
        angles = t.float() / 1000
        return self.layer(x) + angles.sin().to(x.dtype)[..., None]

    def encode(self, x: Tensor) -> Tensor:
        return self.layer(x)


def hidden() -> Tensor:
    """What a causal mask hides. In the second sequence it hides all of the first row."""
    mask = torch.ones(2, 4, 4, dtype=torch.bool).triu(1)
    mask[1, 0] = True
    return mask


def made(model: nn.Module, level: str, device: str = "cpu", **options):
    torch.manual_seed(0)
    model = model.to(device)
    return amp.initialize(model, SGD(model.parameters()), opt_level=level, **options)


def train(model: nn.Module, optimizer, steps: int, *inputs: Tensor) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(*inputs).float().square().mean()
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# ----------------------------------------------------------------------------------------------------------------------
# Masks


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("number", [SMALLEST, -1e38, -1e9])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_mask_beyond_the_type_trains_as_a_mask_of_booleans(level, number, device):
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1)).to(device)
    results = []
    for mask in (torch.zeros(2, 4, 4).masked_fill(hidden(), number), hidden()):
        torch.manual_seed(3)
        model, optimizer = made(Attention(), level, device, **({"loss_scale": 8.0} if level == "O2" else {}))
        losses = train(model, optimizer, 6, x, mask.to(device))
        results.append((losses, [p.detach().clone() for p in amp.master_params(optimizer)]))
        amp.restore()
    (losses, weights), (expected, same) = results
    assert losses == expected and all(map(torch.equal, weights, same))
    assert all(bool(w.isfinite().all()) for w in weights)


def test_a_mask_that_forward_receives_by_name_or_in_a_dict_is_finite_in_every_later_call():
    class Net(nn.Linear):
        def forward(self, x, batch, mask=None):
            self.seen = batch["mask"], mask
            return super().forward(x)

    model = amp.initialize(Net(4, 4), opt_level="O5")
    given = torch.tensor([0.0, SMALLEST, float("-inf")])
    for call in range(5):
        batch = {"mask": given.clone()}
        if call % 2:
            model(torch.ones(1, 4), batch, given.clone())
        else:
            model(torch.ones(1, 4), batch=batch, mask=given.clone())
        assert torch.equal(batch["mask"], given), "the caller's own"
        for seen in model.seen:
            assert seen.dtype is torch.bfloat16
            assert seen.tolist() == [0.0, torch.finfo(torch.bfloat16).min, float("-inf")]


@pytest.mark.slow
def test_a_mask_that_was_seen_is_finite_in_a_compiled_forward():
    torch.manual_seed(0)
    model = amp.initialize(Attention().eval(), opt_level="O5")
    x, mask = torch.randn(2, 4, 8), torch.zeros(2, 4, 4).masked_fill(hidden(), SMALLEST)
    with torch.no_grad():
        expected = model(x, mask)
        torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x, mask), expected)


# ----------------------------------------------------------------------------------------------------------------------
# Numbers that become infinite


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("level", "number", "other"), [("O2", 1e6, "O5"), ("O3", -1e6, "O5"), ("O5", -SMALLEST, "O4"), ("O7", 3.4e38, "O6")]
)
def test_a_number_that_becomes_infinite_is_an_error_that_names_it(level, number, other, device):
    model, _ = made(nn.Linear(4, 4), level, device)
    x = torch.ones(2, 4, device=device)
    x[1, 2] = number
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"Linear\.forward: argument 'input' holds") as raised:
        model(x)
    said = str(raised.value)
    assert f"{number:g}" in said and str(CAST[level]) in said and f"opt_level={other!r}" in said
    assert f"{torch.finfo(CAST[level]).max:g}" in said
    assert all(map(torch.equal, before, model.parameters()))
    assert model(torch.ones(2, 4, device=device)).isfinite().all()


def test_an_infinity_and_a_nan_of_the_script_are_no_error():
    model = amp.initialize(nn.Linear(4, 4), opt_level="O2")
    assert model(torch.tensor([[float("inf"), 1.0, float("nan"), 2.0]])).isnan().any()


def test_a_negative_number_among_other_numbers_is_no_mask():
    model = amp.initialize(nn.Linear(4, 4), opt_level="O2")
    with pytest.raises(ValueError, match="holds -999999"):
        model(torch.tensor([[-999999.0, -999999.0, 3.5, 0.0]]))


def test_the_error_names_the_method_and_the_key():
    model = amp.initialize(Timed(), opt_level="O2", methods=("encode",))
    with pytest.raises(ValueError, match=r"Timed.encode: argument 'x' holds 100000,"):
        model.encode(torch.full((1, 4), 1e5))
    with pytest.raises(ValueError, match=r"Timed.forward: argument 'scale' holds 100000,"):
        model(torch.ones(1, 4), torch.tensor([1]), scale=torch.tensor(1e5))
    with pytest.raises(ValueError, match=r"Timed.forward: argument 2 holds 100000,"):
        model(torch.ones(1, 4), torch.tensor([1]), torch.tensor(1e5))
    with pytest.raises(ValueError, match=r"argument 't'\['b'\] holds 100000,"):
        amp.initialize(Timed(), opt_level="O2")(torch.ones(1, 4), {"b": [torch.tensor(1e5)]})


# ----------------------------------------------------------------------------------------------------------------------
# Whole numbers


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("level", "number", "becomes"), [("O5", 937.0, "936"), ("O2", 2049.0, "2048")])
def test_a_time_that_changes_is_warned_about_once(level, number, becomes, device):
    model, optimizer = made(Timed(), level, device)
    x, t = torch.randn(2, 4, device=device), torch.tensor([number, 11.0], device=device)
    with pytest.warns(UserWarning, match="argument 't' has whole numbers alone") as caught:
        train(model, optimizer, 4, x, t)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert f"({number:g} becomes {becomes})" in str(caught[0].message) and "int64" in str(caught[0].message)


@pytest.mark.parametrize(
    ("level", "t", "becomes"),
    [
        ("O5", torch.tensor([937.2, 11.5]), "937.2 becomes 936"),
        ("O5", torch.tensor(937.2), "937.2 becomes 936"),
        ("O7", torch.tensor([[437.5], [261.2]]), "261.2 becomes 262"),
        ("O5", torch.tensor([12.5, 937.2, 300.25]).reshape(3, 1, 1, 1), "937.2 becomes 936"),
        ("O2", torch.tensor([5001.25, 0.5, 4000.0]), "5001.25 becomes 5000"),
    ],
)
def test_times_with_fractions_are_warned_about_once(level, t, becomes):
    model = amp.initialize(Echo(), opt_level=level)
    with pytest.warns(UserWarning, match="argument 't' has one number a sample") as caught:
        [model(t) for _ in range(3)]
    assert len(caught) == 1 and becomes in str(caught[0].message) and "keep_fp32=" in str(caught[0].message)


@pytest.mark.parametrize("level", CAST)
@pytest.mark.parametrize(
    "t",
    [
        torch.tensor([937, 4095]),  # integers are not cast
        torch.tensor([0.0, 255.0, -100.0, 256.0]),  # numbers of both types
        torch.tensor([1024.0, 2048.0]),
        torch.tensor([0.0, -10000.0]),  # a mask that FP16 holds and BF16 rounds
        torch.tensor([0.0, float("-inf")]),
        torch.zeros(0),
        torch.rand(64, generator=torch.Generator().manual_seed(0)),
        torch.rand(64, 1, generator=torch.Generator().manual_seed(0)) * 255,
        torch.tensor([1.25, 3.5, 0.75, 12.0, 30.5, 2000.3]),  # a feature of a wide range
        torch.tensor([-0.5, 700.3]),
        torch.arange(384.0).reshape(2, 3, 8, 8) % 256,  # pixels
        torch.arange(384.0).reshape(2, 3, 8, 8) * 169,
    ],
)
def test_other_numbers_are_not_warned_about(level, t):
    amp.initialize(Echo(), opt_level=level)(t)


# ----------------------------------------------------------------------------------------------------------------------
# When


@pytest.mark.parametrize("training", [True, False])
def test_only_three_forwards_of_a_mode_are_looked_at(training):
    model = amp.initialize(nn.Linear(4, 4), opt_level="O2").train(training)
    for _ in range(3):
        model(torch.ones(1, 4))
    assert not model(torch.full((1, 4), 1e6)).isfinite().any()
    with pytest.raises(ValueError, match="holds 1e\\+06"):
        model.train(not training)(torch.full((1, 4), 1e6))


@pytest.mark.parametrize("device", DEVICES)
def test_each_of_the_first_forwards_syncs_once_and_no_later_one(device):
    model, _ = made(Attention(), "O5", device)
    x, bias = torch.randn(2, 4, 8, device=device), torch.randn(2, 4, 4, device=device)
    assert [count(device, lambda: model(x, bias)) for _ in range(5)] == [1, 1, 1, 0, 0]


@pytest.mark.slow
def test_compiled_forwards_are_not_looked_at():
    model = amp.initialize(Timed(), opt_level="O5")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert compiled(torch.randn(1, 4), torch.tensor([937.0])).isfinite().all()


def test_a_mask_of_a_model_that_checkpoints_activations_is_finite():
    class Net(Attention):
        def forward(self, x, mask):
            return torch.utils.checkpoint.checkpoint(super().forward, x, mask, use_reentrant=False)

    model, optimizer = made(Net(), "O5")
    mask = torch.zeros(2, 4, 4).masked_fill(hidden(), SMALLEST)
    losses = train(model, optimizer, 5, torch.randn(2, 4, 8), mask)
    assert all(map(math.isfinite, losses))
