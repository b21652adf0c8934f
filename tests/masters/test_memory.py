"""Memory: bytes per parameter, and no growth over steps."""

from __future__ import annotations

import gc
import itertools
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch._dynamo  # without this, the first optimizer imports it, and each collection visits its objects
import training
from conftest import DEVICES
from crossed import crossed
from torch import nn
from training import LEVELS, SGD, backward, convnet

from amp_patch import amp
from amp_patch.masters.master import Master
from amp_patch.masters.recycled_memory import Recycled
from amp_patch.multi_tensor import backend

# Absent from CPU builds of old torch.
use_count = getattr(torch._C, "_storage_Use_Count", lambda _: 1)


def live_bytes():
    """Bytes of all storages that Python can reach, those of tensors and those by themselves, each once.

    Not those of stand-ins that a compiler or `torch.func` has left: no memory is behind them. In torch 2.6 and 2.8 some
    of them have ended, though not for Python: to ask one for its size ends it again, which is warned of.
    """
    while gc.collect():  # what one pass has freed may have held what only the next one finds
        pass
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, nn.Parameter, Master) and not thing.is_sparse:
            if torch._C._functorch.is_functorch_wrapped_tensor(thing):
                continue
            thing = thing.untyped_storage()
        if issubclass(type(thing), torch.UntypedStorage) and use_count(thing._cdata) and thing.device.type != "meta":
            storages[thing.data_ptr()] = thing.nbytes()
    return sum(storages.values())


@crossed({"level": ["O2", "O5"], "make_optimizer": [SGD, training.ADAM]}, meet=1)
def test_an_o2_parameter_costs_2_bytes_of_weight_and_gradient_and_4_of_master(level, make_optimizer):
    size = 128 * 1024
    small = 64 * 1024  # scales, step counts, batches: far less than one byte for each parameter
    before = live_bytes()
    model = nn.Linear(128, 1024, bias=False)
    state_bytes = 4 * size if make_optimizer is SGD else 8 * size
    model, optimizer = amp.initialize(model, make_optimizer(model.parameters()), opt_level=level)
    assert live_bytes() - before < 6 * size + small
    for _ in range(3):
        inputs = torch.randn(4, 128)
        loss = model(inputs).square().mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        del scaled_loss, loss
        held = live_bytes() - before
        optimizer.step()
        # In plain torch the master's gradient is made at once, and a CPU, whose new memory is dear, keeps its memory.
        gradient = 2 * size if backend() == "cpp" else 4 * size
        assert live_bytes() - before < 6 * size + gradient + state_bytes + small
        if _ == 0:
            optimizer.zero_grad()  # the second time the next backward's gradient comes in place of this one
            assert live_bytes() - before < 6 * size + state_bytes + small + (0 if backend() == "cpp" else gradient)
        expected = 6 * size + gradient + (0 if _ == 0 else state_bytes)
        assert abs(held - expected) < small  # less, if what an earlier test has left is freed meanwhile


def step_of_ones(model, optimizer, factor):
    """A step in which every element of the weight's gradient is `factor`."""
    optimizer.zero_grad()
    backward(model(torch.full((1, 128), factor)).sum(), optimizer)
    gradient = next(iter(amp.master_params(optimizer))).grad
    optimizer.step()
    return gradient


@pytest.mark.parametrize(
    "hold",
    [
        lambda gradient: gradient,
        lambda gradient: gradient[3:, ::2],
        lambda gradient: gradient.detach().flatten(),
        lambda gradient: gradient.numpy(),
        lambda gradient: torch._lazy_clone(gradient),
        lambda gradient: torch.from_dlpack(gradient),
        lambda gradient: gradient.untyped_storage(),
        lambda gradient: torch.ones(2, 1024, requires_grad=True) @ gradient,  # its graph has saved the gradient
    ],
    ids=["itself", "view", "detached", "numpy", "lazy", "dlpack", "storage", "graph"],
)
def test_a_gradient_that_the_user_holds_stays_as_it_was(hold):
    model = nn.Linear(128, 1024, bias=False)
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level="O2", loss_scale=8.0)
    held = [hold(step_of_ones(model, optimizer, factor)) for factor in (1.0, 2.0, 3.0)]
    for factor, thing in zip((1.0, 2.0, 3.0), held, strict=True):
        if isinstance(thing, torch.UntypedStorage):
            thing = torch.empty(0).set_(thing)
        elif isinstance(thing, torch.Tensor) and thing.requires_grad:
            (thing,) = torch.autograd.grad(thing.sum(), thing.grad_fn.next_functions[0][0].variable)
            factor *= 128
        thing = torch.as_tensor(thing)
        assert torch.equal(thing, torch.full_like(thing, factor))


