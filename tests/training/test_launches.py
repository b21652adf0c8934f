"""A body and a step launch nothing that their level does not need."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from amp_patch import amp
from amp_patch.support import device_sync


class Launched(TorchDispatchMode):
    """Records the names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def training(level, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


def iterate(model, optimizer):
    loss = model(torch.ones(2, 8)).float().square().mean()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


@pytest.mark.parametrize("level", ["O4", "O5", "O5+split"])
def test_a_body_without_a_loss_scale_makes_no_scale(level):
    model, optimizer = training(level) if "+" not in level else training("O5", master_weights="split")
    iterate(model, optimizer)
    loss = model(torch.ones(2, 8)).float().mean()
    with Launched() as launched:
        body = amp.scale_loss(loss, optimizer)
        scaled = body.__enter__()
    assert not {"ones_like", "clone", "mul"} & set(launched.names), launched.names
    scaled.backward()
    body.__exit__(None, None, None)


@pytest.mark.parametrize("losses", [1, 2])
def test_the_flag_of_a_single_loss_is_given_to_the_optimizer_as_it_is(losses, monkeypatch):
    monkeypatch.setattr(device_sync, "waits", lambda device: True)  # the CPU plays a GPU
    model, optimizer = training("O2", num_losses=losses)
    before = [p.clone() for p in amp.master_params(optimizer)]
    for turn in range(3):
        bad = turn == 2
        for loss_id in range(losses):
            loss = model(torch.ones(2, 8)).float().square().mean() * (float("inf") if bad and loss_id == 0 else 1.0)
            with amp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled_loss:
                scaled_loss.backward()
        held = [p.clone() for p in amp.master_params(optimizer)]
        with Launched() as launched:
            optimizer.step()
        optimizer.zero_grad()
        if turn:  # the host reads the flag of a first step
            assert ("amax" in launched.names) == ("stack" in launched.names) == (losses > 1), launched.names
        moved = not all(map(torch.equal, held, amp.master_params(optimizer)))
        assert moved == (not bad)
    assert not all(map(torch.equal, before, amp.master_params(optimizer)))
