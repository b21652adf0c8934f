"""Unedited loops of Lightning, transformers and accelerate: they train as with amp_patch's lines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from crossed import crossed
from torch import nn

EXTRAS = "pip install amp_patch[lightning,transformers]; `make test-all` does"
pytest.importorskip("lightning", reason=EXTRAS)
pytest.importorskip("transformers", reason=EXTRAS)
accelerate = pytest.importorskip("accelerate", reason=EXTRAS)

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported: nothing here comes from the network

# After the skips: frameworks.py imports the packages.
from frameworks import PACKAGES_WARN, Classifier, adam, hf_trainer, loader, network, trainer  # noqa: E402
from training import same, weights  # noqa: E402

from amp_patch import amp  # noqa: E402
from amp_patch.integrations.lightning import OptLevelPrecision  # noqa: E402
from amp_patch.run.unedited.refusal import ScriptRefused  # noqa: E402
from amp_patch.run.unedited.script import UneditedScript  # noqa: E402

pytestmark = PACKAGES_WARN

Result = tuple[list[float], list[torch.Tensor]]


def with_lightning(folder: Path, level: str | None) -> Result:
    """Train with amp_patch's plugin at `level`, or without it if None."""
    module = Classifier()
    plugins = None if level is None else OptLevelPrecision(level)
    trainer(plugins, accumulate_grad_batches=2, gradient_clip_val=0.05).fit(module, loader())
    amp.restore()
    return module.losses, weights(module.net)


def with_transformers(folder: Path, level: str | None) -> Result:
    made = hf_trainer(folder, level)
    made.train()
    amp.restore()
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry], weights(made.model)


def with_accelerate(folder: Path, level: str | None) -> Result:
    """Train with amp_patch's lines at `level`, or without them if None."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    model = network()
    optimizer, losses = adam(model), []
    if level is not None:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level)
    accelerator = accelerate.Accelerator(cpu=True)
    if level is None:
        model, optimizer = accelerator.prepare(model, optimizer)
    for inputs, classes in loader():
        loss = nn.functional.cross_entropy(model(inputs), classes)
        losses.append(loss.item())
        if level is None:
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.05)
        else:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    amp.restore()
    return losses, weights(model)


@crossed({"train": [with_lightning, with_transformers, with_accelerate], "level": ["O0", "O1", "O2", "O5"]}, meet=1)
def test_an_unedited_framework_loop_trains_as_an_edited_one(train, level, tmp_path):
    with UneditedScript(level) as trained:
        losses, found = train(tmp_path, None)
    assert trained.backwards == {with_lightning: 8, with_transformers: 10, with_accelerate: 4}[train]
    expected = train(tmp_path, level)
    assert losses == expected[0] and same(found, expected[1])
    plain = train(tmp_path, None)
    assert same(found, plain[1]) is (level == "O0")


def test_an_unsupported_lightning_optimizer_is_refused_with_the_lines_to_write():
    class Unknown(torch.optim.SGD):
        """An optimizer that may call its closure at any time."""

    module = Classifier()
    module.configure_optimizers = lambda: Unknown(module.parameters(), lr=0.1)
    with pytest.raises(ScriptRefused, match="it is not known when Unknown calls it") as caught, UneditedScript("O2"):
        trainer(None).fit(module, loader())
    said = str(caught.value)
    assert "import OptLevelPrecision" in said and "Trainer(plugins=" in said and "scale_loss" not in said
