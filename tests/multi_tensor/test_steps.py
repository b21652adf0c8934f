"""The optimizers' steps in one pass, against torch's fused kernels on FP32 tensors with all else done separately."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from on_every_backend import BACKENDS, BF16, F16, F32, backend_fixture, device, no_grad_fixture, on_every_set  # noqa: F401  the fixture `backend`  # noqa: F401  the fixture `no_grad`
from reference import ADAM, SGD, State

from amp_patch import multi_tensor as mt


def rounds_as_known() -> bool:
    """Tell by a small step whether this torch's fused CPU kernels round as the kernels of amp_patch do."""
    if "cpp" not in BACKENDS:
        return False
    with mt.use_backend("cpp"), torch.no_grad():
        toys = [State([13, 64], seed=5) for _ in range(2)]
        for _ in range(3):
            toys[0].gradients(7), toys[1].gradients(7)
            toys[0].adam(**ADAM), toys[1].reference_adam(**ADAM)
        return all(torch.equal(a, b) for a, b in zip(toys[0].everything(), toys[1].everything(), strict=True))


BITS = rounds_as_known()


def assert_follows(ours, theirs, backend, device="cpu"):
    """Assert equal bits if torch's kernels round alike, else equality within rounding."""
    for a, b in zip(ours.everything(), theirs.everything(), strict=True):
        if BITS and backend == "cpp" and device == "cpu":
            assert torch.equal(a, b)
        elif a.dtype == F32:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        else:
            torch.testing.assert_close(a, b, rtol=2 * torch.finfo(a.dtype).eps, atol=1e-3)


def test_this_torch_rounds_as_the_kernels_do():
    if not torch.__version__.startswith("2.13."):
        pytest.skip("the order of operations is that of torch 2.13")
    assert BITS or "cpp" not in BACKENDS


# ---------------------------------------------------------------------------------------------------------------------
# Against torch


@on_every_set
@device
@pytest.mark.parametrize("amsgrad, maximize, decoupled", [*itertools.product([False, True], repeat=3)])
@pytest.mark.parametrize("weight_decay, beta1", [(0.0, 0.9), (0.1, 0.9), (0.1, 0.3)])
def test_adam(backend, device, amsgrad, maximize, decoupled, weight_decay, beta1):
    flags = {"decoupled": decoupled, "weight_decay": weight_decay, "beta1": beta1, "maximize": maximize}
    options = ADAM | flags | {"amsgrad": amsgrad}
    ours, theirs = State(device=device), State(device=device)
    for step in range(5):
        options["lr"] = 1e-2 / (step + 1)
        for state in (ours, theirs):
            state.gradients(step + 1)
        ours.adam(**options)
        theirs.reference_adam(**options)
        assert_follows(ours, theirs, backend, device)


