"""Functions whose low-precision forms are wrong at every level: FP32 at O1 and O4, and inside of cast models."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from conftest import DEVICES
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import normalize
from training import iterate

from amp_patch import amp

CAST = ["O2", "O3", "O5"]
ANY = ["O1", "O4", *CAST]


def steps(model: nn.Module, level: str, inputs: Tensor, targets: Tensor, loss: Any, count: int = 8) -> list[float]:
    """The losses of a training."""
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, allow_banned=True, verbosity=0
    )
    return iterate(optimizer, lambda _: loss(model(inputs), targets), range(count))


# ---------------------------------------------------------------------------------------------------------------------
# binary_cross_entropy behind a sigmoid


class Probability(nn.Module):
    """A sigmoid of 11 for the input 11, until it learns."""

    def __init__(self, sigmoid: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        nn.init.ones_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)
        self.sigmoid = sigmoid

    def forward(self, inputs: Tensor) -> Tensor:
        return self.sigmoid(self.layer(inputs))


def cross_entropy(probabilities: Tensor, targets: Tensor) -> Tensor:
    return functional.binary_cross_entropy(probabilities, targets)


SIGMOIDS = [nn.Sigmoid(), torch.sigmoid, Tensor.sigmoid, torch.special.expit]


def sure_and_wrong(device: str) -> tuple[Tensor, Tensor]:
    return torch.tensor([[11.0]], device=device), torch.zeros(1, 1, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", ["O1", "O4"])
@pytest.mark.parametrize("sigmoid", SIGMOIDS, ids=["module", "function", "method", "special"])
def test_a_sure_and_wrong_sample_is_learned(sigmoid: Any, level: str, device: str) -> None:
    losses = steps(Probability(sigmoid).to(device), level, *sure_and_wrong(device), cross_entropy, count=12)
    assert losses[0] == pytest.approx(11.0, abs=0.01) and losses[-1] < 0.1


@pytest.mark.parametrize("level", CAST)
@pytest.mark.parametrize("of", ["function", "module"])
def test_a_cast_model_warns_once_of_the_first_probability_rounded_to_1(of: str, level: str) -> None:
    loss = cross_entropy if of == "function" else nn.BCELoss()
    with pytest.warns(UserWarning, match=r"exactly 0 or 1.*binary_cross_entropy_with_logits") as told:
        count = 1 if level == "O3" else 4  # O3 takes the step with the NaN
        steps(Probability(torch.sigmoid), level, *sure_and_wrong("cpu"), loss, count)
    assert [warning.filename for warning in told] == [__file__]


def test_restore_has_the_next_rounded_probability_told_of() -> None:
    for _ in range(2):
        with pytest.warns(UserWarning, match="exactly 0 or 1"):
            steps(Probability(torch.sigmoid), "O5", *sure_and_wrong("cpu"), cross_entropy)
        amp.restore()


@pytest.mark.parametrize("level", CAST)
@pytest.mark.parametrize("logit", [3.0, -4.0])
def test_other_probabilities_of_a_cast_model_are_not_told_of(logit: float, level: str) -> None:
    inputs = torch.full((1, 1), logit)
    steps(Probability(torch.sigmoid), level, inputs, torch.zeros(1, 1), cross_entropy, count=2)


def threshold(logits: Tensor) -> Tensor:
    soft = torch.sigmoid(logits)
    return (soft > 0.5).to(soft.dtype) + soft - soft.detach()


def masked(logits: Tensor) -> Tensor:
    return torch.sigmoid(logits) * (logits > 100)


EXACT = {
    "straight-through threshold": threshold,
    "mask": masked,
    "where": lambda logits: torch.where(logits > 100, torch.sigmoid(logits), torch.zeros_like(logits)),
    "hard sigmoid": functional.hardsigmoid,
    "clamp": lambda logits: (logits + 0.5).clamp(0, 1).reshape(1, 1),
}


@pytest.mark.parametrize("level", CAST)
@pytest.mark.parametrize("made", EXACT)
@pytest.mark.parametrize("device", DEVICES)
def test_a_0_or_1_that_no_rounding_has_made_is_not_told_of(made: str, level: str, device: str) -> None:
    inputs = torch.full((1, 1), 4.0, device=device)
    steps(Probability(EXACT[made]).to(device), level, inputs, torch.ones(1, 1, device=device), cross_entropy, count=1)


@pytest.mark.parametrize("made", [masked, threshold])
def test_a_rounded_probability_is_told_of_behind_a_mask_or_a_threshold(made: Any) -> None:
    with pytest.warns(UserWarning, match="exactly 0 or 1"):
        steps(Probability(made), "O5", *sure_and_wrong("cpu"), cross_entropy)


def test_fp32_probabilities_are_not_told_of_beside_a_cast_model() -> None:
    amp.initialize(nn.Linear(1, 1), opt_level="O5", verbosity=0)
    logits = torch.tensor([20.0, 0.3, -0.7], requires_grad=True)  # sigmoid(20) is 1 in FP32 too
    functional.binary_cross_entropy(torch.sigmoid(logits), torch.zeros(3)).backward()


# ---------------------------------------------------------------------------------------------------------------------
# matrix_exp


class Rotation(nn.Module):
    def __init__(self, exponential: Any) -> None:
        super().__init__()
        self.angles = nn.Parameter(torch.tensor([[0.0, 1.0], [-1.0, 0.0]]))
        self.exponential = exponential

    def forward(self, inputs: Tensor) -> Tensor:
        self.low = self.exponential(self.angles)
        return inputs @ self.low.to(inputs.dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", ANY)
@pytest.mark.parametrize(
    "exponential", [torch.matrix_exp, torch.linalg.matrix_exp, Tensor.matrix_exp], ids=["torch", "linalg", "method"]
)
def test_matrix_exp_of_a_model_is_that_of_fp32(exponential: Any, level: str, device: str) -> None:
    model = Rotation(exponential).to(device)
    found = amp.initialize(model, opt_level=level, verbosity=0)(torch.eye(2, device=device))
    low = torch.float16 if level in ("O1", "O2", "O3") else torch.bfloat16
    exact = torch.tensor([[1.0, 1.0], [-1.0, 1.0]]) * torch.tensor([[0.5403023, 0.8414710], [0.8414710, 0.5403023]])
    torch.testing.assert_close(found.float().cpu(), exact, atol=float(torch.finfo(low).eps), rtol=0)
    assert model.low.dtype is (low if level in CAST else torch.float32)
    found.float().sum().backward()
    assert model.angles.grad is not None and model.angles.grad.abs().max() < 10


# ---------------------------------------------------------------------------------------------------------------------
# normalize and cosine_similarity


class Direction(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.kind = nn.Linear(4, 8, bias=False), nn.Linear(8, 4), kind

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.body(inputs)
        if self.kind == "similarity":
            return self.head(hidden * functional.cosine_similarity(hidden, hidden.roll(1, 0), dim=-1)[:, None])
        if self.kind == "module":
            return self.head(hidden * nn.CosineSimilarity()(hidden, hidden[1:2])[:, None])
        return self.head(normalize(hidden) if self.kind == "imported" else functional.normalize(hidden, dim=1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", ANY)
@pytest.mark.parametrize("kind", ["normalize", "imported", "similarity", "module"])
def test_a_row_of_zeros_has_no_direction_and_the_training_is_that_of_fp32(kind: str, level: str, device: str) -> None:
    inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).to(device)
    inputs[0] = 0
    targets = torch.ones(6, 4, device=device)
    mse = lambda output, wanted: functional.mse_loss(output.float(), wanted)  # noqa: E731
    wanted = steps(Direction(kind).to(device), "O0", inputs, targets, mse)
    found = steps(Direction(kind).to(device), level, inputs, targets, mse)
    assert found == pytest.approx(wanted, rel=0.02)  # BF16 has three digits


def test_normalize_of_several_dimensions_and_broadcast_rows_of_zeros() -> None:
    amp.initialize(nn.Linear(1, 1), opt_level="O2", verbosity=0)
    rows = torch.tensor([[0.0, 0.0], [3.0, 4.0]], dtype=torch.float16, requires_grad=True)
    assert functional.normalize(rows).tolist() == [[0.0, 0.0], [pytest.approx(0.6, 1e-3), pytest.approx(0.8, 1e-3)]]
    assert functional.normalize(rows, dim=(0, 1)).dtype is torch.float16  # type: ignore[arg-type]
    assert functional.normalize(torch.zeros((), dtype=torch.float16), dim=0).item() == 0
    row = torch.tensor([3.0, 4.0], dtype=torch.float16, requires_grad=True)
    found = functional.cosine_similarity(row, rows, dim=1)
    found.sum().backward()
    assert found.tolist() == [0.0, 1.0] and row.grad is not None and rows.grad is not None
    assert rows.grad[0].tolist() == [0.0, 0.0] and row.grad.isfinite().all()


@pytest.mark.parametrize("kind", ["normalize", "similarity"])
def test_compiled_code_of_a_cast_model_computes_directions_in_fp32_too(kind: str) -> None:
    inputs = torch.zeros(2, 4)
    model = amp.initialize(Direction(kind), opt_level="O2", verbosity=0)
    wanted = model(inputs)
    found = torch.compile(model, backend="eager", fullgraph=True)(inputs)
    assert torch.equal(found, wanted) and found.isfinite().all()


# ---------------------------------------------------------------------------------------------------------------------
# Which functions are replaced


def test_cast_models_leave_other_functions_as_they_are() -> None:
    own = vars(torch.nn.functional).copy()
    amp.initialize(nn.Linear(1, 1), opt_level="O2", verbosity=0)
    changed = {name for name, value in vars(torch.nn.functional).items() if own.get(name) is not value}
    assert changed == {"normalize", "cosine_similarity", "binary_cross_entropy", "cross_entropy"}


def test_o0_leaves_all_functions_as_they_are() -> None:
    own = vars(torch.nn.functional).copy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        amp.initialize(nn.Linear(1, 1), opt_level="O0", verbosity=0)
    assert all(own[name] is value for name, value in vars(torch.nn.functional).items())
