"""apex.parallel: LARC, SyncBatchNorm, DistributedDataParallel and Reducer; one process first, then two."""

from __future__ import annotations

import copy
import importlib
import math
import pickle

import pytest
import torch
import torch.distributed as dist
import training
from conftest import DEVICES, DTYPES
from paths import ROOT
from torch import nn
from training import LEVELS, backward, convnet, images, linear

from amp_patch import amp
from amp_patch.apex import parallel
from amp_patch.apex.fp16_utils import FP16_Optimizer
from amp_patch.apex.parallel import (
    DistributedDataParallel,
    Reducer,
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
    multiproc,
)
from amp_patch.apex.parallel.distributed import flat_dist_call
from amp_patch.apex.parallel.LARC import LARC


def test_where_apex_has_the_names():
    assert parallel.LARC is importlib.import_module("amp_patch.apex.parallel.LARC"), "the module, as in Apex"
    assert parallel.LARC.LARC is LARC
    for name in ("sync_batchnorm", "optimized_sync_batchnorm"):
        assert importlib.import_module(f"amp_patch.apex.parallel.{name}").SyncBatchNorm is SyncBatchNorm
    assert parallel.ReduceOp.SUM == dist.ReduceOp.SUM
    assert not isinstance(nn.Linear(1, 1), parallel.DistributedDataParallel)


# ---------------------------------------------------------------------------------------------------------------------
# LARC


def larc_by_hand(param, grad, lr, decay, trust, clip, eps=1e-8):
    """You et al. 2017, equation 6 and section 4, in FP64: the weight after one step of plain SGD."""
    w, g = param.double(), grad.double()
    if w.norm() == 0 or g.norm() == 0:
        return w - lr * g
    local = trust * w.norm() / (g.norm() + decay * w.norm() + eps)
    return w - (min(local, lr) if clip else lr * local) * (g + decay * w)


def weights_and_grads(dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(size, generator=generator) for size in ((3, 4), (5,), (2, 2), (3,), ())]
    grads = [torch.randn(p.shape, generator=generator) * 10.0 ** (i - 1) for i, p in enumerate(params)]
    params[2].zero_()
    grads[3].zero_()
    return [nn.Parameter(p.to(device, dtype)) for p in params], [g.to(device, dtype) for g in grads]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize(("clip", "trust"), [(True, 0.02), (False, 0.001), (True, 100.0)])
@pytest.mark.parametrize("decay", [0.0, 1e-1])
def test_larc_is_the_paper_s(device, dtype, clip, trust, decay):
    params, grads = weights_and_grads(dtype, device)
    optimizer = LARC(optimizer=torch.optim.SGD(params, lr=0.5, weight_decay=decay), trust_coefficient=trust, clip=clip)
    wanted = [larc_by_hand(p.detach(), g, 0.5, decay, trust, clip) for p, g in zip(params, grads, strict=True)]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    optimizer.step()
    eps = torch.finfo(torch.float32 if dtype is torch.float64 else dtype).eps
    for param, want in zip(params, wanted, strict=True):
        torch.testing.assert_close(param.detach().double(), want, rtol=8 * eps, atol=8 * eps)
    assert optimizer.param_groups[0]["weight_decay"] == decay


def test_larc_without_gradients_and_with_a_learning_rate_of_zero():
    params, grads = weights_and_grads()
    before = [p.detach().clone() for p in params]
    optimizer = LARC(torch.optim.SGD([{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.1}], lr=0.0))
    optimizer.step()
    params[0].grad = grads[0].clone()
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
    assert torch.equal(params[0].grad, grads[0]), "min(local / 0, 1) is 1"
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0, 0.1]


def test_larc_gives_weight_decay_back_when_a_step_fails():
    table = nn.Embedding(3, 2, sparse=True)
    optimizer = LARC(torch.optim.SGD(table.parameters(), lr=1.0, weight_decay=0.5))
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="group 0 has a sparse gradient"):
        optimizer.step()
    assert optimizer.param_groups[0]["weight_decay"] == 0.5
    optimizer.zero_grad()
    optimizer.step()


