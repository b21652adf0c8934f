"""Every optimizer that torch ships: skipped steps, O2. docs/optimizers.md has the table."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import DEVICES
from crossed import crossed
from paths import ROOT
from torch import nn
from torch_optimizers import OPTIMIZERS, VARIANTS, made, of_sparse_gradients, one_step
from training import assert_unchanged, snapshot

from amp_patch import amp
from amp_patch.masters.held_gradients import can_wait
from amp_patch.ways import one_pass


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


def setup(name, flags, level="O2", device="cpu"):
    return amp.initialize(*made(name, flags, device), opt_level=level, verbosity=0)


def assert_skips(model, optimizer):
    """A step, and one that overflows and changes nothing; what there was before and after it."""
    one_step(model, optimizer)
    before = snapshot(model, optimizer)
    one_step(model, optimizer, math.inf)
    assert optimizer._amp_stash.step_skipped
    optimizer.zero_grad()
    assert_unchanged(before, snapshot(model, optimizer))
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 32768.0, "unskipped": 0}
    return before


def has_fused(name, device):
    """Tell whether torch itself has the fused form on `device`. torch 2.11 has no fused Adagrad on CUDA."""
    model, optimizer = made(name, {"fused": True}, device)
    model.weight.grad = torch.ones_like(model.weight)
    try:
        optimizer.step()
    except RuntimeError:
        return False
    return True


@of_sparse_gradients
@pytest.mark.parametrize("device", DEVICES)
@crossed({"name, flags": VARIANTS, "level": ["O1", "O2"]}, meet=1)
def test_a_skipped_step_is_exact(name, flags, level, device):
    model, optimizer = setup(name, flags, level, device)
    if flags.get("fused") and not has_fused(name, device):
        with pytest.raises(RuntimeError, match="`fused=True` requires"):
            one_step(model, optimizer)
        return
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
    in_one_pass = one_pass.kernel_of(optimizer) is not None and can_wait() and not flags.get("capturable")
    plain, plain_optimizer = setup(name, {"fused": True} if in_one_pass else flags, "O0")
    for _ in range(3):
        one_step(model, optimizer)
        one_step(plain, plain_optimizer)  # gradients here are exact in FP16
    assert torch.equal(next(amp.master_params(optimizer)), plain.weight)
    assert torch.equal(model.weight, plain.weight.half())
