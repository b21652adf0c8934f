"""A part of a model, and a wrapper around it, are not converted to another type where parameters have masters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from crossed import crossed
from split_masters import MAKERS, iterate_split, net
from torch import nn
from training import same, weights

from amp_patch import amp

CONVERSIONS: dict[str, Any] = {
    "float": lambda module: module.float(),
    "half": lambda module: module.half(),
    "double": lambda module: module.double(),
    "to": lambda module: module.to("cpu", torch.float32),
}


def start(form: Any) -> tuple[Any, Any]:
    model = nn.Sequential(net(), nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 5)))
    make = MAKERS["AdamW"]
    return amp.initialize(model, make(model.parameters()), opt_level="O5", master_weights=form, verbosity=0)


@crossed(
    {"form": [True, "split", "stochastic"]},
    pytest.mark.parametrize(
        "part", [lambda m: m[0][0], lambda m: m[1], nn.DataParallel], ids=["layer", "block", "around"]
    ),
    {"convert": CONVERSIONS},
)
def test_a_conversion_of_parameters_with_masters_is_refused_before_anything_changes(form, part, convert):
    model, optimizer = start(form)
    iterate_split(model, optimizer, range(2))
    before, types = weights(model), [p.dtype for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"conversion to torch.* would undo half of .*keep_fp32") as error:
        convert(part(model))
    assert "amp.restore()" in str(error.value)
    assert same(weights(model), before) and [p.dtype for p in model.parameters()] == types
    iterate_split(model, optimizer, range(2, 3))


def test_moves_that_keep_the_type_and_parts_without_masters_are_torch_s():
    model, _ = start("split")
    before = weights(model)
    part = model[0][0]
    for move in (part.cpu, part.bfloat16, lambda: part.to("cpu"), lambda: part.to(torch.bfloat16), model[1][0].float):
        move()
        assert same(weights(model), before)
    assert nn.Linear(2, 2).double().weight.dtype is torch.float64
