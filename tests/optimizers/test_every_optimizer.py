"""Every optimizer at every level trains to the bits of the optimizer alone (tests/helpers/any_optimizer.py)."""

from __future__ import annotations

import math

import pytest
import torch
from any_optimizer import (
    CODED,
    CODED_LEVELS,
    KINDS,
    LEVELS,
    ONE_OF_EACH_WAY,
    OWN_STEPS,
    RELEASED,
    Each,
    assert_trains_as_alone,
)
from conftest import DEVICES
from crossed import crossed
from paths import ROOT
from torch import nn
from torch_optimizers import OPTIMIZERS, made, of_sparse_gradients, one_step
from training import assert_unchanged, snapshot

from amp_patch import amp, multi_tensor
from amp_patch.ways import gradient_release, portions

pytestmark = of_sparse_gradients
# At some levels a step is always the optimizer's own, where the ways are one.
AT_ONCE = [pytest.param(level, marks=[pytest.mark.slow] * (level in OWN_STEPS)) for level in LEVELS]
# Each with its reason.
IMPOSSIBLE = {
    ("torch's SparseAdam", "O3"): "torch adds up no sparse gradients of FP16 on a CPU",
    ("torch's SGD-fused", "O3"): "torch's kernel begins a momentum in FP16 with what lies in the memory",
}
BACKENDS = ["cpp", "torch"] if multi_tensor.backend() == "cpp" else ["torch"]


@pytest.fixture(autouse=True)
def registered(registrations, monkeypatch):
    """Register the optimizer of user code, and make several portions of the small model's weights."""
    amp.register_per_parameter_optimizer(Each)
    monkeypatch.setattr(portions, "PORTION", 24)
    monkeypatch.setattr(gradient_release, "TOGETHER", 2000)


@pytest.mark.parametrize("device", DEVICES)
@crossed({"kind": list(KINDS), "level": AT_ONCE}, meet=1, impossible=IMPOSSIBLE)
def test_any_optimizer_trains_as_alone(kind, level, device):
    if (kind, device) == ("torch's Adagrad-fused", "cuda"):
        pytest.skip("torch 2.11 has no fused Adagrad on CUDA")
    assert_trains_as_alone(kind, level, device)


@crossed({"kind": ONE_OF_EACH_WAY, "level": LEVELS, "backend": BACKENDS}, meet=1)
def test_each_way_to_step_trains_as_alone_on_each_backend(kind, level, backend):
    with multi_tensor.use_backend(backend):
        assert_trains_as_alone(kind, level)


@crossed({"kind": CODED, "level": CODED_LEVELS, "backend": BACKENDS}, meet=1)
def test_state_in_eight_bits_is_decoded_stepped_and_encoded(kind, level, backend):
    with multi_tensor.use_backend(backend):
        assert_trains_as_alone(kind, level)


@crossed({"kind": RELEASED, "level": ["O4", "O5", "O5+split", "O5+stochastic", "O4+8bit", "O5+split+8bit"]}, meet=1)
def test_steps_in_backward_train_as_alone(kind, level):
    assert_trains_as_alone(kind, level, gradient_release=True)


def test_no_optimizer_of_torch_is_left_out_of_the_tests_and_of_the_documents():
    shipped = {
        name
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    assert shipped <= {*OPTIMIZERS, "LBFGS"}
    page = (ROOT / "docs" / "optimizers.md").read_text()
    rows = page.split("## torch's own")[1].split("## Fused optimizers")[0]
    assert [name for name in (*OPTIMIZERS, "LBFGS") if name not in rows] == []


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_that_the_compiler_has_disabled_is_skipped(level, monkeypatch):
    # Torch does this to SparseAdam at a process's first torch.compile. In torch 2.6 and 2.8 `disable` would take from a
    # wrapper with a copy of the note what is beneath it.
    torch.optim.SparseAdam([nn.Parameter(torch.ones(1))])  # torch puts its hooks around the step of the first one
    monkeypatch.setattr(torch.optim.SparseAdam, "step", torch.compiler.disable(torch.optim.SparseAdam.step))
    model, optimizer = amp.initialize(*made("SparseAdam", {}), opt_level=level, verbosity=0)
    assert not hasattr(type(optimizer).step, "_torchdynamo_orig_callable")
    one_step(model, optimizer)
    before = snapshot(model, optimizer)
    one_step(model, optimizer, math.inf)
    assert_unchanged(before, snapshot(model, optimizer))
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 32768.0, "unskipped": 0}