def test_larc_is_an_optimizer_to_schedulers_and_hides_nothing_of_the_inner_one():
    params, grads = weights_and_grads()
    inner = torch.optim.Adam(params, lr=0.1)
    optimizer = LARC(inner)
    assert isinstance(optimizer, torch.optim.Optimizer) and repr(optimizer) == repr(inner)
    assert optimizer.optim is inner and optimizer.state is inner.state and optimizer.defaults is inner.defaults
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    assert optimizer.step(lambda: 7.0) == 7.0
    scheduler.step()
    assert inner.param_groups[0]["lr"] == 0.05
    optimizer.param_groups[0]["lr"] = 0.3
    assert inner.param_groups[0]["lr"] == 0.3
    optimizer.zero_grad(set_to_none=True)
    assert params[0].grad is None
    extra = nn.Parameter(torch.ones(1))
    optimizer.add_param_group({"params": [extra]})
    assert inner.param_groups[1]["params"] == [extra]
    twin = LARC(torch.optim.Adam([{"params": params}, {"params": [extra]}]))
    twin.load_state_dict(optimizer.state_dict())
    assert str(twin.state_dict()) == str(inner.state_dict())
    for clone in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert clone.optim is not inner and clone.trust_coefficient == 0.02
        assert str(clone.state_dict()) == str(inner.state_dict())
    optimizer.param_groups = inner.param_groups[:1]
    assert len(inner.param_groups) == 1
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = optimizer.nothing


def larc_training(order, level, steps=6, bad=(), **kwargs):
    """A model and its LARC made before or after `initialize`; the scale is small enough for every step not in `bad`."""
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    if order == "LARC first":
        optimizer = LARC(optimizer, trust_coefficient=0.1, clip=False)
        model, same = amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, **kwargs)
        assert same is optimizer
    else:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, **kwargs)
        optimizer = LARC(optimizer, trust_coefficient=0.1, clip=False)
    for step in range(steps):
        inputs, targets = images(step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets) * (math.inf if step in bad else 1.0)
        backward(loss, optimizer)
        before = training.weights(model), copy.deepcopy(optimizer.state_dict())
        optimizer.step()
        assert optimizer._amp_stash.step_skipped is (step in bad)
        if step in bad:
            assert training.same(before[0], training.weights(model))
            assert str(before[1]) == str(optimizer.state_dict())
        assert optimizer.param_groups[0]["weight_decay"] == 0.1
    return model, optimizer


@pytest.mark.parametrize("order", ["LARC first", "initialize first"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_larc_under_amp_is_larc_on_unscaled_gradients_and_skips_whole_steps(order, level):
    model, _ = larc_training(order, level)
    plain, _ = larc_training(order, "O0")
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name].to(value.dtype), value, rtol=0.05, atol=0.03)
    larc_training(order, level, bad=(0, 3))


@pytest.mark.parametrize("order", ["LARC first", "initialize first"])
def test_at_o2_larc_acts_on_the_masters(order):
    model = linear([[3.0, 4.0]])
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    if order == "LARC first":
        model, optimizer = amp.initialize(model, LARC(sgd, 0.5, clip=False), opt_level="O2", loss_scale=1024.0)
    else:
        model, sgd = amp.initialize(model, sgd, opt_level="O2", loss_scale=1024.0)
        optimizer = LARC(sgd, 0.5, clip=False)
    for delay in (True, False):  # 0.3, 0.4 in all; its norm is half
        loss = model(torch.tensor([[0.1875, 0.25]])).sum()
        with amp.scale_loss(loss, optimizer, delay_unscale=delay) as scaled_loss:
            scaled_loss.backward()
    (master,) = amp.master_params(optimizer)
    wanted = larc_by_hand(master.detach(), torch.tensor([[0.375, 0.5]]), 1.0, 0.0, 0.5, False)
    optimizer.step()
    torch.testing.assert_close(master.detach().double(), wanted, rtol=1e-6, atol=1e-6)
    assert torch.equal(model.weight, master.half())


