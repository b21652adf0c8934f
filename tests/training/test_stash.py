"""Copies and pickles of an optimizer's stash: the fields that they contain, and the fields that are fresh."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, fields

import pytest
import torch
from torch import nn
from training import backward

from amp_patch import amp
from amp_patch.policy import OPT_LEVELS
from amp_patch.training.loss_scaler import LossScaler
from amp_patch.training.stash import Neighbours, Stash


@dataclass
class _Extended(Stash):
    outlives: str = ""


def duplicate(stash, way):
    return copy.deepcopy(stash) if way == "copy" else pickle.loads(pickle.dumps(stash))


@pytest.mark.parametrize("way", ["copy", "pickle"])
def test_all_that_is_declared_to_be_of_this_process_begins_afresh(way):
    scaler = LossScaler(128.0, min_loss_scale=1.0, max_loss_scale=2.0**24)
    stash = _Extended(OPT_LEVELS["O2"], [scaler], bodies=3, passes=1, outlives="yes")
    stash.step = lambda: None  # as while a step is running
    stash.neighbours.body, stash.neighbours.ended = (lambda: None), 5
    stash.neighbours.undo = [lambda: None]  # which nothing can pickle
    twin = duplicate(stash, way)
    assert twin.step is None
    assert vars(twin.neighbours) == vars(Neighbours())
    assert (twin.bodies, twin.passes, twin.outlives, twin.scalers[0].loss_scale()) == (3, 1, "yes", 128.0)
    assert vars(twin).keys() == {part.name for part in fields(_Extended)}
    assert stash.neighbours.ended == 5


@pytest.mark.parametrize("way", ["copy", "pickle"])
def test_an_optimizer_between_backward_and_step_is_copied_with_what_outlives_it(way):
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    amp.initialize(model, optimizer, opt_level="O2", loss_scale=128.0, verbosity=0)
    backward(model(torch.ones(1, 2)).sum(), optimizer)
    stash = optimizer._amp_stash
    copied = duplicate(optimizer, way)
    twin = copied._amp_stash
    assert stash.unscaled() is not None and twin.unscaled() is None
    assert twin.bodies == 1 and len(twin.found) == 1
    assert twin.owner() is copied
    assert [ref() for ref in twin.neighbours.siblings] == [copied]
    assert not twin.names() and list(stash.names().values()) == ["weight"]
