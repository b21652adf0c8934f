"""Trainings on devices without FP64, such as Apple's MPS and Intel's Arc."""

from __future__ import annotations

import importlib
import itertools
import math
from pathlib import Path

import pytest
import torch
from crossed import crossed
from scripts import report_of
from torch_optimizers import MAKERS
from without_fp64 import CASES, LEVELS, WithoutFP64, cpu_without_fp64, losses

from amp_patch import multi_tensor
from amp_patch.support.devices import widest

IMPOSSIBLE = {*itertools.product(LEVELS, MAKERS)} - {*CASES}


def test_the_mode_refuses_fp64():
    with WithoutFP64():
        for make in (lambda: torch.ones(2).double(), lambda: torch.full((), 1.0, dtype=torch.float64)):
            with pytest.raises(TypeError, match=r"float64, which this device does not have"):
                make()
    with cpu_without_fp64():
        assert widest(torch.device("cpu")) is torch.float32
    assert widest(torch.device("cpu")) is torch.float64


@pytest.mark.filterwarnings("ignore")  # of O3 with an optimizer that keeps its state in FP16
@crossed({"level": list(LEVELS), "name": list(MAKERS)}, meet=1, impossible=IMPOSSIBLE)
def test_a_training_has_the_same_losses_without_fp64(level, name):
    with multi_tensor.use_backend("torch"):
        wanted = losses(level, name)
        with cpu_without_fp64():
            found = losses(level, name)
    assert wanted[:2] == found[:2] and all(map(math.isfinite, found[3:]))
    assert found == wanted


@pytest.mark.parametrize("steps", ["float", "tensor", "tensors"])
@pytest.mark.parametrize("rate", [1.0, torch.tensor([1.0])], ids=["float", "tensor"])
def test_the_kernel_of_adam_has_the_same_numbers_without_fp64(rate, steps):
    """Compare two steps, the first and the thousandth, whose bias corrections lose bits in FP32 if subtracted."""
    counts = [{"float": float(n), "tensor": torch.tensor(float(n))}.get(steps) for n in (0, 999)]

    settings = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "decoupled": True}

    def trained():
        generator = torch.Generator().manual_seed(0)
        p, m, v = (torch.randn(64, generator=generator) for _ in range(3))
        v.abs_()
        for n, count in zip((0, 999), counts, strict=True):
            given = [torch.tensor(float(n))] if count is None else count
            grads = [torch.randn(64, generator=generator)]
            multi_tensor.multi_tensor_adam(grads, [p], [m], [v], None, given, lr=rate, **settings)
        return torch.stack([p, m, v])

    with multi_tensor.use_backend("torch"):
        wanted = trained()
        with cpu_without_fp64():
            found = trained()
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("factor", [2.0, 0.5, 1.5, 0.75, 2.0**-20])
def test_a_loss_scale_moves_by_a_factor_of_fp32_to_the_same_bits(factor):
    starts = torch.logspace(-30, 30, 13, base=2.0).tolist()

    def moved(start, overflow):
        scale, tracker = torch.tensor([start]), torch.tensor([0], dtype=torch.int32)
        factors = {"growth_factor": factor, "backoff_factor": factor, "growth_interval": 1}
        multi_tensor.update_scale(scale, tracker, torch.tensor(overflow), **factors)
        return scale.item()

    wanted = (torch.tensor(starts).double() * factor).float().tolist()
    with multi_tensor.use_backend("torch"), cpu_without_fp64():
        for overflow in (0.0, 1.0):
            assert [moved(start, overflow) for start in starts] == wanted


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """The report of other_device.py: trainings on a device that is no CPU, with kernels that refuse FP64 there."""
    return report_of("other_device.py", tmp_path_factory.mktemp("device"))


@pytest.mark.slow  # a compiler works for a minute, and the trainings for another
def test_on_another_device_each_training_has_the_same_losses_without_fp64(elsewhere):
    assert elsewhere["types"] == ["torch.float64", "torch.float32"] and len(elsewhere["losses"]) == len(CASES)
    assert elsewhere["steps"] > 100, "the optimizers' kernels ran there, in plain torch"
    for case, (wanted, found) in elsewhere["losses"].items():
        assert wanted[:2] == found[:2] and all(map(math.isfinite, found[3:])), case
        assert found == pytest.approx(wanted, rel=2e-6), case


@pytest.mark.slow
def test_tools_work_on_another_device_without_fp64(elsewhere):
    """Record, inspect and compare outputs there; then run code for CUDA there, as `run --device` does."""
    found = elsewhere["tools"]
    assert found["inspected"] > 100 and len(found["recorded"]) == 2 and all(map(math.isfinite, found["recorded"]))
    assert 0 < found["distance"] < 0.1
    assert found["moved"] == "singles" and found["casts"] == [True, True, False]


@pytest.mark.slow
def test_apples_devices_have_every_operator_of_a_training(elsewhere):
    """Look up the operators that ran in torch's own table: it has a kernel for MPS, or one for all devices."""
    yaml = pytest.importorskip("yaml")
    table = Path(importlib.import_module("torchgen").__file__).parent / "packaged/ATen/native/native_functions.yaml"
    entries = {entry["func"].partition("(")[0]: entry for entry in yaml.safe_load(table.read_text())}

    def has_kernel(name):
        entry = entries[name]
        entry = entries[entry["structured_delegate"]] if "structured_delegate" in entry else entry
        keys = {key.strip() for several in entry.get("dispatch", {}) for key in several.split(",")}
        return not keys or "MPS" in keys or any(key.startswith("Composite") for key in keys)

    called = [name.removeprefix("aten::") for name in elsewhere["called"]]
    assert len(called) > 50 and not has_kernel("geqrf")
    assert [name for name in called if not has_kernel(name)] == []
