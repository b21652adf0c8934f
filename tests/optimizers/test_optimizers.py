"""Every optimizer that torch ships: skipped steps, O2, pickling, deepcopy. docs/optimizers.md has the table."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
import training
from paths import ROOT
from torch import nn
from torch_optimizers import OPTIMIZERS, VARIANTS, of_sparse_gradients
from training import assert_unchanged, snapshot

from amp_patch import amp
from amp_patch.training import one_pass


def test_no_optimizer_of_torch_is_left_out():
    shipped = {
        name
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    assert shipped <= {*OPTIMIZERS, "LBFGS"}


def test_the_table_of_the_documents_names_every_optimizer():
    page = (ROOT / "docs" / "optimizers.md").read_text()
    rows = page.split("## torch's own")[1].split("## Fused optimizers")[0]
    assert [name for name in (*OPTIMIZERS, "LBFGS") if name not in rows] == []


def setup(name, flags, level="O2"):
    """A model of one 2x2 weight (an embedding for the optimizer of sparse gradients), its optimizer and a backward."""
    torch.manual_seed(0)
    model = nn.Embedding(2, 2, sparse=True) if name == "SparseAdam" else nn.Linear(2, 2, bias=False)
    model.to("cuda" if flags.get("capturable") else "cpu")  # torch refuses these on a CPU
    make = getattr(torch.optim, name)
    optimizer = make(model.parameters(), **OPTIMIZERS[name], **flags)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    return model, optimizer


def one_step(model, optimizer, factor=1.0):
    inputs = torch.tensor([0, 1]) if isinstance(model, nn.Embedding) else torch.tensor([[0.5, -0.25], [0.25, 1.0]])
    device = model.weight.device
    optimizer.zero_grad()
    loss = (model(inputs.to(device)).float() * torch.tensor([[0.5, 0.25], [0.25, -0.5]], device=device)).sum() * factor
    training.backward(loss / 8, optimizer)
    optimizer.step()


def assert_skips(model, optimizer):
    """A step, and one that overflows and changes nothing; what there was before and after it."""
    one_step(model, optimizer)
    before = snapshot(model, optimizer)
    one_step(model, optimizer, math.inf)
    assert optimizer._amp_stash.step_skipped
    optimizer.zero_grad()
    assert_unchanged(before, snapshot(model, optimizer))
    return before


@of_sparse_gradients
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(("name", "flags"), VARIANTS)
def test_a_skipped_step_is_exact(name, flags, level):
    model, optimizer = setup(name, flags, level)
    before = assert_skips(model, optimizer)
    one_step(model, optimizer)
    assert not optimizer._amp_stash.step_skipped
    assert not torch.equal(before[0][0], model.weight)


@of_sparse_gradients
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_that_the_compiler_has_disabled_is_skipped(level, monkeypatch):
    # Torch does this to SparseAdam at a process's first torch.compile. In torch 2.6 and 2.8 `disable` would take from a
    # wrapper with a copy of the note what is beneath it.
    torch.optim.SparseAdam([nn.Parameter(torch.ones(1))])  # torch puts its hooks around the step of the first one
    monkeypatch.setattr(torch.optim.SparseAdam, "step", torch.compiler.disable(torch.optim.SparseAdam.step))
    model, optimizer = setup("SparseAdam", {}, level)
    assert not hasattr(type(optimizer).step, "_torchdynamo_orig_callable")
    assert_skips(model, optimizer)


@pytest.mark.parametrize(("name", "flags"), VARIANTS)
def test_o2_does_to_the_masters_what_the_optimizer_does_to_fp32_weights(name, flags):
    model, optimizer = setup(name, flags)
    # Steps in one pass have the numbers of torch's fused kernel, whose last bits are other ones on some processors.
    in_one_pass = one_pass.knows(optimizer) and not flags.get("capturable")
    plain, plain_optimizer = setup(name, {"fused": True} if in_one_pass else flags, "O0")
    for _ in range(3):
        one_step(model, optimizer)
        one_step(plain, plain_optimizer)  # gradients here are exact in FP16
    assert torch.equal(next(amp.master_params(optimizer)), plain.weight)
    assert torch.equal(model.weight, plain.weight.half())


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda v: pickle.loads(pickle.dumps(v))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize(("name", "flags"), VARIANTS)
def test_a_copy_trains_on_alike(name, flags, duplicate):
    model, optimizer = setup(name, flags)
    one_step(model, optimizer)
    twin, twins_optimizer = duplicate((model, optimizer))
    for _ in range(2):
        one_step(model, optimizer)
        one_step(twin, twins_optimizer)
    assert torch.equal(model.weight, twin.weight) and model.weight is not twin.weight
    assert torch.equal(next(amp.master_params(optimizer)), next(amp.master_params(twins_optimizer)))
