"""Fixtures that let `import apex` find amp_patch's modules; models, loops and calls as scripts for Apex have them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import DEVICES
from torch.nn import functional as F
from training import images, linear

import amp_patch.apex as shim
from amp_patch.apex.fp16_utils import *  # noqa: F403  scripts do, and it must give everything
from amp_patch.casts import install

LEVELS = ("O0", "O1", "O2", "O3")


@pytest.fixture(name="amp")
def apex_amp() -> Iterator[Any]:
    """`from apex import amp`, with a fresh state object; nothing called apex and nothing registered afterwards."""
    before = {name for name in sys.modules if name.partition(".")[0] in ("apex", "amp_C", "apex_C")}
    assert not before
    shim.install()
    module = importlib.import_module("apex.amp")
    known, registered = dict(vars(module._amp_state)), dict(install._registered)
    try:
        yield module
    finally:
        vars(module._amp_state).clear()
        vars(module._amp_state).update(known)
        install.uninstall()
        install._registered.clear()
        install._registered.update(registered)
        shim.uninstall()


INF = float("inf")


def make(amp, level, lr=0.25, value=1.0, **kwargs):
    """One weight whose gradient is the input, and its optimizer."""
    model = linear([[value]])
    return amp.initialize(model, torch.optim.SGD(model.parameters(), lr=lr), opt_level=level, **kwargs)


def backward_by(amp, model, optimizer, grad=0.125, **kwargs):
    loss = (model(torch.ones(1, 1)).float() * grad).sum()
    with amp.scale_loss(loss, optimizer, **kwargs) as scaled_loss:
        scaled_loss.backward()


def train_by(amp, model, optimizer, steps=20):
    losses = []
    for step in range(steps):
        inputs, targets = images(step % 4, next(model.parameters()).device.type)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


LOW = [torch.float16, torch.bfloat16]


CHUNK = 2048 * 32
SHAPES = [(3, 5), (7,), (2, 3, 4), (1,)]
on_devices = pytest.mark.parametrize("device", DEVICES)


def tensors(seed=0, dtype=torch.float32, device="cpu", shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator).to(device, dtype) for s in shapes]


def buffer(device="cpu", dtype=torch.int32, value=0):
    return torch.full((1,), value, dtype=dtype, device=device)


def zeros(dtype=torch.float32):
    return [torch.zeros_like(t) for t in tensors(dtype=dtype)]
