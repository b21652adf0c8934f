"""Lists of any shape, and what autograd, version counters and threads see of a kernel."""

from __future__ import annotations

import gc

import pytest
import torch
from conftest import DTYPES
from on_every_backend import (
    ALL_DTYPES,
    NAN,
    backend_fixture,  # noqa: F401  the fixture `backend`
    device,
    draw,
    flag,
    on_every_set,
    versions,
)
from training import exact

from amp_patch import multi_tensor as mt

# ---------------------------------------------------------------------------------------------------------------------
# Lists of any shape


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_no_tensors(dtype):
    found = flag()
    mt.multi_tensor_scale([], [], 2.0, found)
    mt.multi_tensor_unscale([], 2.0, found)
    mt.multi_tensor_axpby(1.0, [], 1.0, [], [], found)
    mt.multi_tensor_check_finite([], found)
    mt.multi_tensor_adopt([], [])
    total, norms = mt.multi_tensor_l2norm([], per_tensor=True)
    assert total == 0.0 and total.shape == () and norms.shape == (0,)
    assert mt.multi_tensor_unscale_l2norm([], 2.0, found) == 0.0
    empty = [torch.empty(0, dtype=dtype), torch.empty(3, 0, dtype=dtype)]
    mt.multi_tensor_scale(empty, empty, 2.0, found)
    assert mt.multi_tensor_unscale_l2norm(empty, 2.0, found, per_tensor=True)[1].tolist() == [0.0, 0.0]
    assert found == 0.0


@device
def test_lazy_copies_become_real_where_they_are_written(device):
    base = torch.arange(6.0, device=device).reshape(2, 3)
    for view in (lambda t: t, lambda t: t.t(), lambda t: t[:, ::2]):
        copy = view(torch._lazy_clone(base))
        mt.multi_tensor_unscale([copy], 2.0, None)
        exact(copy, view(base) * 2)
        read = torch._lazy_clone(base)
        mt.multi_tensor_l2norm([read])
        assert torch._C._is_cow_tensor(read)
    found = torch.zeros((), device=device)
    lazy = torch._lazy_clone(found)
    mt.multi_tensor_check_finite([torch.full((3,), NAN, device=device)], lazy)
    assert (found.item(), lazy.item()) == (0.0, 1.0)
    exact(base, torch.arange(6.0, device=device).reshape(2, 3))


# ---------------------------------------------------------------------------------------------------------------------
# Autograd, versions, threads


@device
def test_writes_bump_the_version_counter_and_reads_do_not(device):
    x, y, out = (draw([4, 0, 700], torch.float32, device) for _ in range(3))
    for call, written, read in [
        (lambda: mt.multi_tensor_scale(x, out, 2.0), out, x),
        (lambda: mt.multi_tensor_unscale(out, 2.0, flag(device)), out, []),
        (lambda: mt.multi_tensor_axpby(1.0, x, 1.0, y, out), out, x + y),
        (lambda: mt.multi_tensor_unscale_l2norm(out, 2.0, flag(device)), out, []),
        (lambda: mt.multi_tensor_adopt(x, out), out, x),
        (lambda: mt.multi_tensor_l2norm(out), [], out),
    ]:
        before, before_read = versions(written), versions(read)
        call()
        assert all(now > then for now, then in zip(versions(written), before, strict=True))
        assert versions(read) == before_read


def test_autograd_notices_a_write():
    weight = torch.ones(3, requires_grad=True)
    hidden = weight * 2
    loss = (hidden * hidden).sum()
    with torch.no_grad():
        mt.multi_tensor_unscale([hidden], 0.5, flag())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_leaves_that_require_grad_are_written_under_no_grad_alone():
    master = torch.nn.Parameter(torch.ones(3))
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    for call in (
        lambda: mt.multi_tensor_scale([master], [param], 3.0),
        lambda: mt.multi_tensor_adopt([param], [master]),
        lambda: mt.multi_tensor_axpby(1.0, [param], 1.0, [master], [master]),
    ):
        before = versions([master, param])
        with pytest.raises(
            ValueError, match=r"^multi_tensor_\w+: tensor 0 of \w+ requires grad.*under torch.no_grad\(\)$"
        ):
            call()
        assert versions([master, param]) == before
        with torch.no_grad():
            call()
    assert master.tolist() == [6.0] * 3 and param.tolist() == [3.0] * 3
    assert master.is_leaf and param.is_leaf and master.grad_fn is None
    assert not mt.multi_tensor_l2norm([master]).requires_grad


def test_inference_tensors():
    with torch.inference_mode():
        tensors = [torch.ones(3)]
        mt.multi_tensor_unscale(tensors, 2.0, flag())
    assert tensors[0].tolist() == [2.0] * 3


def test_results_do_not_depend_on_the_number_of_threads():
    def everything():
        x, y = (
            draw([300_000, 5, 40_001, 0], torch.float16, "cpu"),
            draw([300_000, 5, 40_001, 0], torch.float32, "cpu", 1),
        )
        found = flag()
        mt.multi_tensor_axpby(0.3, x, 0.7, y, y)
        total, norms = mt.multi_tensor_unscale_l2norm(y, 1 / 3, found, per_tensor=True)
        return [*y, total, norms, found]

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = everything()
        for threads in (2, 3, 7):
            torch.set_num_threads(threads)
            if mt.backend() == "cpp":
                exact(everything(), one)
            else:  # torch's own norm splits its sum among the threads
                torch.testing.assert_close(everything(), one, rtol=1e-6, atol=0)
    finally:
        torch.set_num_threads(before)


@on_every_set
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_outputs_at_any_address(backend, dtype):
    n = (33 << 20) // dtype.itemsize  # past the caches, where the loop takes another store
    base = torch.zeros(n + 70, dtype=dtype)
    src = torch.arange(n, dtype=torch.int32).remainder_(255).float()
    for offset in (0, 1, 5):
        base.zero_()
        mt.multi_tensor_scale([src], [base[offset : offset + n]], 0.5)
        exact(base[offset : offset + n], (src * 0.5).to(dtype))
        assert not base[:offset].any() and not base[offset + n :].any()


def test_no_reference_is_kept():
    import weakref

    tensor = torch.ones(3)
    alive = weakref.ref(tensor)
    mt.multi_tensor_unscale([tensor], 1.0, flag())
    with pytest.raises(ValueError):
        mt.multi_tensor_scale([tensor], [], 1.0)
    del tensor
    gc.collect()
    assert alive() is None
