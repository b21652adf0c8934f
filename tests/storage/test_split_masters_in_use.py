"""Split masters in code that reads their memory without torch functions, and in code that holds their values."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from split_masters import (
    MAKERS,
    OPTIM,
    high_half,
    iterate_split,
    loss_of,
    opened,
    start_split,
    training_fixture,  # noqa: F401
)
from torch import Tensor, nn
from training import masters_of, same

from amp_patch import amp, multi_tensor


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
@pytest.mark.extension  # torch alone refuses writes only
def test_code_that_does_not_ask_for_the_value_is_refused_where_it_is_not_there(training, read):
    master = next(amp.master_params(training[1]))
    # Torch 2.8's to_dlpack finds by itself that there is no memory.
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"handed to compiled code|storage of size 0"):
        read(master)
    master.sum()
    iterate_split(*training, range(3, 4))


@pytest.fixture(params=[True, "split"])
def either(request):
    """A training with whole masters, and one with split ones."""
    model, optimizer = start_split(MAKERS["AdamW"], master_weights=request.param)
    iterate_split(model, optimizer, range(3))
    return model, optimizer


class Named(nn.Parameter):
    pass


@pytest.mark.parametrize("kind", [nn.Parameter, Named])
@pytest.mark.parametrize("options", [{}, {"requires_grad": False}])
def test_a_parameter_that_is_made_of_a_master_is_an_ordinary_one(either, kind, options):
    model, optimizer = either
    wanted = masters_of(optimizer)
    made = [kind(data=master, **options) for master in amp.master_params(optimizer)]
    assert all(type(p) is kind and p.dtype is torch.float32 and p.is_leaf and p.grad is None for p in made)
    assert all(p.requires_grad is options.get("requires_grad", True) for p in made) and same(made, wanted)
    assert type(copy.deepcopy(made[0])) is kind
    iterate_split(model, optimizer, range(3, 4))
    assert same(made, amp.master_params(optimizer)) and not torch.equal(made[0], wanted[0])  # as of any tensor
    with torch.no_grad():
        made[0].fill_(0.5)
    loss_of(model, 4)
    assert bool((model[0].weight == 0.5).all())
    amp.restore()
    assert nn.Parameter.__new__.__globals__ is vars(torch.nn.parameter), "torch's own constructor is back"


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_a_tensor_that_is_made_of_a_master_is_a_copy(either):
    model, optimizer = either
    wanted = masters_of(optimizer)[0]
    make = {
        torch.tensor: [{}, {"dtype": torch.float64}, {"requires_grad": True}],
        torch.as_tensor: [{"dtype": torch.float64}],
        torch.asarray: [{"dtype": torch.float64, "requires_grad": False}, {"copy": True, "requires_grad": False}],
    }
    for function, several in make.items():
        for options in several:
            loss_of(model, 3)
            made = function(next(amp.master_params(optimizer)), **options)
            assert made.dtype is options.get("dtype", torch.float32) and torch.equal(made, wanted.to(made.dtype))
            assert made.requires_grad is options.get("requires_grad", function is torch.as_tensor)
            with torch.no_grad():
                made.zero_()
            assert torch.equal(next(amp.master_params(optimizer)), wanted)
            model.state_dict()
    assert all(pickle.loads(pickle.dumps(function)) is function for function in make), "as a dataset's workers do"
    assert torch.as_tensor(master := next(amp.master_params(optimizer))) is master
    assert torch.tensor(data=[1, 2]).tolist() == [1, 2] and opened(optimizer) <= len(masters_of(optimizer))


def test_arrays_storages_and_shared_memory(training):
    model, optimizer = training
    master = next(amp.master_params(optimizer))
    master.detach().numpy().sum()
    iterate_split(model, optimizer, range(3, 4))
    assert opened(optimizer) == 0
    kept = master.untyped_storage()
    iterate_split(model, optimizer, range(4, 5))
    assert kept.nbytes() == 4 * master.numel()
    master.share_memory_()
    iterate_split(model, optimizer, range(5, 7))
    assert master.is_shared() and torch.equal(high_half(master), model[0].weight)


def test_a_graph_that_has_saved_a_view_of_a_master_refuses_after_the_step(training):
    model, optimizer = training
    if multi_tensor.backend() != "cpp" and isinstance(optimizer, OPTIM.AdamW):
        pytest.skip("torch's fused kernels leave versions as they are, of whole masters too")
    inputs = torch.ones(3, 16, requires_grad=True)
    loss = nn.functional.linear(inputs, next(amp.master_params(optimizer))).square().sum()
    iterate_split(model, optimizer, range(3, 4))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
