"""Kernels of steps: layouts, and calls that are refused."""

from __future__ import annotations

import pytest
import torch
from on_every_backend import BF16, F16, F32, backend_fixture, device, no_grad_fixture, on_every_set  # noqa: F401  the fixture `backend`  # noqa: F401  the fixture `no_grad`
from reference import ADAM, SGD, State
from syncs import CopiesToOrFrom

from amp_patch import multi_tensor as mt


@on_every_set
@device
@pytest.mark.parametrize(
    "layout",
    [
        lambda t: t.clone(memory_format=torch.channels_last),
        lambda t: t.transpose(0, 3).clone(memory_format=torch.preserve_format),
        lambda t: torch.cat([t.flatten()] * 2)[1 : 1 + t.numel()].view(t.shape),  # not aligned
    ],
)
def test_memory_orders(backend, device, layout):
    sizes = [(2, 3, 5, 7), (4, 8, 3, 3), (1, 1, 1, 1), (0, 2, 3, 4)]
    ours, plain = State(sizes, F16, device, layout=layout), State(sizes, F16, device)
    for state in (ours, plain):
        state.gradients(1)
        state.low = [w.clone(memory_format=torch.preserve_format) for w in state.low]
        state.adam(**ADAM)
    for a, b in zip(ours.params, plain.params, strict=True):
        expected = layout(b)  # elements in another order: which of them are a tensor's last has changed
        torch.testing.assert_close(a, expected, rtol=1e-6, atol=1e-7)


@device
def test_versions_of_written_tensors_increase(backend, device):
    state = State([4, 5], F16, device)
    state.gradients(1)
    written = [*state.params, *state.m, *state.v, *state.low, *state.steps]
    before = [t._version for t in written]
    grads = [g._version for g in state.grads]
    state.adam(**ADAM)
    assert all(t._version > v for t, v in zip(written, before, strict=True))
    assert [g._version for g in state.grads] == grads


@device
@pytest.mark.parametrize("shapes", [[], [0], [(3, 0), 0]])
def test_nothing_to_do(backend, device, shapes):
    """Nothing but to count the steps of parameters without elements."""
    state = State(shapes, BF16, device)
    state.gradients(1)
    state.adam(**ADAM)
    state.sgd(**SGD, found_inf=torch.zeros((), device=device))
    assert [float(step) for step in state.steps] == [1.0] * len(shapes)


BREAKS = {
    "tensor 1 of grads is torch.float64": lambda s: s.grads.__setitem__(1, s.grads[1].double()),
    "tensor 1 of params is torch.float16": lambda s: s.params.__setitem__(1, s.params[1].half()),
    "tensor 1 of exp_avgs is torch.float64": lambda s: s.m.__setitem__(1, s.m[1].double()),
    "tensor 1 of low is torch.float32": lambda s: s.low.__setitem__(1, s.low[1].float()),
    "tensor 1 of exp_avg_sqs has shape": lambda s: s.v.__setitem__(1, s.v[1].flatten()),
    "grads has 1 tensors, params has 2": lambda s: s.grads.pop(),
    "steps has 1 tensors": lambda s: s.steps.pop(),
    "low has 1 tensors": lambda s: s.low.pop(),
    "tensor 1 of grads has strides .*, its parameter has": lambda s: s.grads.__setitem__(
        1, s.grads[1].t().contiguous().t()
    ),
    "tensor 1 of exp_avgs has strides .*, its parameter has": lambda s: s.m.__setitem__(1, torch.zeros(6, 9)[:, :6]),
    "tensor 1 of grads has strides .* without gaps or overlaps": lambda s: s.grads.__setitem__(
        1, torch.zeros(6, 1).expand(6, 6)
    ),
    "tensor 1 of params is torch.sparse_coo": lambda s: s.params.__setitem__(1, s.params[1].to_sparse()),
    "tensor 0 of exp_avgs overlaps 0 of params in memory": lambda s: s.m.__setitem__(0, s.params[0]),
    "tensors 0 and 1 of exp_avg_sqs overlap in memory": lambda s: (
        s.v.__setitem__(
            1,
            s.v[0].clone(),
        )
        or s.v.__setitem__(0, s.v[1])
    ),
    "tensor 1 of grads overlaps 1 of params": lambda s: s.grads.__setitem__(1, s.params[1]),
    "tensor 1 of steps is a torch.float64": lambda s: s.steps.__setitem__(1, s.steps[1].double()),
    "tensors 0 and 1 of steps overlap": lambda s: s.steps.__setitem__(1, s.steps[0]),
    "tensor 1 of grads is a str": lambda s: s.grads.__setitem__(1, "no tensor"),
    "grads is a generator": lambda s: setattr(s, "grads", (g for g in ())),
}


@pytest.mark.parametrize("message", BREAKS)
def test_refused_before_the_first_write(backend, message):
    state = State([(6, 6), (6, 6)], F16)
    state.gradients(1)
    BREAKS[message](state)
    tensors = [t for t in state.everything() if t.layout is torch.strided]
    before = [t.clone() for t in tensors]
    with pytest.raises((ValueError, TypeError), match=f"multi_tensor_adam: .*{message}"):
        state.adam(**ADAM)
    for a, b in zip(tensors, before, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"factors": (1.0, 2.0, 3.0)}, "there are 3 factors"),
        ({"factors": (torch.zeros(2),)}, "factor 0 is a torch.float32 tensor of shape"),
        ({"lr": torch.zeros((), dtype=torch.int64)}, "lr is a torch.int64"),
        ({"lr": "a"}, "lr is a str"),
        ({"found_inf": torch.zeros(2)}, "found_inf is a torch.float32 tensor of shape"),
        ({"beta1": "a"}, "beta1 is 'a'"),
    ],
)
def test_numbers_that_are_refused(backend, options, message):
    state = State([4])
    state.gradients(1)
    with pytest.raises((ValueError, TypeError), match=message):
        state.adam(**ADAM | options)


def test_momentum_buffers_without_momentum(backend):
    state = State([4])
    state.gradients(1)
    with pytest.raises(ValueError, match="momentum is 0"):
        mt.multi_tensor_sgd(state.grads, state.params, state.m, **SGD | {"momentum": 0.0})
    with pytest.raises(ValueError, match="momentum_buffers has 0 tensors"):
        mt.multi_tensor_sgd(state.grads, state.params, None, **SGD)


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_nothing(backend, threads):
    one, many = State(), State()
    for state in (one, many):
        state.gradients(1)
    one.adam(**ADAM)
    torch.set_num_threads(threads)
    try:
        many.adam(**ADAM)
    finally:
        torch.set_num_threads(1)
    for a, b in zip(one.everything(), many.everything(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("options", [{"lr": 0.1}, {"lr": torch.tensor(0.1, device="meta")}], ids=["number", "tensor"])
def test_numbers_are_not_copied_to_the_device(options):
    """Which would wait for it; "meta" acts the device, and plain torch the kernels, as where no extension serves it."""
    lists = [[torch.ones(size, device="meta") for size in (3, 5)] for _ in range(4)]
    counts = [torch.ones((), device="meta") for _ in range(2)]
    settings = {"weight_decay": 0.1, "factors": [torch.ones((), device="meta")], **options}
    with CopiesToOrFrom("meta") as copies:
        for steps in (counts, 3.0):
            adam = {**ADAM, **settings, "decoupled": True}
            mt.multi_tensor_adam(*lists, None, steps, **adam, found_inf=counts[0])
        mt.multi_tensor_sgd(*lists[:3], **{**SGD, **settings, "momentum": 0.9}, found_inf=counts[0])
    assert not copies.counts