def test_a_gradient_that_was_resized_or_given_to_other_processes_takes_its_memory_along():
    model = nn.Linear(128, 1024, bias=False)
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level="O2", loss_scale=8.0)
    step_of_ones(model, optimizer, 1.0).untyped_storage().resize_(0)
    assert torch.equal(step_of_ones(model, optimizer, 2.0), torch.full((1024, 128), 2.0))
    shared = step_of_ones(model, optimizer, 3.0).share_memory_().data_ptr()
    assert step_of_ones(model, optimizer, 4.0).data_ptr() != shared


@pytest.mark.parametrize("device", DEVICES)
def test_recycled_memory_is_one_block_that_one_tensor_has_at_a_time(device):
    recycled, like = Recycled(), torch.empty(256, 128, dtype=torch.bfloat16, device=device)
    first = recycled.empty_like(like)
    assert first.shape == like.shape and first.dtype is torch.float32 and first.device == like.device
    place = first.data_ptr()
    second = recycled.empty_like(like)
    assert second.data_ptr() != place
    del first
    place = second.data_ptr()
    second.fill_(1.0)
    del second
    third = recycled.empty_like(like)
    if device == "cpu":
        assert third.data_ptr() == place
    assert third.is_contiguous() and not third.requires_grad
    del third
    image = torch.empty(8, 64, 8, 8, dtype=torch.bfloat16, device=device)  # as large as the first
    last = recycled.empty_like(image.to(memory_format=torch.channels_last))
    assert last.shape == image.shape and last.is_contiguous(memory_format=torch.channels_last)
    if device == "cpu":
        assert last.data_ptr() == place
    del last
    smaller = recycled.empty_like(like[:128])
    assert smaller.untyped_storage().nbytes() == 4 * smaller.numel()  # not the large block under a small tensor
    del smaller
    for other in (like[:128], like.view(-1), like.t(), like[:, ::2], like[:1, :1], like[:0]):  # of another form or size
        assert recycled.empty_like(other).shape == other.shape
        assert recycled.empty_like(other).stride() == torch.empty_like(other).stride()


def saved_bytes(model, inputs, area):
    """Bytes of what a forward saves for its backward, of each memory once, without the weights and the inputs."""
    held = {tensor.untyped_storage().data_ptr() for tensor in (inputs, *model.parameters(), *model.buffers())}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), area:
        result = model(inputs)  # holds them all: no memory is two tensors' in turn
    return sum(saved.values()), result


@pytest.mark.parametrize(("how", "cpu_half"), [("O4", "auto"), ("O4", "native"), ("autocast", "native")])
@pytest.mark.parametrize("device", DEVICES)
def test_a_net_with_batch_norms_saves_as_much_for_its_backward_as_under_torch_autocast(how, cpu_half, device):
    def net():
        torch.manual_seed(0)
        layers = [[nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)] for _ in range(3)]
        return nn.Sequential(*itertools.chain(*layers), nn.InstanceNorm2d(8, affine=True)).to(device)

    inputs = torch.randn(4, 8, 32, 32, device=device)
    full, _ = saved_bytes(net(), inputs, nullcontext())
    torchs, expected = saved_bytes(net(), inputs, torch.autocast(device, torch.bfloat16))
    model = amp.initialize(net(), opt_level="O4", verbosity=0, cpu_half=cpu_half) if how == "O4" else net()
    area = nullcontext() if how == "O4" else amp.autocast(device, dtype=torch.bfloat16)
    ours, found = saved_bytes(model, inputs, area)
    assert ours == torchs < 0.6 * full
    assert found.dtype is torch.bfloat16
    # An emulated convolution may round an element to the other neighbour, and the norms spread the difference.
    torch.testing.assert_close(found, expected, rtol=0, atol=0 if cpu_half == "native" else 0.125)


def counts():
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_grows_over_100_steps(level):
    model = training.linear([[0.5, 0.25]])
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level=level, verbosity=0)
    inputs = torch.ones(1, 2)

    def steps(number):
        for _ in range(number):
            optimizer.zero_grad()
            backward(model(inputs).float().square().mean() / 8, optimizer)
            optimizer.step()
        return counts()

    first = steps(10)
    assert steps(90) <= first


@pytest.mark.parametrize("restores", [True, False])
@pytest.mark.parametrize("level", LEVELS)
def test_nothing_is_left_of_trainings_that_were_restored_or_dropped(level, restores):
    def trainings(number):
        for _ in range(number):
            model = convnet()
            model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level=level, loss_scale=8.0)
            training.train(model, optimizer, 1)
            if restores:
                amp.restore()
        del model, optimizer
        return counts()

    first = trainings(2)
    assert trainings(4) <= first


@pytest.mark.parametrize("level", ["O2", "O5", "O5+split"])
def test_masters_that_are_dropped_before_their_step_are_freed_without_the_cycle_collector(level):
    model = nn.Linear(4, 4)
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level=level, loss_scale=8.0)
    backward(model(torch.ones(2, 4)).float().sum(), optimizer)
    masters = [weakref.ref(master) for master in amp.master_params(optimizer)]
    gc.collect()
    gc.disable()
    try:
        del model, optimizer
        assert masters and not any(master() is not None for master in masters)
    finally:
        gc.enable()