def test_a_step_while_gradients_are_still_scaled_unscales_them_before_larc_sees_them():
    model = linear([[3.0, 4.0]])
    optimizer = LARC(torch.optim.SGD(model.parameters(), lr=1.0), 0.5, clip=False)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
    optimizer.zero_grad()
    optimizer.step()  # before any backward
    with amp.scale_loss(model(torch.tensor([[0.375, 0.5]])).sum() / 64, optimizer, delay_unscale=True) as scaled_loss:
        scaled_loss.backward()
    (master,) = amp.master_params(optimizer)
    wanted = larc_by_hand(master.detach(), torch.tensor([[0.375, 0.5]]) / 64, 1.0, 0.0, 0.5, False)
    optimizer.step()
    torch.testing.assert_close(master.detach().double(), wanted, rtol=1e-6, atol=1e-6)


def test_larc_inside_of_fp16_optimizer():
    model = linear([[3.0, 4.0]]).half()
    optimizer = FP16_Optimizer(
        LARC(torch.optim.SGD(model.parameters(), lr=1.0), 0.5, clip=False), static_loss_scale=64.0
    )
    optimizer.backward(model(torch.tensor([[0.375, 0.5]]).half()).sum())
    optimizer.step()
    wanted = larc_by_hand(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.375, 0.5]]), 1.0, 0.0, 0.5, False)
    torch.testing.assert_close(model.weight.detach().double(), wanted, rtol=1e-3, atol=1e-3)


def test_restore_gives_the_optimizer_inside_of_larc_back():
    model, optimizer = larc_training("LARC first", "O2", steps=2)
    amp.restore()
    assert type(optimizer.optim) is torch.optim.SGD and not hasattr(optimizer, "_amp_stash")
    assert optimizer.param_groups[0]["params"][0] is next(model.parameters())


# ---------------------------------------------------------------------------------------------------------------------
# One process


@pytest.fixture
def world_of_one(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(params=[False, True], ids=["no group", "a group"])
def maybe_a_world(request):
    if request.param:
        request.getfixturevalue("world_of_one")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kwargs", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}])
def test_a_lone_process_s_syncbatchnorm_is_batch_norm(maybe_a_world, device, dtype, kwargs):
    ours, theirs = SyncBatchNorm(3, **kwargs).to(device), nn.BatchNorm2d(3, **kwargs).to(device)
    assert isinstance(ours, nn.modules.batchnorm._BatchNorm)
    for step in range(3):
        x = torch.randn(4, 3, 2, 2).to(device, dtype)
        if step == 2:
            ours.eval(), theirs.eval()
        assert torch.equal(ours(x), theirs(x)) and ours(x).dtype is dtype
        theirs(x)
    assert str(ours.state_dict()) == str(theirs.state_dict())


@pytest.mark.parametrize("device", DEVICES)
def test_channel_last_z_and_fuse_relu(maybe_a_world, device):
    reference = nn.BatchNorm2d(3).to(device)
    x, z = torch.randn(4, 3, 2, 5, device=device), torch.randn(4, 3, 2, 5, device=device)
    last = SyncBatchNorm(3, channel_last=True, fuse_relu=True).to(device)
    wanted = (reference(x) + z).relu()
    torch.testing.assert_close(last(x.movedim(1, -1), z.movedim(1, -1)).movedim(-1, 1), wanted)
    torch.testing.assert_close(last.running_var, reference.running_var)
    torch.testing.assert_close(
        SyncBatchNorm(3, 1e-5, 0.1, True, True, None, False, True).to(device)(x, z), wanted, msg="Apex's order"
    )
    flat = SyncBatchNorm(3, channel_last=True).to(device)
    torch.testing.assert_close(flat(x[:, :, 0, 0]), nn.BatchNorm1d(3).to(device)(x[:, :, 0, 0]))


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2, eps=1e-3, momentum=0.2))
        self.shared = self.body[1]
        self.other = nn.InstanceNorm2d(2, affine=True)
        self.plain = nn.BatchNorm1d(2, affine=False, track_running_stats=False).eval()