@on_every_set
@device
@pytest.mark.parametrize("nesterov, maximize", [*itertools.product([False, True], repeat=2)])
@pytest.mark.parametrize("momentum, dampening", [(0.0, 0.0), (0.9, 0.0), (0.9, 0.3)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_sgd(backend, device, nesterov, maximize, momentum, dampening, weight_decay):
    flags = {"nesterov": nesterov, "maximize": maximize, "dampening": dampening}
    options = SGD | flags | {"momentum": momentum, "weight_decay": weight_decay}
    ours, theirs = State(device=device), State(device=device)
    for buffer in ours.m if momentum else ():
        buffer.fill_(math.nan)  # the first run reads none of it
    for step in range(5):
        for state in (ours, theirs):
            state.gradients(step + 1)
        ours.sgd(**options, first_run=step == 0)
        theirs.reference_sgd(**options, first_run=step == 0)
        assert_follows(ours, theirs, backend, device)


@on_every_set
@device
@pytest.mark.parametrize("optimizer, options", [("adam", ADAM | {"weight_decay": 0.1}), ("sgd", SGD)])
@pytest.mark.parametrize("low", [None, F16, BF16])
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_half_gradients_and_weights_over_many_steps(backend, device, optimizer, options, low, dtype):
    factors = (1 / 3, 0.7)  # not exact: their order shows
    sizes = [0, 1, 7, 8, 33, 16384 + 9]
    ours, theirs = (State(sizes, low, device) for _ in range(2))
    for step in range(60 if backend == "cpp" else 20):
        for state in (ours, theirs):
            state.gradients(step % 5 + 1, dtype)
        getattr(ours, optimizer)(**options, factors=factors)
        getattr(theirs, f"reference_{optimizer}")(**options, factors=factors)
        if step % 50 < 3 or device != "cpu":
            assert_follows(ours, theirs, backend, device)
    assert_follows(ours, theirs, backend, device)


@on_every_set
@device
def test_a_weight_that_was_edited_is_adopted(backend, device):
    for low in (F16, BF16):
        ours, theirs = State([3, 8, 500], low, device), State([3, 8, 500], low, device)
        for state in (ours, theirs):
            state.gradients(1)
            for w in state.low:
                w[::3] += 1
                w[1] = math.inf
        assert not torch.equal(ours.low[2].float(), ours.params[2].to(low).float())
        ours.sgd(**SGD | {"lr": 0.0})
        theirs.reference_sgd(**SGD | {"lr": 0.0})
        assert_follows(ours, theirs, backend, device)
        ours.low[0][0] = math.nan
        ours.sgd(**SGD)
        assert ours.params[0][0].isnan() and ours.low[0][0].isnan() and not ours.params[0][2].isnan()


# ---------------------------------------------------------------------------------------------------------------------
# Counts, numbers, flags


@device
def test_a_list_of_mixed_types_and_counts_steps_as_each_tensor_alone(backend, device):
    together, alone = State([100] * 9, device=device), State([100] * 9, device=device)
    for state in (together, alone):
        state.gradients(1)
        state.grads = [g.to(t) for g, t in zip(state.grads, [F32, F16, BF16] * 3, strict=True)]
        state.low = [p.to(F16 if i % 2 else BF16) for i, p in enumerate(state.params)]
        for i, step in enumerate(state.steps):
            step.fill_(i * i)
    together.adam(**ADAM)
    for i in range(9):
        one = [[t[i]] for t in (alone.grads, alone.params, alone.m, alone.v)]
        mt.multi_tensor_adam(*one, None, [alone.steps[i]], [alone.low[i]], **ADAM)
    assert all(map(torch.equal, together.everything(), alone.everything()))
    assert [step.item() for step in together.steps] == [i * i + 1 for i in range(9)]


@device
def test_counts_may_be_one_number_one_tensor_and_on_the_cpu(backend, device):
    counts = [4, torch.tensor(4.0, device=device), [torch.tensor(4.0) for _ in range(3)]]
    ours, *others = (State([50] * 3, device=device, steps=4) for _ in range(4))
    ours.gradients(1)
    ours.adam(**ADAM)
    for state, steps in zip(others, counts, strict=True):
        state.gradients(1)
        state.steps = steps
        state.adam(**ADAM)
        assert all(map(torch.equal, ours.params, state.params))
    assert counts[0] == counts[1] == 4 and all(step == 5 for step in counts[2])


@on_every_set
@device
def test_without_bias_correction(backend, device):
    for steps in (0, 7):
        state = State([50], device=device, steps=steps)
        state.gradients(1)
        p, g = state.params[0].double(), state.grads[0].double()
        state.adam(**ADAM, bias_correction=False)
        expected = p - 0.01 * (0.1 * g) / ((0.001 * g * g).sqrt() + 1e-8)
        torch.testing.assert_close(state.params[0].double(), expected, rtol=1e-6, atol=1e-7)
        assert state.steps[0] == steps + 1
    state.steps = None
    state.adam(**ADAM, bias_correction=False)
    with pytest.raises(TypeError, match="steps is None"):
        state.adam(**ADAM)


@device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_in_memory(backend, device, dtype):
    floats, tensors = State(device=device), State(device=device)
    for state in (floats, tensors):
        state.gradients(1)
    lr, factor = (torch.tensor(x, dtype=dtype, device=device) for x in (0.03, 1 / 7))
    floats.adam(**ADAM | {"lr": float(lr), "factors": (float(factor),)})
    tensors.adam(**ADAM | {"lr": lr, "factors": (factor,)})
    for state in (floats, tensors):
        state.gradients(2)
    floats.sgd(**SGD | {"lr": float(lr), "factors": (1.0, float(factor))})
    tensors.sgd(**SGD | {"lr": lr.reshape(1, 1), "factors": (1.0, factor)})
    for a, b in zip(floats.everything(), tensors.everything(), strict=True):
        assert torch.equal(a, b)


@device
@pytest.mark.parametrize("value", [0.0, 1.0, math.nan, math.inf])
def test_found_inf(backend, device, value):
    for optimizer, options in (("adam", ADAM), ("sgd", SGD)):
        state, plain = State(low=F16, device=device), State(low=F16, device=device)
        before = [t.clone() for t in state.everything()]
        for s in (state, plain):
            s.gradients(1)
        getattr(state, optimizer)(**options, found_inf=torch.tensor(value, device=device))
        getattr(plain, optimizer)(**options)
        expected = plain.everything() if value == 0 else before
        for a, b in zip(state.everything(), expected, strict=True):
            assert torch.equal(a, b)
