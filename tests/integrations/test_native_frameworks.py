"""Loops of Lightning and accelerate with torch's own mixed precision: `record` and `inspect` know their GradScaler."""

from __future__ import annotations

import math
import os
from contextlib import nullcontext

import pytest
import torch
from torch import nn

EXTRAS = "pip install amp_patch[lightning,transformers]; `make test-all` does"
pl = pytest.importorskip("lightning.pytorch", reason=EXTRAS)
pytest.importorskip("transformers", reason=EXTRAS)
accelerate = pytest.importorskip("accelerate", reason=EXTRAS)

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported: nothing here comes from the network

# After the skips: frameworks.py imports the packages.
from frameworks import PACKAGES_WARN, Classifier, loader, network, trainer  # noqa: E402
from training import same, weights  # noqa: E402

from amp_patch import amp  # noqa: E402

pytestmark = PACKAGES_WARN

OVERFLOWS = 2  # the step at which it does


def scaler():
    return torch.amp.GradScaler("cpu", init_scale=1024.0)


def with_lightning(look):
    module = Classifier()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module.configure_optimizers = lambda: optimizer
    module.loss = lambda batch: (
        nn.functional.cross_entropy(module.net(batch[0]), batch[1])
        * (math.inf if len(module.losses) == OVERFLOWS else 1.0)
    )
    plugin = pl.plugins.precision.MixedPrecision("16-mixed", "cpu", scaler())
    with look(module, optimizer) as seen:
        trainer(plugin, max_epochs=1, gradient_clip_val=0.05).fit(module, loader())
    return module.losses, weights(module.net), seen


def with_accelerate(look):
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.scaler = scaler()  # which it makes by itself on a GPU alone
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    with look(model, optimizer) as seen:
        for inputs, classes in loader():
            with torch.autocast("cpu", torch.float16):
                loss = nn.functional.cross_entropy(model(inputs), classes)
            loss = loss * (math.inf if len(losses) == OVERFLOWS else 1.0)
            losses.append(loss.item())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
    return losses, weights(model), seen


@pytest.mark.parametrize("train", [with_lightning, with_accelerate])
def test_their_scaler_is_found(train):
    losses, plain, _ = train(lambda *_: nullcontext())
    with amp.record() as run:
        recorded, found, _ = train(lambda *_: nullcontext())
    assert same(found, plain) and recorded == losses == run.loss and len(losses) == 4
    assert run.scale == [1024.0] * 3 + [512.0] and run.skipped == [step == OVERFLOWS for step in range(4)]
    looked, found, seen = train(amp.inspect)
    assert same(found, plain) and looked == losses
    assert (seen.step, seen.scale) == (4, 512.0)
    assert (seen.not_finite.op, seen.not_finite.step) == ("mul", OVERFLOWS)