def test_convert_syncbn_model_keeps_what_others_hold():
    model = Twice()
    before = dict(model.named_parameters()), dict(model.named_buffers())
    group = object()
    assert convert_syncbn_model(model, process_group=group, channel_last=True) is model
    norm = model.body[1]
    assert isinstance(norm, SyncBatchNorm) and model.shared is norm and type(model.other) is nn.InstanceNorm2d
    assert (norm.eps, norm.momentum, norm.channel_last, norm.process_group) == (1e-3, 0.2, True, group)
    assert all(param is before[0][name] for name, param in model.named_parameters())
    assert all(buffer is before[1][name] for name, buffer in model.named_buffers())
    assert not model.plain.training and model.plain.weight is None and model.plain.running_mean is None
    alone = convert_syncbn_model(nn.BatchNorm1d(2))
    assert isinstance(alone, SyncBatchNorm)
    assert isinstance(convert_syncbn_model(nn.Sequential(alone))[0], SyncBatchNorm)


@pytest.mark.parametrize("level", LEVELS)
def test_converted_models_train_at_every_level(maybe_a_world, level):
    model, plain = convert_syncbn_model(convnet()), convnet()
    assert isinstance(model.body[1], SyncBatchNorm)
    losses = []
    for net in (model, plain):
        net, optimizer = amp.initialize(net, training.ADAM(net.parameters()), opt_level=level, loss_scale=128.0)
        losses.append(training.train(net, optimizer, 4))
    assert model.body[1].weight.dtype is plain.body[1].weight.dtype
    assert losses[0] == pytest.approx(losses[1], rel=0.01, abs=0.01)
    # Converted after initialize too, as some scripts do.
    late, optimizer = convnet(), None
    late, optimizer = amp.initialize(late, training.ADAM(late.parameters()), opt_level=level, loss_scale=128.0)
    convert_syncbn_model(late)
    assert training.train(late, optimizer, 4) == pytest.approx(losses[1], rel=0.01, abs=0.01)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kwargs", [{}, {"delay_allreduce": True}, {"gradient_predivide_factor": 2.0}])
def test_ddp_around_what_initialize_returned(world_of_one, level, kwargs):
    losses = []
    for wrap in (True, False):
        model = convnet()
        model, optimizer = amp.initialize(model, training.ADAM(model.parameters()), opt_level=level, loss_scale=128.0)
        wrapped = DistributedDataParallel(model, **kwargs) if wrap else model
        losses.append(training.train(wrapped, optimizer, 4))
        if wrap:
            assert isinstance(wrapped, parallel.DistributedDataParallel) and wrapped.module is model
            assert isinstance(wrapped, nn.parallel.DistributedDataParallel)
            wrapped.load_state_dict(wrapped.state_dict())
    assert losses[0] == losses[1]


def test_the_arguments_of_ddp(world_of_one):
    module = nn.Linear(2, 2)
    ddp = DistributedDataParallel(
        module,
        message_size=250000000,
        delay_allreduce=False,
        allreduce_trigger_params=[module.bias],
        retain_allreduce_buffers=True,
        num_allreduce_streams=2,
        gradient_predivide_factor=8.0,
        prof=True,
    )
    assert (ddp.message_size, ddp.gradient_predivide_factor, ddp.delay_allreduce) == (250000000, 8.0, False)
    with pytest.raises(ValueError, match="shared_param is no longer"):
        DistributedDataParallel(module, shared_param=True)
    with pytest.raises(ValueError, match="delay_allreduce=False"):
        DistributedDataParallel(module, delay_allreduce=True, num_allreduce_streams=2)
    with pytest.raises(ValueError, match="delay_allreduce=False"):
        DistributedDataParallel(module, delay_allreduce=True, allreduce_trigger_params=[])
    with pytest.raises(ValueError, match="gradient_predivide_factor is 0"):
        DistributedDataParallel(module, gradient_predivide_factor=0)
    with pytest.raises(ValueError, match="wrapped in DistributedDataParallel"):
        amp.initialize(ddp, opt_level="O2")


