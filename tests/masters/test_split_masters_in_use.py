"""Split masters in the hands of code that does not ask for their value, and of code that keeps it."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from split_masters import MAKERS, OPTIM, high_half, iterate, masters, opened, same, start
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from amp_patch import amp, multi_tensor


@pytest.fixture(params=["AdamW", "NAdam", "FusedLAMB"])
def training(request):
    model, optimizer = start(MAKERS[request.param])
    iterate(model, optimizer, range(3))
    return model, optimizer


@pytest.mark.parametrize(
    "read",
    [
        torch.utils.dlpack.to_dlpack,
        torch.vmap(lambda x: x * 2),
        torch.func.grad(lambda x: x.square().sum()),
        lambda m: Tensor._make_subclass(Tensor, m).sum(),
    ],
    ids=["to_dlpack", "vmap", "grad", "another class"],
)
def test_code_that_does_not_ask_for_the_value_is_refused_where_it_is_not_there(training, read):
    if multi_tensor.backend() != "cpp":
        pytest.skip("torch alone refuses writes only")
    master = next(amp.master_params(training[1]))
    # Torch 2.8's to_dlpack finds by itself that there is no memory.
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"handed to compiled code|storage of size 0"):
        read(master)
    master.sum()
    iterate(*training, range(3, 4))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")  # torch's jvp calls it
def test_a_master_that_is_given_twice_and_one_in_a_transform(training):
    model, optimizer = training
    master = next(amp.master_params(optimizer))
    square, tangent = master * master, torch.ones_like(master)
    assert torch.equal(square, master.detach() ** 2)
    del square
    iterate(model, optimizer, range(3, 4))
    assert not master.is_open
    primal, _ = torch.func.jvp(lambda x: x * master, (tangent,), (tangent,))
    assert torch.equal(primal, master)


def test_a_master_is_opened_outside_of_dispatch_modes(training):
    model, optimizer = training
    master = next(amp.master_params(optimizer))
    # Up to torch 2.11 the mode takes parameters of torch's own class alone, and raises; the master is opened before.
    with FakeTensorMode(allow_non_fake_inputs=True), contextlib.suppress(TypeError):
        assert isinstance(master * 2, FakeTensor)
    assert torch.equal(high_half(master), model[0].weight)
    iterate(model, optimizer, range(3, 4))


def test_arrays_storages_and_shared_memory(training):
    model, optimizer = training
    master = next(amp.master_params(optimizer))
    master.detach().numpy().sum()
    iterate(model, optimizer, range(3, 4))
    assert opened(optimizer) == 0
    kept = master.untyped_storage()
    iterate(model, optimizer, range(4, 5))
    assert kept.nbytes() == 4 * master.numel()
    master.share_memory_()
    iterate(model, optimizer, range(5, 7))
    assert master.is_shared() and torch.equal(high_half(master), model[0].weight)


def test_a_graph_that_has_saved_a_view_of_a_master_refuses_after_the_step(training):
    model, optimizer = training
    if multi_tensor.backend() != "cpp" and isinstance(optimizer, OPTIM.AdamW):
        pytest.skip("torch's fused kernels leave versions as they are, of whole masters too")
    inputs = torch.ones(3, 16, requires_grad=True)
    loss = nn.functional.linear(inputs, next(amp.master_params(optimizer))).square().sum()
    iterate(model, optimizer, range(3, 4))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_weights_that_are_laid_out_anew_leave_masters_as_the_state_is():
    def train(kind: Any) -> list[Tensor]:
        model, optimizer = start(MAKERS["NAdam"], master_weights=kind)
        iterate(model, optimizer, range(2))
        model[0].weight.data = model[0].weight.data.t().contiguous().t()
        iterate(model, optimizer, range(2, 5))
        assert next(amp.master_params(optimizer)).is_contiguous()
        return masters(optimizer)

    for ours, whole in zip(train("split"), train(True), strict=True):
        torch.testing.assert_close(ours, whole, rtol=4e-3, atol=4e-3)


def test_a_thread_that_reads_while_another_trains_finds_values(training):
    model, optimizer = training
    done = threading.Event()

    def read() -> int:
        reads = 0
        while not done.is_set():
            assert all(bool(master.sum().isfinite()) for master in amp.master_params(optimizer))
            reads += 1
        return reads

    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(read)
        iterate(model, optimizer, range(3, 60))
        done.set()
        assert reader.result() > 0
    iterate(model, optimizer, range(60, 61))
    assert opened(optimizer) == 0 and same(map(high_half, amp.master_params(optimizer)), model.parameters())
