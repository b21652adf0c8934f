"""apex.parallel: LARC, SyncBatchNorm, DistributedDataParallel and Reducer; one process first, then two."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.distributed as dist
import training
from conftest import DEVICES, DTYPES
from crossed import crossed
from torch import nn
from training import LEVELS, convnet

from amp_patch import amp
from amp_patch.apex import parallel
from amp_patch.apex.parallel import (
    DistributedDataParallel,
    SyncBatchNorm,
    convert_syncbn_model,
)
from amp_patch.apex.parallel.LARC import LARC


def test_where_apex_has_the_names():
    assert parallel.LARC is importlib.import_module("amp_patch.apex.parallel.LARC"), "the module, as in Apex"
    assert parallel.LARC.LARC is LARC
    for name in ("sync_batchnorm", "optimized_sync_batchnorm"):
        assert importlib.import_module(f"amp_patch.apex.parallel.{name}").SyncBatchNorm is SyncBatchNorm
    assert parallel.ReduceOp.SUM == dist.ReduceOp.SUM
    assert not isinstance(nn.Linear(1, 1), parallel.DistributedDataParallel)


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
@crossed(
    {"kwargs": [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}], "dtype": DTYPES}, meet=1
)
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


@crossed({"kwargs": [{}, {"delay_allreduce": True}, {"gradient_predivide_factor": 2.0}], "level": LEVELS}, meet=1)
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
