"""`master_weights="split"`: masters that are kept as the BF16 weight and 16 bits more."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from split_masters import (
    MAKERS,
    OPTIM,
    high_half,
    is_split,
    iterate_split,
    loss_of,
    net,
    opened,
    start_split,
    training_fixture,  # noqa: F401
)
from torch import Tensor, nn
from training import ADAM, backward, images, iterate, masters_of, same

from amp_patch import amp

# ---------------------------------------------------------------------------------------------------------------------
# The numbers


# ---------------------------------------------------------------------------------------------------------------------
# Who looks, and who writes


def test_a_read_returns_an_fp32_parameter(training):
    model, optimizer = training
    for param, master in zip(model.parameters(), amp.master_params(optimizer), strict=True):
        assert is_split(master) and isinstance(master, nn.Parameter) and master.requires_grad and master.is_leaf
        assert master.dtype is torch.float32 and master.shape == param.shape
        assert master.grad is not None and not master.is_open, "facts take no memory"
        assert torch.equal(high_half(master), param) and master.is_open
        value = master.detach().clone()
        for looked in (master.data, master * 1, torch.clone(master), torch.stack([master])[0], master.view_as(master)):
            assert torch.equal(looked, value)
        assert torch.equal(torch.from_numpy(master.detach().numpy()), value) and repr(value)[7:40] in repr(master)
        del looked
    iterate_split(model, optimizer, range(3, 4))
    assert opened(optimizer) == 0, "a step gives the memory back"


def test_writes_into_masters_reach_the_model(training):
    model, optimizer = training
    writes = [lambda m: m.mul_(2), lambda m: m.data.mul_(2), lambda m: m.detach().mul_(2), lambda m: m.copy_(2 * m)]

    def replace(m: Tensor) -> None:
        m.data = 2 * m.data

    for write in (*writes, replace):
        wanted = [2 * master for master in masters_of(optimizer)]
        with torch.no_grad():
            for master in amp.master_params(optimizer):
                write(master)
        loss_of(model, 9)  # a forward
        assert same(model.parameters(), map(high_half, wanted)) and opened(optimizer) == 0
        assert same(amp.master_params(optimizer), wanted)


def test_writes_into_weights_reach_the_masters(training):
    model, optimizer = training
    next(amp.master_params(optimizer)).sum()  # one is open, with the value before
    with torch.no_grad():
        model[0].weight.fill_(0.5)
        model[3].weight.data.clamp_(-0.01, 0.01)
    model.state_dict()  # as any other place where edits are adopted
    first, *_, last, _ = amp.master_params(optimizer)
    assert torch.equal(high_half(first), torch.full_like(first, 0.5).bfloat16())
    assert last.abs().max() <= 0.01 + 2.0**-14 and torch.equal(high_half(last), model[3].weight)


def test_a_tensor_that_shares_a_master_s_memory_sees_each_step_and_is_heard(training):
    model, optimizer = training
    held = [master.detach() for master in amp.master_params(optimizer)]
    for step in range(3, 6):
        iterate_split(model, optimizer, range(step, step + 1))
        assert same(held, amp.master_params(optimizer)) and same(map(high_half, held), model.parameters())
    wanted = held[0].mul_(2).clone()
    loss_of(model, 9)
    assert torch.equal(high_half(wanted), model[0].weight)
    del held
    iterate_split(model, optimizer, range(6, 7))
    assert opened(optimizer) == 0


def test_a_master_whose_model_is_gone_says_so():
    model, optimizer = start_split(MAKERS["AdamW"])
    kept = list(amp.master_params(optimizer))
    del model, optimizer
    with pytest.raises(RuntimeError, match="parameter is gone"):
        kept[0].sum()


# ---------------------------------------------------------------------------------------------------------------------
# Memory


def test_a_run_s_record_counts_the_halves():
    with amp.record() as run:
        model, optimizer = start_split(MAKERS["AdamW"])
        iterate_split(model, optimizer, range(2))
    count = sum(p.numel() for p in model.parameters())
    assert run.weights == run.masters == 2 * count


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints, copies, and the way back


def test_a_copy_of_a_master_is_an_ordinary_tensor(training):
    _, optimizer = training
    for master in amp.master_params(optimizer):
        for twin in (copy.deepcopy(master), pickle.loads(pickle.dumps(master)), copy.copy(master)):
            assert torch.equal(twin, master) and not is_split(twin) and twin.requires_grad


def test_fp32_copies_and_averages_have_the_masters_values(training):
    model, optimizer = training
    assert same(amp.fp32_copy(model).parameters(), masters_of(optimizer))
    average = OPTIM.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    assert same(average.module.parameters(), masters_of(optimizer))


def test_shapes_and_orders_of_all_kinds():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.LazyLinear(5))
    model(images(0)[0])
    model = model.to(memory_format=torch.channels_last)
    model.register_parameter("empty", nn.Parameter(torch.empty(0, 3)))
    model.register_parameter("number", nn.Parameter(torch.tensor(3.5)))
    model[1].weight.data = model[1].weight.data.contiguous()
    wanted = [p.detach().clone() for p in model.parameters()]
    model, optimizer = amp.initialize(model, ADAM(model.parameters()), opt_level="O5", master_weights="split")
    assert same(amp.master_params(optimizer), wanted)
    model[0].weight.data = model[0].weight.data.contiguous()  # another order than the half has
    for step in range(3):
        loss = nn.functional.cross_entropy(model(images(step)[0]) + model.number, images(step)[1])
        backward(loss, optimizer)
        optimizer.step()
    assert same(map(high_half, masters_of(optimizer)), model.parameters())
    assert not torch.equal(masters_of(optimizer)[2], wanted[2])


# ---------------------------------------------------------------------------------------------------------------------
# Where it is refused


def on_ranks() -> Any:
    """A training with split masters on two processes, which begin with different weights: the masters in the end."""
    model, rank = net(), torch.distributed.get_rank()
    with torch.no_grad():
        model[0].weight.mul_(1 + 0.001 * rank)
    model, optimizer = amp.initialize(
        model, MAKERS["AdamW"](model.parameters()), opt_level="O5", master_weights="split", verbosity=0
    )
    wrapped = nn.parallel.DistributedDataParallel(model)
    iterate(optimizer, lambda step: loss_of(wrapped, 2 * step + rank), range(5))
    return opened(optimizer), masters_of(optimizer)


def test_ddp_begins_with_one_rank_s_masters_and_keeps_them_alike(ranks):
    (opened_here, ours), (opened_there, theirs) = ranks(on_ranks)
    assert same(ours, theirs) and not opened_here and not opened_there