def test_needs_refresh_and_a_frozen_module(world_of_one):
    ddp = DistributedDataParallel(nn.Linear(1, 1))
    assert ddp.needs_refresh
    with torch.no_grad():
        ddp(torch.ones(1, 1))
    assert ddp.needs_refresh
    ddp(torch.ones(1, 1)).sum().backward()
    assert not ddp.needs_refresh
    frozen = nn.Linear(1, 1).requires_grad_(False)
    assert torch.equal(DistributedDataParallel(frozen)(torch.ones(1, 1)), frozen(torch.ones(1, 1)))


def test_reducer_and_flat_dist_call_alone(world_of_one):
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2).half(), nn.Linear(1, 1)])
    reducer = Reducer(model)
    grads = []
    for layer in model[:2]:  # the last has none
        layer.weight.grad = torch.full_like(layer.weight, 3.0)
        grads.append(layer.weight.grad)
    reducer.reduce()
    nested = Reducer([grads[0], (grads[1], [])])
    assert [id(g) for g in nested.grads] == [id(g) for g in grads]
    nested.reduce()
    assert all(layer.weight.grad is g and (g == 3.0).all() for layer, g in zip(model, grads, strict=False))
    flat_dist_call(grads, dist.broadcast, (0,))
    flat_dist_call([], dist.all_reduce)
    assert model[2].weight.grad is None


def test_create_syncbn_process_group_alone(world_of_one):
    assert create_syncbn_process_group(0) is None
    assert dist.get_world_size(create_syncbn_process_group(group_size=1)) == 1
    for size in (2, -1):
        with pytest.raises(ValueError, match=f"group_size is {size}; wanted a divisor of the 1 processes"):
            create_syncbn_process_group(size)


# ---------------------------------------------------------------------------------------------------------------------
# Two processes


def _mean_of_both(make_loss, model):
    """The gradients of a fresh copy of `model`, averaged over what each rank would get alone."""
    sums = {}
    for rank in range(2):
        alone = copy.deepcopy(model)
        make_loss(alone, rank).backward()
        for name, param in alone.named_parameters():
            if param.grad is not None:
                sums[name] = sums.get(name, 0) + param.grad / 2
    return sums


