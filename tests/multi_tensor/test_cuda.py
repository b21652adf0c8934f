"""Tests of the kernels that need a GPU; without one, conftest.py leaves this file out."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from contextlib import contextmanager

import pytest
import reference
import torch
from torch.profiler import ProfilerActivity, profile
from training import exact

from amp_patch import multi_tensor as mt

_C = pytest.importorskip("amp_patch._C", reason=mt.backend_reason())
if "cuda" not in _C.devices:
    pytest.skip(mt.backend_reason(), allow_module_level=True)

DEVICES = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
ROUTES = ["auto", "arguments", "buffer"]  # how a launch learns of its tensors: csrc/kernels/cuda.cu
COUNTS = [1, 50, 200, 700, 1500, 5000]  # of tensors: on both sides of what fits into arguments


@pytest.fixture(autouse=True)
def backend():
    with mt.use_backend("cpp"):
        yield


@contextmanager
def metadata(route):
    _C.cuda_metadata(route)
    try:
        yield
    finally:
        _C.cuda_metadata("auto")


@pytest.fixture(params=ROUTES)
def route(request):
    with metadata(request.param):
        yield request.param


@contextmanager
def no_sync():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def tensors_of(count, dtype=torch.float16, device="cuda"):
    """Small tensors, told apart by their values; every seventh is strided, every fifth begins at an odd address."""
    made = []
    for i in range(count):
        base = torch.arange(1 + i % 60, device=device, dtype=torch.float32) + i % 100
        if i % 7 == 3:
            made.append(torch.stack([base, base + 1]).to(dtype).t())
        elif i % 5 == 1:
            made.append(torch.cat([base, base]).to(dtype)[1:])
        else:
            made.append(base.to(dtype))
    return made


def kernels(call):
    """{kernel: launches} of a call, the first of which is not counted."""
    call()
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            torch.ones(3, device="cuda").exp()
            call()
            torch.cuda.synchronize()
        names = [e.name for e in profiled.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    if not names:
        pytest.skip("the profiler sees no kernels on this machine")
    ours = ("run_chunks", "add_partials", "run_once")
    return Counter(name for event in names for name in ours if name in event)


@pytest.mark.parametrize("count", COUNTS)
def test_launches_do_not_depend_on_the_number_of_tensors(count):
    dense = [torch.ones(1 + i % 60, device="cuda", dtype=torch.float16) for i in range(count)]
    out = [torch.empty_like(t, dtype=torch.float32) for t in dense]
    found = torch.zeros((), device="cuda")
    assert kernels(lambda: mt.multi_tensor_scale(dense, out, 0.5, found)) == {"run_chunks": 1}
    assert kernels(lambda: mt.multi_tensor_l2norm(dense)) == {"run_chunks": 1, "add_partials": 1}
    strided = [torch.ones(2, 1 + i % 60, device="cuda").t() for i in range(count)]
    plain = [torch.empty(t.shape, device="cuda") for t in strided]
    mixed = kernels(lambda: mt.multi_tensor_scale([*dense, *strided], [*out, *plain], 0.5, found))
    assert mixed["run_chunks"] <= 2


@pytest.mark.parametrize("count", COUNTS)
def test_every_route_does_the_same(count, route):
    src = tensors_of(count)
    out = [torch.full(t.shape, math.nan, device="cuda") for t in src]
    found = torch.zeros((), device="cuda")
    mt.multi_tensor_scale(src, out, 0.5, found)
    for s, o in zip(src, out, strict=True):
        exact(o, s.float() * 0.5)
    assert found == 0
    total, norms = mt.multi_tensor_l2norm(src, per_tensor=True)
    expected = torch.stack([reference.l2norm([t]) for t in src]).float()
    torch.testing.assert_close(norms, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(total, reference.l2norm(src).float(), rtol=1e-6, atol=0)
    src[-1].fill_(math.inf)
    mt.multi_tensor_check_finite(src, found)
    assert found == 1


def test_a_buffer_is_not_reused_before_it_was_copied(route):
    src = tensors_of(3000)
    outs = [[torch.zeros(t.shape, device="cuda") for t in src] for _ in range(8)]
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # all calls are queued before the first copy begins
    for i, out in enumerate(outs):
        mt.multi_tensor_scale(src, out, float(i + 1))
        torch.empty(1 << 20, pin_memory=True).fill_(float("nan"))  # what was freed too early gets overwritten
        torch.empty(1 << 18, device="cuda").fill_(math.nan)
    for i, out in enumerate(outs):
        for s, o in zip(src, out, strict=True):
            exact(o, s.float() * (i + 1))


def test_nothing_waits_for_the_device(route):
    src, found = tensors_of(3000), torch.zeros((), device="cuda")
    out = [torch.empty(t.shape, device="cuda") for t in src]
    factor, tracker = torch.ones((), device="cuda"), torch.zeros((), dtype=torch.int32, device="cuda")

    def everything():
        mt.multi_tensor_scale(src, out, factor, found)
        mt.multi_tensor_unscale(src, factor, found)
        mt.multi_tensor_axpby(1.0, src, 0.0, out, out, found)
        mt.multi_tensor_check_finite(src, found)
        mt.multi_tensor_unscale_l2norm(src, factor, found)
        mt.multi_tensor_adopt(src, out)
        mt.update_scale(factor, tracker, found)

    everything()
    with no_sync():
        everything()


@pytest.mark.parametrize("count", [3, 3000])
def test_capture_and_replay(count, route):
    grads, found = tensors_of(count), torch.zeros((), device="cuda")
    inverse, scale = torch.full((), 0.5, device="cuda"), torch.full((), 2.0**16, device="cuda")
    tracker = torch.zeros((), dtype=torch.int32, device="cuda")

    def step():
        found.zero_()
        norm = mt.multi_tensor_unscale_l2norm(grads, inverse, found)
        mt.update_scale(scale, tracker, found, growth_interval=3)
        return norm

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = step()

    scale.fill_(2.0**16)
    tracker.zero_()
    want = [(2.0**16, 1), (2.0**15, 0), (2.0**15, 1), (2.0**15, 2), (2.0**16, 0)]
    for replay, (expected_scale, expected_tracker) in enumerate(want):
        values = tensors_of(count)
        for g, v in zip(grads, values, strict=True):
            g.copy_(v * (replay + 1) % 32)
        before = [g.clone() for g in grads]
        if replay == 1:
            grads[-1].fill_(math.inf)
        torch.empty(1 << 20, pin_memory=True).fill_(math.nan)
        mt.multi_tensor_check_finite(tensors_of(2000), torch.zeros((), device="cuda"))
        graph.replay()
        torch.cuda.synchronize()
        for g, b in zip(grads[:-1], before[:-1], strict=True):
            exact(g, (b.float() * 0.5).half())
        assert bool(found) == (replay == 1)
        assert (scale.item(), tracker.item()) == (expected_scale, expected_tracker)
        if replay != 1:
            torch.testing.assert_close(norm, reference.l2norm(grads).float(), rtol=1e-6, atol=0)


def test_the_current_stream_is_used(route):
    side = torch.cuda.Stream()
    src, out = tensors_of(2000), [torch.zeros(t.shape, device="cuda") for t in tensors_of(2000)]
    scale, tracker = torch.ones((), device="cuda"), torch.zeros((), dtype=torch.int32, device="cuda")
    found = torch.zeros((), device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        torch._foreach_mul_(src, 2.0)  # a kernel on another stream would read before this
        found.fill_(1.0)
        mt.multi_tensor_scale(src, out, 1.0)
        mt.update_scale(scale, tracker, found)
    side.synchronize()
    for s, o in zip(src, out, strict=True):
        exact(o, s.float())
    assert scale == 0.5


@pytest.mark.parametrize("device", DEVICES)
def test_the_tensors_device_is_used_whichever_is_current(device):
    src = tensors_of(300, device=device)
    out = [torch.empty(t.shape, device=device) for t in src]
    found = torch.ones((), device=device)
    scale, tracker = torch.ones((), device=device), torch.zeros((), dtype=torch.int32, device=device)
    for current in DEVICES:
        with torch.cuda.device(current):
            for t in out:
                t.zero_()
            mt.multi_tensor_scale(src, out, 0.5)
            mt.update_scale(scale, tracker, found)
            assert torch.cuda.current_device() == torch.device(current).index
        for s, o in zip(src, out, strict=True):
            exact(o, s.float() * 0.5)
        exact(mt.multi_tensor_l2norm(src), mt.multi_tensor_l2norm(src))
    assert scale == 0.5 ** len(DEVICES)


def test_lists_of_two_devices_are_refused():
    with pytest.raises(ValueError, match=r"multi_tensor_scale: tensor 0 of dst .*cpu"):
        mt.multi_tensor_scale([torch.ones(3, device="cuda")], [torch.ones(3)], 1.0)
    with pytest.raises(ValueError, match="multi_tensor_check_finite: found_inf"):
        mt.multi_tensor_check_finite([torch.ones(3)], torch.zeros((), device="cuda"))


def test_norms_are_the_same_every_time():
    tensors = [torch.randn(size, device="cuda").half() for size in (5_000_000, 3, 70_001, *[256] * 500)]
    first = mt.multi_tensor_l2norm(tensors, per_tensor=True)
    for _ in range(10):
        for a, b in zip(first, mt.multi_tensor_l2norm(tensors, per_tensor=True), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("gigabytes", [5] if torch.cuda.mem_get_info()[0] > 20e9 else [])
def test_more_than_two_to_the_31_elements(gigabytes):
    size = 2**31 + 70_001
    huge = torch.ones(size, dtype=torch.float16, device="cuda")
    found = torch.zeros((), device="cuda")
    mt.multi_tensor_unscale([huge], 2.0, found)
    assert found == 0
    assert huge.min() == 2 and huge.max() == 2
    torch.testing.assert_close(mt.multi_tensor_l2norm([huge]).item(), 2 * math.sqrt(size), rtol=1e-6, atol=0)
    huge[-1] = math.inf
    mt.multi_tensor_check_finite([huge], found)
    assert found == 1
    overlapping = huge.as_strided((size // 2 - 2, 5), (2, 1))  # strided, and past 2**32
    found.zero_()
    mt.multi_tensor_check_finite([overlapping], found)
    assert found == 0
    huge[(size // 2 - 3) * 2 + 4] = math.nan
    mt.multi_tensor_check_finite([overlapping], found)
    assert found == 1
