"""The draws of stochastic rounding depend on the parameters' positions in the models, and not on history."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from split_masters import OPTIM, iterate_split, net
from torch import nn
from training import same

from amp_patch import amp


def start(make: Any, model: nn.Module | None = None) -> tuple[Any, Any]:
    model = net() if model is None else model
    return amp.initialize(model, make(model.parameters()), opt_level="O5", master_weights="stochastic", verbosity=0)


def chance() -> dict[str, Any]:
    return amp.state_dict()["loss_scaler0"]["stochastic_rounding"]


HISTORIES: dict[str, Any] = {
    "came in BF16": lambda model: model.bfloat16(),
    "a layer came in BF16": lambda model: model[3].bfloat16(),
    "frozen in BF16 at first": lambda model: model[0].bfloat16().requires_grad_(False),
    "frozen at first": lambda model: model[0].requires_grad_(False),
    "groups in another order": lambda model: None,
}


@pytest.mark.parametrize("history", HISTORIES)
def test_draws_depend_on_no_history_of_the_parameters(history):
    def train(changes: Any, order: tuple[int, ...]) -> tuple[Any, Any]:
        model = net()
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(param.bfloat16())  # the same weights in each type
        changes(model)
        groups = [{"params": list(model[index].parameters())} for index in order]
        model, optimizer = start(lambda _: OPTIM.SGD(groups, lr=0.05), model)
        model.requires_grad_(True)
        iterate_split(model, optimizer, range(3))
        result = [p.detach().clone() for p in model.parameters()], chance()
        amp.restore()
        return result

    wanted, state = train(lambda model: None, (0, 2, 3))
    order = (3, 0, 2) if history == "groups in another order" else (0, 2, 3)
    found, its_state = train(HISTORIES[history], order)
    assert same(found, wanted) and its_state == state and state["steps"] == [3] * 6