class Branches(nn.Module):
    """`spare` is never used; `extra` is given out and in no loss; `chosen` is used where asked for."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.body, self.spare, self.extra, self.chosen = (nn.Linear(3, 3) for _ in range(4))
        self.register_buffer("own", torch.tensor(float(seed)))

    def forward(self, x, choose=True):
        hidden = self.body(x)
        return self.chosen(hidden) if choose else hidden, self.extra(x)


def _batch(rank, step=0):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))


def _ddp():
    rank = dist.get_rank()
    for kwargs, factor in (
        ({}, 1),
        ({"message_size": 1}, 1),
        ({"delay_allreduce": True}, 1),
        ({"allreduce_always_fp32": True}, 1),
        ({"gradient_predivide_factor": 4.0}, 1),
        ({"gradient_average": False}, 2),
        ({"gradient_average": False, "gradient_predivide_factor": 4.0}, 0.5),  # as Apex has it
    ):
        model = Branches(seed=rank)
        ddp = DistributedDataParallel(model, **kwargs)
        start = Branches(seed=0)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), start.parameters(), strict=True))
        for step in range(5):

            def loss(net, number, step=step):
                return net(_batch(number, step), choose=step != 3)[0].square().sum()

            model.zero_grad()
            loss(ddp, rank).backward()
            wanted = _mean_of_both(loss, model)
            for name, param in model.named_parameters():
                if name in wanted:
                    torch.testing.assert_close(param.grad, wanted[name] * factor, msg=f"{kwargs} {step} {name}")
                else:
                    assert param.grad is None, (kwargs, step, name)

    # Two forwards and one backward; then accumulation without and with reductions in between.
    model = Branches(seed=rank)
    ddp = DistributedDataParallel(model)

    def both(net, number):
        return sum(net(_batch(number, step))[0].square().sum() for step in range(2))

    wanted = _mean_of_both(both, model)
    for way in ("one backward", "silent first", "two backwards"):
        model.zero_grad()
        if way == "one backward":
            both(ddp, rank).backward()
        else:
            for step in range(2):
                ddp.disable_allreduce() if way == "silent first" and step == 0 else ddp.enable_allreduce()
                ddp(_batch(rank, step))[0].square().sum().backward()
        for name, value in wanted.items():
            torch.testing.assert_close(model.get_parameter(name).grad, value, msg=f"{way} {name}")

    # FP16 gradients whose sum is past FP16.
    for kwargs in ({"allreduce_always_fp32": True}, {"gradient_predivide_factor": 2.0}):
        half = linear([[1.0]]).half()
        ddp = DistributedDataParallel(half, **kwargs)
        ddp(torch.full((1, 1), 60000.0).half()).sum().backward()
        assert half.weight.grad.tolist() == [[60000.0]], kwargs


def _reducer():
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 1).half()])
    reducer = Reducer(model)
    torch.manual_seed(0)
    start = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 1).half()])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), start.parameters(), strict=True))
    for param in model.parameters():
        param.grad = torch.full_like(param, rank + 1.0)
    reducer.reduce()
    assert all((param.grad == 1.5).all() for param in model.parameters())
    gradient = torch.tensor([4.0 * rank])
    Reducer([gradient]).reduce()
    assert gradient.item() == 2.0


def _syncbn():
    rank = dist.get_rank()
    groups = create_syncbn_process_group(2), None, create_syncbn_process_group(0)
    with pytest.raises(ValueError, match="wanted a divisor of the 2 processes"):
        create_syncbn_process_group(3)
    sizes = (3, 5)  # the ranks' batches may differ
    for dtype in (torch.float32, torch.float64, torch.float16):
        for shape, kwargs in (
            ((4,), {"process_group": groups[0]}),
            ((4, 3), {"momentum": None}),
            ((4, 2, 3), {"affine": False}),
            ((2, 3, 4), {"channel_last": True}),
            ((4, 2), {"track_running_stats": False}),
            ((4, 2), {"eps": 0.1, "momentum": 0.5, "fuse_relu": True}),
        ):
            torch.manual_seed(1)
            last, relu = kwargs.get("channel_last"), kwargs.get("fuse_relu")
            whole = (torch.randn(8, *shape) * 3 + 5).to(dtype)
            seeds = torch.randn(8, *shape).to(dtype)
            theirs = {k: v for k, v in kwargs.items() if k in ("momentum", "affine", "track_running_stats", "eps")}
            reference = nn.BatchNorm1d(4, **theirs).double()
            ours = SyncBatchNorm(4, **kwargs).to(torch.float64 if dtype is torch.float64 else torch.float32)
            if reference.affine:
                with torch.no_grad():
                    for norm in (reference, ours):
                        norm.weight.copy_(torch.tensor([1.0, -2.0, 0.5, 3.0]))
                        norm.bias.copy_(torch.tensor([0.0, 1.0, -1.0, 0.5]))
            tolerance = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 4e-3}[dtype]
            mine = slice(0, 3) if rank == 0 else slice(3, 8)
            for _ in range(2):
                full = whole.to(torch.float64, copy=True).requires_grad_()
                channels = full.movedim(-1, 1) if last else full
                wanted = reference(channels.flatten(2) if channels.dim() > 2 else channels).view(channels.shape)
                wanted = wanted.relu() if relu else wanted
                wanted = wanted.movedim(1, -1) if last else wanted
                part = whole[mine].clone().requires_grad_()
                got = ours(part)
                assert got.dtype is dtype and len(got) == sizes[rank]
                close = {"rtol": tolerance, "atol": tolerance, "msg": f"{dtype} {shape} {kwargs}"}
                torch.testing.assert_close(got.double(), wanted[mine], **close)
                reference.zero_grad()
                ours.zero_grad()
                (wanted * seeds.double()).sum().backward()
                (got * seeds[mine]).sum().backward()
                torch.testing.assert_close(part.grad.double(), full.grad[mine], **close)
                for param, truth in zip(ours.parameters(), reference.parameters(), strict=True):
                    dist.all_reduce(param.grad)
                    close["atol"] = 10 * tolerance
                    torch.testing.assert_close(param.grad.double(), truth.grad, **close)
            for name, buffer in reference.named_buffers():
                torch.testing.assert_close(ours.get_buffer(name).double(), buffer.double(), **close)
            ours.eval(), reference.eval()
            if reference.running_mean is not None and not last:  # no process waits for another now
                flat = whole[mine].double()
                wanted = reference(flat.flatten(2) if flat.dim() > 2 else flat).view(flat.shape)
                wanted = wanted.relu() if relu else wanted
                torch.testing.assert_close(ours(whole[mine]).double(), wanted, **close)
    _syncbn_alone(rank)
    _syncbn_double_backward(rank)


def _syncbn_alone(rank):
    """In groups of one process it is a batch norm."""
    alone = SyncBatchNorm(4, process_group=create_syncbn_process_group(1))
    x = _batch(rank) @ torch.ones(3, 4) + torch.randn(4, 4)
    torch.testing.assert_close(alone(x), nn.BatchNorm1d(4)(x))


def _syncbn_double_backward(rank):
    """A gradient of a gradient."""
    norm, reference = SyncBatchNorm(4).double(), nn.BatchNorm1d(4).double()
    whole = torch.randn(8, 4, generator=torch.Generator().manual_seed(3)).double()
    values = []
    for net, x in ((norm, whole[4 * rank : 4 * rank + 4].clone()), (reference, whole.clone())):
        x.requires_grad_()
        (slope,) = torch.autograd.grad(net(x).pow(3).sum(), x, create_graph=True)
        (curve,) = torch.autograd.grad(slope.square().sum(), x)
        values.append(curve)
    torch.testing.assert_close(values[0], values[1][4 * rank : 4 * rank + 4])


def _training():
    """Self-supervised style: converted batch norms, LARC, initialize, DDP; as one process with the whole batch."""
    rank = dist.get_rank()

    def train(level, alone):
        model = convnet()
        if not alone:
            model = convert_syncbn_model(model, process_group=create_syncbn_process_group(2))
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
        optimizer = LARC(optimizer=sgd, trust_coefficient=0.1, clip=False)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
        net = model if alone else DistributedDataParallel(model, delay_allreduce=True)
        losses = []
        for step in range(6):
            inputs, targets = images(step)
            part = slice(None) if alone else slice(4 * rank, 4 * rank + 4)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(inputs[part]), targets[part])
            backward(loss * (math.inf if step == 4 and (alone or rank == 1) else 1.0), optimizer)
            optimizer.step()
            assert optimizer._amp_stash.step_skipped is (step == 4), "on both ranks or on none"
            loss = loss.detach()
            if not alone:
                dist.all_reduce(loss)
                loss /= 2
            losses.append(loss.item())
        return losses, torch.cat([p.detach().float().flatten() for p in amp.master_params(optimizer)])

    for level in LEVELS[:4]:
        losses, weights = train(level, alone=False)
        wanted, _ = train(level, alone=True)
        tolerance = 1e-5 if level == "O0" else 0.02
        assert losses == pytest.approx(wanted, rel=tolerance, abs=tolerance), level
        both = [torch.empty_like(weights), torch.empty_like(weights)]
        dist.all_gather(both, weights)
        assert torch.equal(*both), level


@pytest.mark.slow
def test_multiproc_runs_a_script_in_as_many_processes_as_asked(tmp_path, monkeypatch, capfd):
    (tmp_path / "train.py").write_text(
        "import sys\nfrom apex import amp\nprint(sys.argv[1:])\nsys.exit(3 if sys.argv[-1] == '1' else 0)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    assert multiproc.main(["train.py", "--world-size", "7", "--lr", "0.1"], world_size=2) == 3
    assert capfd.readouterr().out.strip() == "['--world-size', '2', '--lr', '0.1', '--rank', '0']"
    assert (tmp_path / "GPU_1.log").read_text().strip() == "['--world-size', '2', '--lr', '0.1', '--rank', '1']"


@pytest.mark.parametrize("check", [_ddp, _reducer, _syncbn, _training])
def test_two_processes(ranks, check):
    ranks(check)
