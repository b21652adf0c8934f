"""The line of a comparison that has the levels' log-probabilities beside O0's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from amp_patch import amp
from amp_patch.comparison import table
from amp_patch.comparison.comparison import Comparison
from amp_patch.diagnose import wording

CLASSES = 16


class Tokens(nn.Module):
    def __init__(self, returns: str = "logits") -> None:
        super().__init__()
        self.embedding, self.head, self.returns = nn.Embedding(CLASSES, 8), nn.Linear(8, CLASSES), returns

    def forward(self, ids: Tensor) -> Any:
        logits = self.head(self.embedding(ids).tanh())
        return logits if self.returns == "logits" else SimpleNamespace(logits=logits)


def built(returns: str, of_sequences: bool = True) -> Any:
    torch.manual_seed(0)
    model, ids = Tokens(returns), torch.randint(CLASSES, (3, 9) if of_sequences else (9,))

    def loss(output: Any, target: Tensor) -> Tensor:
        logits = output if returns == "logits" else output.logits
        return functional.cross_entropy(logits.flatten(0, -2), target.flatten())

    return model, torch.optim.SGD(model.parameters(), lr=0.1), loss, [(ids[..., :-1], ids[..., 1:])]


@pytest.mark.parametrize("returns", ["logits", "an output"])
@pytest.mark.parametrize("of_sequences", [True, False])
def test_a_model_that_returns_logits_has_a_line_in_nats(returns, of_sequences):
    compared = amp.compare(lambda: built(returns, of_sequences), ["O2", "O5"], seeds=1, steps=10, verbosity=0)
    model, _, _, ((ids, target),) = built(returns, of_sequences)
    for each in amp.compare_outputs(model, (ids,), ["O2", "O5"], targets=target).distances:
        ratio = f"; 1 ± {wording.two(each.sequence)}" if each.sequence is not None else ""
        assert f"{each.second} {wording.two(each.nats)} ({wording.two(each.largest_nats)}{ratio})" in compared.agreement
    assert each.nats and (each.sequence is not None) is of_sequences
    assert compared.agreement in " ".join(table.lines(compared))
    assert Comparison.from_dict(compared.to_dict()).agreement == compared.agreement


def regression() -> Any:
    model = nn.Linear(4, 2)
    return (
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        nn.functional.mse_loss,
        [(torch.ones(3, 4), torch.ones(3, 2))],
    )


def of_rows() -> Any:
    model, optimizer, _, _ = regression()
    return model, optimizer, lambda y, t: y.square().mean(), [(torch.ones(3, 4), torch.zeros(5, dtype=torch.int64))]


@pytest.mark.parametrize("build", [regression, of_rows])
def test_other_models_have_none(build):
    assert amp.compare(build, ["O2"], seeds=1, steps=10, verbosity=0).agreement == ""
