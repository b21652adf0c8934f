"""Averages and copies of trained modules inside of a model are found by their shapes."""

from __future__ import annotations

import pytest
from torch import nn

from amp_patch.watch.averages import averages_in


def encoder(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, width))


def blocks(frozen: int) -> nn.Module:
    model = nn.ModuleDict({"blocks": nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))), "head": nn.Linear(4, 2)})
    for block in model.blocks[:frozen]:
        block.requires_grad_(False)
    return model


def wrapped(average: nn.Module, **others: nn.Module) -> nn.Module:
    return nn.ModuleDict({"net": encoder(), "ema": nn.ModuleDict({"module": average}), **others})


FOUND = {
    "a copy in a wrapper": (lambda: wrapped(encoder()), ["net"], ["ema.module"]),
    "a copy beside a small predictor": (
        lambda: wrapped(encoder(), predictor=nn.Linear(8, 8)),
        ["net", "predictor"],
        ["ema.module"],
    ),
    "two copies": (lambda: wrapped(encoder(), slow=encoder()), ["net"], ["ema.module", "slow"]),
    "another shape": (lambda: wrapped(encoder(9)), ["net"], []),
    "a copy that is trained too": (lambda: wrapped(encoder()), ["net", "ema"], []),
    "frozen blocks before trained ones": (lambda: blocks(3), ["blocks.3", "blocks.4", "blocks.5", "head"], []),
    "nothing trained": (lambda: wrapped(encoder()), [], []),
}


@pytest.mark.parametrize("case", FOUND)
def test_averages_in_no_optimizer_are_found_by_their_shapes(case):
    make, trained, expected = FOUND[case]
    model = make()
    ids = {id(p) for name in trained for p in model.get_submodule(name).parameters()}
    assert averages_in([model], ids) == {model.get_submodule(name): name for name in expected}
