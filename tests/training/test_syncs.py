"""The syncs of a training step: one, in `optimizer.step()`."""

from __future__ import annotations

import pytest
import torch
import training
from conftest import DEVICES
from crossed import crossed
from syncs import Syncs, count

from amp_patch import amp, multi_tensor
from amp_patch.multi_tensor import backends


@pytest.mark.parametrize("device", DEVICES)
def test_the_counter_counts(device):
    x = torch.arange(4.0, device=device)
    for ask in (lambda: x[0].item(), lambda: bool(x.sum() > 0), lambda: x.tolist(), x.nonzero):
        assert count(device, ask) == 1
    assert count(device, lambda: x[x > 1]) >= 1
    assert count(device, lambda: (x * 2).sum().sqrt()) == 0


def a_step(level, device, clip, **options):
    """{part of a step: syncs}, of a step after the first."""
    model = training.convnet(device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, **options)
    parts = {}
    for step in range(3):
        images, classes = training.images(step, device)
        loss = torch.nn.functional.cross_entropy(model(images), classes)
        syncs = Syncs(device)
        with syncs.counting():
            context = amp.scale_loss(loss, optimizer)
            scaled = context.__enter__()
        parts["enter"] = syncs.count
        scaled.backward()
        with syncs.counting():
            context.__exit__(None, None, None)
        parts["exit"] = syncs.count
        with syncs.counting():
            clip(list(amp.master_params(optimizer)))
        parts["clip"] = syncs.count
        with syncs.counting():
            optimizer.step()
        parts["step"] = syncs.count
        with syncs.counting():
            optimizer.zero_grad()
        parts["zero_grad"] = syncs.count
    assert not optimizer._amp_stash.step_skipped
    return parts


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", [b for b in backends.BACKENDS if b == "torch" or multi_tensor.backend() == "cpp"])
@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_one_sync_a_step_and_that_in_step(level, clipped, backend, device):
    def clip(params):
        if clipped:
            torch.nn.utils.clip_grad_norm_(params, 1.0)

    options = {"loss_scale": "dynamic"} if level == "O3" else {}
    with multi_tensor.use_backend(backend):
        assert a_step(level, device, clip, **options) == {"enter": 0, "exit": 0, "clip": 0, "step": 1, "zero_grad": 0}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", [b for b in backends.BACKENDS if b == "torch" or multi_tensor.backend() == "cpp"])
@crossed(
    {
        "level, masters": [
            ("O0", None),
            ("O3", None),
            ("O4", None),
            ("O5", None),
            ("O5", "split"),
            ("O5", "stochastic"),
        ],
        "clipped": [False, True],
    },
    meet=1,
)
def test_gradients_that_are_only_checked_cost_the_same_sync(level, masters, clipped, backend, device):
    def clip(params):
        if clipped:
            torch.nn.utils.clip_grad_norm_(params, 1.0)

    options = {"skip_nonfinite": True, "master_weights": masters}
    with multi_tensor.use_backend(backend):
        assert a_step(level, device, clip, **options) == {"enter": 0, "exit": 0, "clip": 0, "step": 1, "zero_grad": 0}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", ["O0", "O4", "O5"])
def test_no_sync_without_scaling(level, device):
    assert set(a_step(level, device, lambda params: None).values()) == {0}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", [b for b in backends.BACKENDS if b == "torch" or multi_tensor.backend() == "cpp"])
def test_kernels_and_update_scale_never_sync(backend, device):
    low = [torch.randn(5, 7, device=device).half(), torch.randn(300, device=device).bfloat16()[1:]]
    wide = [t.float() for t in low]
    found, inverse = torch.zeros((), device=device), torch.tensor(0.5, device=device)
    scale, tracker = torch.ones((), device=device), torch.zeros((), dtype=torch.int32, device=device)
    patience = torch.ones((), dtype=torch.int32, device=device)

    def everything():
        multi_tensor.multi_tensor_scale(low, wide, inverse, found)
        multi_tensor.multi_tensor_unscale(low, inverse, found)
        multi_tensor.multi_tensor_axpby(inverse, low, 1.0, wide, wide, found, check="x")
        multi_tensor.multi_tensor_check_finite(low, found)
        multi_tensor.multi_tensor_l2norm(low, per_tensor=True)
        multi_tensor.multi_tensor_unscale_l2norm(low, inverse, found)
        multi_tensor.multi_tensor_adopt(low, wide)
        multi_tensor.update_scale(scale, tracker, found, hysteresis=2, hysteresis_tracker=patience)

    with multi_tensor.use_backend(backend):
        everything()  # what is made once may wait
        assert count(device, everything) == 0
